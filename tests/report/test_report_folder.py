"""A whole report: files, text, nulls, pictures, names that are not UTF-8."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import msgspec
import pytest

from aorta.analysis.account import account_of
from aorta.analysis.aggregate import LabelledRun, aggregate
from aorta.analysis.findings import explain
from aorta.errors import InputError
from aorta.read.record import load_run
from aorta.records.record_file import header_of
from aorta.report import files as report_folder
from aorta.report.files import write_report
from aorta.report.page.account_bars import parts
from tests.analysis.builders import collective, header, metrics, simulated_run, step, strict_json, write_rank
from tests.autopsy import hangs
from tests.report.page_states import save_autopsy
from tests.report.pages import text_of


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_a_comparison_writes_everything_it_names(tmp_path):
    sources = {
        "cuda": simulated_run(tmp_path / "a", label="cuda", ranks=2, steps=6),
        "rocm": simulated_run(tmp_path / "b", label="rocm", ranks=2, steps=6, transfer_ms=11, platform="rocm"),
    }
    report = write_report(sources, tmp_path / "out", "cuda", "rocm")
    assert {path.name for path in report.files} == {
        *(f"{label}_timeline.png" for label in sources),
        "report.html",
        "summary.json",
    }
    for path in report.files:
        assert str(path) in report.text
        if path.suffix == ".png":
            width, height = png_size(path)
            assert 400 < width < 2500
            assert 300 < height < 2500
            assert 5_000 < path.stat().st_size < 500_000
    summary = strict_json(tmp_path / "out" / "summary.json")
    assert summary == report.summary
    assert list(summary) == ["summary_version", "aorta_version", "datasets", "comparison", "metrics"]
    assert summary["datasets"]["rocm"]["source"]["platform"] == "rocm"
    assert summary["comparison"]["metrics"]["overlap_ratio"]["judgement"] == "worse"


def test_the_collectives_of_a_dataset_are_told_with_what_limits_them(tmp_path):
    rows = [collective("reducescatter", end_source="wait"), collective("broadcast", 1)]
    for rank in range(2):
        write_rank(tmp_path, header(rank, 2), [step(rank, 2, overlap=metrics(10, 8, 4, 2), collectives=rows)])
    text = write_report({"x": tmp_path}, tmp_path / "out", html=False).text
    assert "reducescatter world 2 1 MB 1 1 1 0" in " ".join(text.split())
    assert "reducescatter: transfer is an upper bound: some ends are the end of the caller's wait." in text
    assert "No transfer time of broadcast: a rank may end this kind early" in text


def test_a_run_of_no_step_that_hung_has_a_report_on_it(tmp_path):
    write_rank(tmp_path / "run", header(), [])
    evidence = hangs.run(hangs.ddp(4), {3: hangs.stuck_in("data", step=0)})
    save_autopsy(tmp_path / "run", [msgspec.structs.replace(one, host="node3", pid=4711) for one in evidence])
    report = write_report({"x": tmp_path / "run"}, tmp_path / "out", brief=True)
    page = text_of((tmp_path / "out" / "report.html").read_text())
    assert "Overlap ratio" not in page[: page.index("Rank 3 (PID 4711")]
    assert "x: Rank 3 hung outside collectives" in report.text
    assert report.summary["datasets"]["x"]["autopsy"]["culprits"][0]["rank"] == 3


def test_an_autopsy_that_cannot_be_read_is_named(tmp_path):
    run = simulated_run(tmp_path / "run", label="x", ranks=1, steps=5)
    (run / "autopsy").mkdir()
    (run / "autopsy" / "autopsy.json").write_text('{"kind": "dea')
    with pytest.raises(InputError, match=r"autopsy\.json: cannot be read: .* move it away"):
        write_report({"x": run}, tmp_path / "out")


def test_a_full_disk_leaves_the_earlier_report_whole(tmp_path, monkeypatch):
    output = tmp_path / "out"
    write_report({"x": simulated_run(tmp_path / "one", label="x", ranks=1, steps=5)}, output)
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}

    def half(_datasets: object, _summary: object, path: Path) -> None:
        path.write_text("<html")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(report_folder, "write_page", half)
    with pytest.raises(InputError, match="No space left"):
        write_report({"x": simulated_run(tmp_path / "two", label="x", ranks=2, steps=9)}, output)
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before


def test_the_report_of_another_run_is_not_replaced_without_a_word(tmp_path, capsys):
    runs = [simulated_run(tmp_path / name, label="x", ranks=1, steps=5) for name in "ab"]
    ids = [f"2026112{number}T000000Z-abcd" for number in range(2)]
    for run, run_id in zip(runs, ids, strict=True):
        for path in run.glob("rank_*"):
            path.write_text(path.read_text().replace(header_of(path).run_id, run_id))
    output = tmp_path / "out"
    for run in (runs[0], runs[0], runs[1]):
        assert capsys.readouterr().err == ""
        write_report({"x": run}, output, html=False)
    assert capsys.readouterr().err == f"{output}: replaces the report on {ids[0]}; --output DIR keeps both\n"
    (output / "summary.json").write_text('{"datasets": {"x": {"source": 3}}}')  # not ours
    write_report({"x": runs[0]}, output, html=False)
    assert capsys.readouterr().err == ""


def test_no_rows_means_no_picture_and_no_stale_one(tmp_path):
    write_rank(tmp_path / "run", header(), [step(overlap=metrics(10, 8, 4, 2), warmup=True)])
    output = tmp_path / "out"
    write_report({"x": simulated_run(tmp_path / "full", label="x", ranks=1, steps=5)}, output)
    assert (output / "x_timeline.png").exists()
    write_report({"x": tmp_path / "run"}, output, html=False)
    assert (output / "report.html").exists(), "numbers alone delete no page"
    report = write_report({"x": tmp_path / "run"}, output)
    assert sorted(path.name for path in output.iterdir()) == ["report.html", "summary.json"]
    assert "not drawn: x_timeline.png: one step makes no curve; its numbers are in the tables" in report.text
    entry = strict_json(output / "summary.json")["datasets"]["x"]
    assert entry["count"] == 0
    assert "! nothing to measure" in report.text


def test_nulls_everywhere_are_still_json_and_still_drawn(tmp_path):
    why = "instrument.mode is off"
    blind = dict.fromkeys(metrics(10, 8, 4, 2)) | {"window_ms": 10.0, "compute_ms": 8.0}
    lines = [step(0, 1, number, overlap=blind, reasons=dict.fromkeys(blind, why), loss=None) for number in range(3)]
    write_rank(tmp_path / "run", header(instrument_mode="off"), lines)
    report = write_report({"x": tmp_path / "run"}, tmp_path / "out")
    entry = strict_json(tmp_path / "out" / "summary.json")["datasets"]["x"]
    assert entry["overlap_ratio"] is None
    assert entry["metrics"]["comm_ms"]["reason"] == why
    assert (tmp_path / "out" / "x_timeline.png").exists()
    assert report.not_drawn == {}
    assert f": {why}" in " ".join(report.text.split())


def test_a_metric_that_is_unknown_on_one_side_and_0_on_the_other_is_shown(tmp_path):
    for name, unknown in (("a", {"comm_ms": "not measured"}), ("b", {})):
        overlap = metrics(10, 8, 0, 0) | dict.fromkeys(unknown)
        write_rank(tmp_path / name, header(), [step(0, 1, at, overlap=overlap, reasons=unknown) for at in range(3)])
    text = write_report({name: tmp_path / name for name in "ab"}, tmp_path / "out", "a", "b", html=False).text
    (row,) = (line.split() for line in text[text.index("metric ") :].splitlines() if line.startswith("comm_ms "))
    assert (row[1], float(row[2])) == ("-", 0)
    assert "0 on both sides:" in text


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_bar_is_the_account_and_one_rank_hides_nothing(tmp_path, ranks):
    dataset = LabelledRun("x", load_run(simulated_run(tmp_path, label="x", ranks=ranks, steps=6), exposed=True))
    entry = aggregate(dataset)
    explain(dataset, entry, account_of(dataset))
    hidden, alone, exposed, outside, idle = parts(entry)
    assert hidden + alone + exposed + outside + idle == pytest.approx(entry.account.step_ms)
    # The optimizer is 3 ms outside of blocks; collectives of one rank are there too.
    assert (hidden > 0, exposed > 0, outside > 5) == ((True, True, False) if ranks > 1 else (False, False, True))
