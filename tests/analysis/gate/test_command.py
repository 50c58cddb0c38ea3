"""The gate on a command line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from aorta.analysis.gate import gate_command
from aorta.analysis.gate.gate_command import add_gate_arguments, check_gate_options
from aorta.analysis.report.report_command import overlap_report
from aorta.errors import InputError
from tests.analysis.by_json import ended
from tests.analysis.compare.builders import launch
from tests.analysis.gate.comparisons import comparison, metric


def options(*words: str, sides: bool = True) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="overlap_report.py")
    parser.add_argument("--reference", default="cuda" if sides else None)
    parser.add_argument("--candidate", default="rocm" if sides else None)
    add_gate_arguments(parser)
    return parser.parse_args(words)


SUMMARY = {"comparison": comparison(idle_ms=metric(1, 5))}


@pytest.mark.spec("D23")
def test_D23_exit_codes_files_and_the_summary(tmp_path: Path) -> None:
    files = "--junit", str(tmp_path / "new" / "gate.xml"), "--markdown", str(tmp_path / "page.md")
    (tmp_path / "page.md").write_text("# an earlier step\n")
    summary = dict(SUMMARY)
    code, text = ended(options("--fail-on", "idle_ms>1", "--fail-on", "idle_ms>50", *files), summary)
    assert code == 3
    assert text.startswith("gate failed: 1 failed, 1 passed of 2 conditions (exit code 3)\n")
    assert text.splitlines()[-2:] == [str(tmp_path / "new" / "gate.xml"), str(tmp_path / "page.md")]
    assert ElementTree.parse(tmp_path / "new" / "gate.xml").getroot().get("failures") == "1"
    assert (tmp_path / "page.md").read_text().startswith("# an earlier step\n### ❌")
    assert summary["gate"]["outcome"] == "fail"
    json.dumps(summary, allow_nan=False)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--fail-on", "idle_ms>50"], 0),
        (["--fail-on", "copy_ms>50"], 4),
        (["--fail-on", "copy_ms>50", "--inconclusive", "pass"], 0),
        (["--fail-on", "copy_ms>50", "--inconclusive", "fail"], 3),
    ],
)
def test_how_it_ends(words: list[str], code: int) -> None:
    assert ended(options(*words), dict(SUMMARY))[0] == code


def test_without_a_condition_nothing_is_judged(tmp_path: Path) -> None:
    summary = dict(SUMMARY)
    assert ended(options(), summary) == (0, "")
    assert "gate" not in summary
    page = str(tmp_path / "page.md")
    assert ended(options("--markdown", page), summary) == (0, page)


def test_the_command_judges_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written into the summary and what the command ends with are one judgement."""
    results = []
    real = gate_command.evaluate
    monkeypatch.setattr(gate_command, "evaluate", lambda *words: results.append(real(*words)) or results[-1])
    sides = [str(launch(tmp_path / name, ratio)) for name, ratio in (("a", 0.8), ("b", 0.6))]
    words = ["--reference", sides[0], "--candidate", sides[1], "--no-html", "--output", str(tmp_path / "out")]
    assert overlap_report([*words, "--fail-on", "overlap_ratio<-0.05"]) == 3
    assert [result.outcome for result in results] == ["fail"]


@pytest.mark.parametrize(
    ("words", "sides", "message"),
    [
        (["--fail-on", "idle_ms>1"], False, "give --reference and --candidate"),
        (["--junit", "x.xml"], True, "give at least one --fail-on"),
        (["--inconclusive", "pass"], True, "give at least one --fail-on"),
    ],
)
def test_words_that_do_not_go_together(words: list[str], sides: bool, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_gate_options(options(*words, sides=sides))
    check_gate_options(options("--fail-on", "idle_ms>1"))


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    wrong = str(tmp_path / "file" / "gate.xml")
    with pytest.raises(InputError, match=r"gate\.xml: cannot be written: .*--junit"):
        ended(options("--fail-on", "idle_ms>1", "--junit", wrong), dict(SUMMARY))
