"""The command as a person runs it: from anywhere, exit codes, what it loads, writes and gives to loggers."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from aorta import loggers
from aorta.analysis.account import account_of, as_document
from aorta.analysis.aggregate import LabelledRun
from aorta.documents.dataset import DatasetEntry
from aorta.documents.metrics import SHOWN_FIRST
from aorta.errors import InputError
from aorta.read.record import load_run
from aorta.records.record_file import header_of
from aorta.report import command as report_command
from aorta.report import summary as report_summary
from aorta.report import text as terminal_text
from aorta.report.command import overlap_report
from aorta.report.page.elements import parts
from aorta.report.summary import write_report
from aorta.report.tables import ON_PAGE, Column, Table, page_table, text_lines
from aorta.report.text import MOST_LINES
from aorta.terminal_style import Style
from tests.analysis.builders import collective, header, metrics, partial, simulated_run, step, strict_json, write_rank
from tests.analysis.compare.builders import launch_set
from tests.analysis.run_builders import recorded
from tests.autopsy import hangs
from tests.logger_files import tensorboard_events
from tests.report.page_states import save_autopsy
from tests.report.pages import text_of
from tests.runs import ROOT, environment

CASES = json.loads(Path(__file__).with_suffix(".json").read_text())
HEAVY = {"torch", "pandas", "matplotlib", "scipy", "bokeh"}


@pytest.mark.spec("D20")
@pytest.mark.parametrize(("arguments", "said"), CASES["bad input"])
def test_bad_input_ends_with_2_and_one_message(arguments, said, capsys):
    assert overlap_report(arguments) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("error: ")
    assert said in streams.err


@pytest.mark.thorough
def test_a_whole_report_loads_nothing_heavy(here):
    for folder, label in (("artifacts/cuda", "cuda"), ("artifacts_rocm", "rocm")):
        simulated_run(here / folder, label=label, ranks=2, steps=5, platform=label)
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom aorta.report.command import overlap_report\n"
    code += "assert overlap_report(['--reference', 'cuda', '--candidate', 'rocm']) == 0\n"
    code += f"assert not sys.modules.keys() & {HEAVY}"
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=here, env=environment(), check=True)


@pytest.fixture
def two_sets(tmp_path):
    for label, ratio in (("base", 0.8), ("new", 0.5)):
        launch_set(tmp_path / label, [ratio, ratio + 0.01, ratio - 0.01, ratio])
    return [str(tmp_path / "base"), str(tmp_path / "new"), "--no-html", "--output", str(tmp_path / "out")]


def test_medians_and_verdicts_are_those_of_the_summary(tmp_path, two_sets, capsys):
    assert overlap_report([*two_sets, "--assume-no-drift", "--log", "tensorboard"]) == 0
    summary = strict_json(tmp_path / "out" / "summary.json")
    events = tensorboard_events(tmp_path / "out" / "tensorboard")
    for label in ("base", "new"):
        for name, entry in summary["datasets"][label]["metrics"].items():
            found = events.get(f"{label}/{name}_median")
            assert found == (None if entry["median"] is None else {0: pytest.approx(entry["median"])})
    compared = summary["comparison"]
    assert compared["verdict"] == "regression"
    assert events["new-vs-base/verdict"] == {0: "regression"}
    ratio = compared["metrics"]["overlap_ratio"]
    assert events["new-vs-base/overlap_ratio_difference"] == {0: pytest.approx(ratio["difference"])}
    assert events["new-vs-base/overlap_ratio_p"] == {0: pytest.approx(ratio["test"]["p"])}
    tests = {name: each["test"] for name, each in compared["metrics"].items()}
    corrected = {name: test["p_corrected"] for name, test in tests.items() if test["p_corrected"] is not None}
    assert any(p != tests[name]["p"] for name, p in corrected.items())
    for name, p in corrected.items():  # what the verdict beside it rests on
        assert events[f"new-vs-base/{name}_p"] == {0: pytest.approx(p)}


def test_events_of_an_earlier_report_are_replaced_and_those_of_others_stay(tmp_path, two_sets, capsys):
    folder = tmp_path / "out" / "tensorboard"
    folder.mkdir(parents=True)
    (folder / "events.out.tfevents.1.host").write_bytes(b"")
    for _ in range(2):
        assert overlap_report([*two_sets, "--log", "tensorboard"]) == 0
        assert len(list(folder.iterdir())) == 2
    assert (folder / "events.out.tfevents.1.host").exists()


@pytest.mark.parametrize(("gate", "code"), [([], 2), (["--assume-no-drift", "--fail-on", "overlap_ratio<-0.02"], 3)])
def test_a_logger_that_fails_leaves_the_report_and_the_answer_of_a_gate(
    tmp_path, two_sets, capsys, monkeypatch, gate, code
):
    def refused(name, place):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(report_command, "open_logger", refused)
    assert overlap_report([*two_sets, *gate, "--log", "wandb"]) == code
    said = capsys.readouterr()
    assert "wandb: ConnectionError: no route to host" in said.err
    assert str(tmp_path / "out" / "summary.json") in said.out


def test_a_missing_client_is_said_before_anything_is_read(tmp_path, two_sets, capsys, monkeypatch):
    monkeypatch.setattr(loggers, "find_spec", lambda _module: None)
    assert overlap_report([*two_sets, "--log", "wandb"]) == 2
    assert '--log wandb: wandb is not installed: pip install "PATH/TO/CHECKOUT[wandb]"' in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# --- the short answer, and the table model of terminal and page


BETTER, WORSE = (0.8, 0.81, 0.82, 0.83), (0.6, 0.61, 0.62, 0.63)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert overlap_report([*arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_two_sets_give_the_verdict_three_metrics_and_the_page(here, capsys):
    launch_set(here / "plan" / "reference", BETTER)
    launch_set(here / "plan" / "candidate", WORSE)
    lines = said(capsys, "plan/reference", "plan/candidate")
    assert lines[0].startswith("[x] More exposed communication: 1.85 -> 3.85 ms; ")
    assert lines[1].startswith("    Hidden 82 % -> 62 % (significant); ")
    rows = {line.split()[0]: line.split() for line in lines if line[:1].isalpha()}
    assert rows["metric"] == ["metric", "reference", "candidate", "change", "verdict"]
    assert rows["overlap_ratio"][1:3] == ["81.5", "%"]
    assert rows["overlap_ratio"][-3:] == ["points", "x", "regression"]
    assert {"exposed_comm_ms", "job_step_ms"} <= rows.keys()
    assert lines[-3].split() == ["Page:", "reports/plan/report.html"]
    assert lines[-2] == "More: aorta report plan/reference plan/candidate --all"
    assert lines[-1].endswith(": aorta report plan/reference plan/candidate --fail-on 'exposed_comm_ms>2%'")
    assert len(lines) <= MOST_LINES


@pytest.mark.parametrize(
    ("steps_ms", "next_words"),
    [
        ([120.0, 121.0, 122.0, 123.0], "Next: as a gate in CI: aorta report a b --fail-on 'job_step_ms>2%'"),
        ([98.0, 101.0, 104.0, 107.0], " new launches a side find a change of exposed_comm_ms by "),
    ],
)
def test_next_is_of_the_metric_that_decided_or_how_often_to_launch(here, capsys, steps_ms, next_words):
    launch_set(here / "a", [0.8, 0.81, 0.82, 0.83], [100.0, 101.0, 102.0, 103.0])
    launch_set(here / "b", [0.79, 0.8, 0.78, 0.82], steps_ms)
    assert next_words in said(capsys, "a", "b", "--no-html")[-1].replace(" --no-html", "")


def test_one_source_needs_no_label_and_what_to_bear_in_mind_is_said(here, capsys):
    simulated_run(here / "artifacts" / "cuda", label="cuda", ranks=2, steps=5)
    lines = said(capsys, "artifacts/cuda", "--no-html")
    assert re.fullmatch(r"cuda: \d+ % of communication hidden; [\d.]+ ms exposed in a step of [\d.]+ ms", lines[0])
    assert lines[1] == "means, and the overlap as a ratio of sums, of 2 steps on 2 ranks of artifacts/cuda"
    assert [line.split()[0] for line in lines[4:7]] == list(SHOWN_FIRST)
    assert any(line.startswith("Note: only ") and "after warm-up" in line for line in lines)
    assert lines[-2].split() == ["Summary:", "reports/cuda/summary.json"]
    assert lines[-1] == "More: aorta report artifacts/cuda --no-html --all"
    assert len(lines) <= MOST_LINES
    assert said(capsys, "cuda", "--no-html")[0].startswith("cuda: ")


def test_lines_without_room_are_counted_and_the_note_is_the_last_to_go(here, capsys, monkeypatch):
    simulated_run(here / "mine", label="mine", ranks=2, steps=12, fabric="emulated")
    whole: list[str] = []
    for most in (99, 19, 18, 17, 16, 15):
        monkeypatch.setattr(terminal_text, "MOST_LINES", most)
        lines = said(capsys, "mine", "--no-html")
        whole = whole or lines
        missing = len(whole) - sum(line in whole for line in lines)
        counts = [int(line.split()[0]) for line in lines if re.fullmatch(r"\d+ more lines?: --all", line)]
        assert counts == ([missing] if missing else [])
        noted = any(line.startswith("Note: ") for line in lines)
        assert noted or not any(line.startswith(("Most to gain", "Exposed by")) for line in lines)
    assert counts, "the last had no room for all"
    assert not any(line.startswith("Exposed by group") for line in whole), "with one group it says nothing"


def test_a_set_says_of_which_of_how_many_launches_the_numbers_are(here, capsys):
    launch_set(here / "sets", BETTER)
    assert said(capsys, "sets", "--no-html")[1] == (
        "medians of 6 steps on 2 ranks of launch 01, the nearest to the medians of 4 launches"
    )


@pytest.mark.parametrize(
    ("count", "fabric", "leads"), [(1, "none", None), (1, "emulated", None), (4, "none", "Cause: Exposed allreduce")]
)
def test_a_verdict_and_a_cause_need_launches(here, capsys, count, fabric, leads):
    for number in range(count):
        simulated_run(here / "a" / f"{number:02}", label=f"a{number}", ranks=2, steps=12, seed=number)
        folder = here / "b" / f"{number:02}"
        simulated_run(folder, label=f"b{number}", ranks=2, steps=12, transfer_ms=12, fabric=fabric, seed=number)
    lines = said(capsys, *(("a/00", "b/00") if count == 1 else ("a", "b")), "--no-html", "--allow-unlike", "all")
    assert [line for line in lines if line.startswith("Cause:")][:1] == [
        line for line in lines if leads is not None and line.startswith(leads)
    ]
    few = lines[-1] == "For a verdict, 4 launches a side: aorta ab --launches 4 (aorta ab --help)"
    assert few == (count < 4)


ROWS = [
    {"name": "first", "part": {"time_ms": 164.918}, "bytes": 26_214_400, "share": 0.561, "count": 3, "empty": None},
    {"name": "second", "part": None, "bytes": None, "share": 0.0, "count": 12, "empty": None},
]
TOLD = Table(
    "told",
    "Caption",
    (
        Column("name"),
        Column("time_ms", of="part.time_ms", why=lambda row: None if row["part"] else "not seen"),
        Column("bytes", unit="bytes", drop=1),
        Column("share", unit="ratio", drop=1),
        Column("count", unit="count", media=(ON_PAGE,)),
        Column("empty", unit=""),
    ),
    ROWS,
    note="A note.",
)


def test_a_terminal_has_units_in_the_heads_and_no_column_that_says_nothing():
    assert text_lines(TOLD) == [
        "Caption",
        "name    time, ms    bytes   share",
        "first        165  26.2 MB  56.1 %",
        "second         -        -     0 %",
        "A note.",
    ]


def test_rows_that_are_left_out_are_counted_and_columns_without_room_go_together():
    assert text_lines(TOLD, Style(terminal_width=20), most=1) == [
        "Caption",
        "name   time, ms",
        "first       165",
        "and 1 more",
        "A note.",
    ]


def test_a_page_says_why_and_sorts_by_what_is_measured():
    page = page_table(TOLD)
    cells = page.rows[1]
    assert [cell.text for cell in cells[:4]] == ["second", "\u2013", "\u2013", "0\u00a0%"]
    assert [cell.tip for cell in cells[:2]] == [None, "not seen"]
    assert page.rows[0][1].sort == 164.918
    assert [column.numeric for column in page.columns[:2]] == [False, True]


# --- a whole report: files, text, nulls, pictures


def test_a_comparison_writes_everything_it_names(tmp_path):
    sources = {
        "cuda": simulated_run(tmp_path / "a", label="cuda", ranks=2, steps=6),
        "rocm": simulated_run(tmp_path / "b", label="rocm", ranks=2, steps=6, transfer_ms=11, platform="rocm"),
    }
    report = write_report(sources, tmp_path / "out", "cuda", "rocm")
    pictures = {f"{label}_timeline.png" for label in sources}
    assert {path.name for path in report.files} == {*pictures, "report.html", "summary.json"}
    assert all(str(path) in report.text for path in report.files)
    assert all(5_000 < (tmp_path / "out" / name).stat().st_size < 500_000 for name in pictures)
    summary = strict_json(tmp_path / "out" / "summary.json")
    assert summary == report.summary
    assert list(summary) == ["summary_version", "aorta_version", "datasets", "comparison", "metrics"]
    assert summary["datasets"]["rocm"]["source"]["platform"] == "rocm"
    assert summary["comparison"]["metrics"]["overlap_ratio"]["judgement"] == "worse"


def test_the_collectives_of_a_dataset_are_told_with_what_limits_them(tmp_path):
    rows = [collective("reducescatter", end_source="wait"), collective("broadcast", 1)]
    recorded(tmp_path, lambda rank: [step(rank, 2, overlap=metrics(10, 8, 4, 2), collectives=rows)], 2)
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

    monkeypatch.setattr(report_summary, "write_page", half)
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
    assert "not drawn" not in report.text
    assert f": {why}" in " ".join(report.text.split())


def test_a_metric_that_is_unknown_on_one_side_and_0_on_the_other_is_shown(tmp_path):
    for name, unknown in (("a", {"comm_ms": "not measured"}), ("b", {})):
        overlap = metrics(10, 8, 0, 0) | dict.fromkeys(unknown)
        write_rank(tmp_path / name, header(), [step(0, 1, at, overlap=overlap, reasons=unknown) for at in range(3)])
    text = write_report({name: tmp_path / name for name in "ab"}, tmp_path / "out", "a", "b", html=False).text
    (row,) = (line.split() for line in text[text.index("metric ") :].splitlines() if line.startswith("comm_ms "))
    assert (row[1], float(row[2])) == ("-", 0)
    assert "0 on both sides:" in text


def test_collectives_of_one_rank_are_work_outside_of_blocks_that_hides_nothing(tmp_path):
    dataset = LabelledRun("x", load_run(simulated_run(tmp_path, label="x", ranks=1, steps=6), exposed=True))
    account = as_document([account_of(dataset)])
    hidden, alone, exposed, outside, idle = parts(partial(DatasetEntry, account=account))
    assert hidden + alone + exposed + outside + idle == pytest.approx(account.step_ms)
    assert (hidden, exposed, outside > 5) == (0, 0, True)  # the optimizer alone is 3 ms
