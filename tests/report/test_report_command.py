"""The command as a person runs it: another directory, exit codes, what it loads, what it gives to loggers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aorta import loggers
from aorta.documents.metrics import SHOWN_FIRST
from aorta.report import command as report_command
from aorta.report import text as terminal_text
from aorta.report.command import overlap_report
from aorta.report.tables import ON_PAGE, Column, Table, page_table, text_lines
from aorta.report.text import MOST_LINES
from aorta.terminal_style import Style
from tests.analysis.builders import simulated_run, strict_json
from tests.analysis.compare.builders import launch_set
from tests.logger_files import tensorboard_events

CASES = json.loads(Path(__file__).with_suffix(".json").read_text())

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ROOT / "analysis" / "overlap_report.py"
HEAVY = ("torch", "pandas", "matplotlib", "scipy", "bokeh")


def run(here: Path, *arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in `here`, or `code` followed by it; not installed, no display."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "DISPLAY")}
    start = [sys.executable, "-W", "error"]
    start += [str(COMMAND)] if code is None else ["-c", code]
    return subprocess.run([*start, *arguments], cwd=here, env=environment, capture_output=True, text=True, timeout=600)


@pytest.fixture
def two_runs(tmp_path):
    simulated_run(tmp_path / "artifacts" / "cuda", label="cuda", ranks=2, steps=5)
    simulated_run(tmp_path / "artifacts_rocm", label="rocm", ranks=2, steps=5, platform="rocm")
    return tmp_path


@pytest.mark.spec("D20")
@pytest.mark.parametrize(("arguments", "said"), CASES["bad input"])
def test_bad_input_ends_with_2_and_one_message(tmp_path, arguments, said, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert overlap_report(arguments) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("error: ")
    assert said in streams.err


def loaded_after(here: Path, code: str) -> set[str]:
    done = run(here, code=f"{code}\nimport sys\nprint('LOADED', *sys.modules)")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("LOADED")[2].split())


@pytest.mark.thorough
def test_a_whole_report_loads_nothing_heavy(two_runs):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom pathlib import Path\n"
    code += "from aorta.report.command import overlap_report\n"
    code += "assert overlap_report(['--reference', 'cuda', '--candidate', 'rocm']) == 0"
    assert loaded_after(two_runs, code).isdisjoint(HEAVY)


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
