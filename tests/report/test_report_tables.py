"""`aorta report --tables`: the files, read back with pandas, against the summary beside them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from aorta.report import files as report_folder
from aorta.report.files import write_report
from aorta.report.run_tables import METRICS
from aorta.report.table_files import FORMATS
from aorta.report.tables import IN_FILE
from tests.analysis.builders import simulated_run, strict_json
from tests.analysis.compare.builders import launch_set
from tests.docs.pages import ROOT, code, first_column, section

pytestmark = pytest.mark.usefixtures("no_pictures")

STEPS, COLLECTIVES = (
    [column.key for column in columns] for columns in (report_folder.STEPS, report_folder.COLLECTIVES)
)

SAMPLE = ROOT / "tests" / "samples" / "two_gloo_ranks"


def read(folder: Path, name: str, form: str) -> pd.DataFrame:
    path = folder / "tables" / f"{name}.{form}"
    return pd.read_parquet(path) if form == "parquet" else pd.read_csv(path)


@pytest.mark.thorough
@pytest.mark.parametrize("form", FORMATS)
def test_steps_and_collectives_add_up_to_the_summary(tmp_path, form, monkeypatch):
    monkeypatch.setattr(report_folder, "FRAME_ROWS", 1)  # a frame per rank: they must fit together
    sources = {"sample": SAMPLE, "made": simulated_run(tmp_path / "made", label="made", ranks=3, steps=7, warmup=2)}
    report = write_report(sources, tmp_path / "out", html=False, tables=form)
    assert {path for path in report.files if path.parent.name == "tables"} == {
        tmp_path / "out" / "tables" / f"{name}.{form}" for name in ("steps", "collectives", "metrics")
    }
    steps, rows = read(tmp_path / "out", "steps", form), read(tmp_path / "out", "collectives", form)
    summary = strict_json(tmp_path / "out" / "summary.json")
    assert list(summary["datasets"]) == list(sources)
    for label, entry in summary["datasets"].items():
        mine = steps[steps["label"] == label]
        used = mine[~mine["warmup"]]
        assert (len(mine), len(used)) == (entry["steps"]["rank_steps_read"], entry["steps"]["rank_steps_used"])
        for name in ("overlap_ratio", "exposed_comm_ms", "window_ms"):
            assert used[name].median() == pytest.approx(entry["metrics"][name]["median"])
            assert used[name].sum() == pytest.approx(entry["metrics"][name]["mean"] * entry["metrics"][name]["count"])
        assert mine.groupby("global_step")["rank"].nunique().eq(entry["source"]["world_size"]).all()
        assert mine["launch"].isna().all()
        of_label = rows[(rows["label"] == label) & ~rows["warmup"]]
        assert len(of_label) == sum(each["rows"] for each in entry["collectives"])
        for each in entry["collectives"]:
            same = of_label[(of_label["bytes"] == each["bytes"]) & (of_label["kind"] == each["kind"])]
            assert same["wait_ms"].median() == pytest.approx(each["wait_ms"]["median"])
            per_instance = same.groupby("instance")
            assert len(per_instance) == each["collectives"]
            assert per_instance["transfer_ms"].first().median() == pytest.approx(each["transfer_ms"]["median"])


def test_a_comparison_of_launches_has_rows_per_launch_and_the_verdicts(tmp_path):
    sides = {
        "base": launch_set(tmp_path / "base", [0.8, 0.81, 0.79, 0.8]),
        "new": launch_set(tmp_path / "new", [0.5, 0.51, 0.49, 0.5]),
    }
    write_report(sides, tmp_path / "out", "base", "new", html=False, tables="parquet")
    steps = read(tmp_path / "out", "steps", "parquet")
    assert steps.groupby(["label", "launch"]).size().to_dict() == {
        (label, f"{number:02}"): 14 for label in sides for number in range(4)
    }
    summary = strict_json(tmp_path / "out" / "summary.json")
    compared = read(tmp_path / "out", "comparison", "parquet").set_index("metric")
    page = section(ROOT / "artifacts" / "README.md", "`tables/comparison`")
    assert {"metric", *compared.columns} == {each for cell in first_column(page) for each in code(cell)}
    assert list(compared.index) == list(summary["comparison"]["metrics"])
    row, entry = compared.loc["overlap_ratio"], summary["comparison"]["metrics"]["overlap_ratio"]
    for name in ("reference", "candidate", "difference", "p", "verdict", "role", "unit"):
        assert row[name] == entry[name]
    assert row["difference_low"] == entry["difference_interval"]["low"]
    assert row["reference_launches"] == entry["launches"]["reference"]
    metrics = read(tmp_path / "out", "metrics", "parquet").set_index(["label", "metric"])
    assert metrics.loc[("new", "overlap_ratio"), "median"] == summary["datasets"]["new"]["overlap_ratio"]


def test_columns_are_the_documented_ones_whatever_a_source_has(tmp_path):
    metrics = [column.key for column in METRICS if IN_FILE in column.media]
    wanted = {"steps": STEPS, "collectives": COLLECTIVES, "metrics": metrics}
    write_report({"sample": SAMPLE}, tmp_path / "out", html=False, tables="csv")
    assert {name: list(read(tmp_path / "out", name, "csv").columns) for name in wanted} == wanted
    page = ROOT / "artifacts" / "README.md"
    told = {
        name: {each for cell in first_column(section(page, f"`tables/{name}`")) for each in code(cell)}
        for name in ("steps", "collectives", "metrics")
    }
    assert told["steps"] == {*STEPS} - set(report_folder.METRICS_OF_STEPS)
    assert told["collectives"] == {*COLLECTIVES}
    assert told["metrics"] == {*metrics}


@pytest.mark.thorough
def test_tables_of_an_earlier_report_are_removed_and_nothing_else(tmp_path):
    sides = {label: simulated_run(tmp_path / label, label=label, ranks=2) for label in ("base", "new")}
    folder = tmp_path / "out" / "tables"
    write_report(sides, tmp_path / "out", "base", "new", html=False, tables="csv.gz")
    assert (folder / "comparison.csv.gz").exists()
    (folder / "mine.csv").write_text("")
    write_report({"base": sides["base"]}, tmp_path / "out", html=False, tables="csv")
    assert {path.name for path in folder.iterdir()} == {"steps.csv", "collectives.csv", "metrics.csv", "mine.csv"}
    (folder / "mine.csv").unlink()
    write_report({"base": sides["base"]}, tmp_path / "out", html=False)
    assert not folder.exists()


def test_frames_are_small_however_large_the_run(tmp_path, monkeypatch):
    sizes: dict[str, list[int]] = {}
    real = report_folder.write_table

    def watched(found, path):
        rows = sizes.setdefault(path.name.split(".")[-2], [])
        return real((rows.append(len(frame)) or frame for frame in found), path)

    monkeypatch.setattr(report_folder, "write_table", watched)
    monkeypatch.setattr(report_folder, "FRAME_ROWS", 10)
    made = simulated_run(tmp_path / "made", label="made", ranks=4, steps=5)
    write_report({"made": made}, tmp_path / "out", html=False, tables="csv")
    assert sizes["steps"] == [0, 10, 10]  # the columns, then two ranks of five steps at a time
    columns, *frames = sizes["collectives"]
    assert (columns, len(frames)) == (0, 5)  # a step is the least
    assert sum(frames) == len(read(tmp_path / "out", "collectives", "csv"))
