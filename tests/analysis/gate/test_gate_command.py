"""The gate on a command line: exit codes and the page of a CI job."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.analysis.documents import as_json
from aorta.analysis.gate import gate_command
from aorta.analysis.gate.gate_checks import parse_condition
from aorta.analysis.gate.gate_command import LIMIT_BYTES, add_gate_arguments, escaped
from aorta.analysis.report.report_command import overlap_report
from aorta.errors import InputError
from tests.analysis.by_json import ended, evaluate, markdown_summary
from tests.analysis.compare.builders import launch
from tests.analysis.gate.comparisons import comparison, metric

pytestmark = pytest.mark.usefixtures("no_pictures")


def options(*words: str, sides: bool = True) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="overlap_report.py")
    parser.add_argument("--reference", default="cuda" if sides else None)
    parser.add_argument("--candidate", default="rocm" if sides else None)
    add_gate_arguments(parser)
    return parser.parse_args(words)


IDLE = {"comparison": comparison(idle_ms=metric(1, 5))}


@pytest.mark.spec("D23")
def test_D23_exit_codes_files_and_the_summary(tmp_path: Path) -> None:
    files = "--markdown", str(tmp_path / "page.md")
    (tmp_path / "page.md").write_text("# an earlier step\n")
    summary = dict(IDLE)
    code, text = ended(options("--fail-on", "idle_ms>1", "--fail-on", "idle_ms>50", *files), summary)
    assert code == 3
    assert text.startswith("gate failed: 1 failed, 1 passed of 2 conditions (exit code 3)\n")
    assert text.splitlines()[-1] == str(tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text().startswith("# an earlier step\n### ❌")
    assert summary["gate"]["outcome"] == "fail"
    json.dumps(summary, allow_nan=False)


def test_without_a_condition_nothing_is_judged(tmp_path: Path) -> None:
    summary = dict(IDLE)
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


def test_a_condition_without_something_to_compare(capsys: pytest.CaptureFixture[str]) -> None:
    assert overlap_report(["--reference", "cuda", "--fail-on", "idle_ms>1"]) == 2
    assert "--fail-on judges a difference: give --reference and --candidate" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    wrong = str(tmp_path / "file" / "page.md")
    with pytest.raises(InputError, match=r"page\.md: cannot be written: .*--markdown"):
        ended(options("--fail-on", "idle_ms>1", "--markdown", wrong), dict(IDLE))


ROW = {
    "what": "reducescatter",
    "dimension": "kind",
    "reference_ms": 1.0,
    "candidate_ms": 13.3,
    "difference_ms": 12.3,
    "share": 1.0,
}
MEANS = ("exposed_comm_ms", "comm_ms", "compute_comm_ms", "compute_ms")
COMPARED = {
    **comparison(idle_ms=metric(1, 5), overlap_ratio=metric(0.8, 0.7, "ratio")),
    "warnings": ["EMULATED FABRIC in the candidate"],
    "manifest_differences": [{"key": "config.fabric.kind", "reference": "none", "candidate": "emulated|x"}],
    "attribution": {
        "sentence": "81 % of the increase is reducescatter of 25.0 MB",
        "causes": [ROW],
        "reference": dict.fromkeys(MEANS, 1.0),
        "candidate": dict.fromkeys(MEANS, 13.3),
        "dimensions": {"kind": [ROW], "part": [{**ROW, "what": "transfer", "dimension": "part"}]},
    },
}
SUMMARY = {"comparison": COMPARED}
GATED = {"gate": as_json(evaluate([parse_condition("idle_ms>1"), parse_condition("idle_ms>500%")], COMPARED))}


def test_the_outcome_comes_first_and_the_rest_folds_away() -> None:
    text = markdown_summary(SUMMARY | GATED)
    lines = text.splitlines()
    assert lines[0] == "### ❌ AORTA gate failed\\: 1 failed, 1 passed of 2 conditions"
    assert lines[2].startswith("rocm against cuda: **Not tested\\: hidden 80 % \\-&gt; 70 %\\.** Hidden 80 %")
    assert any(line.startswith("| ❌ failed | idle\\_ms&gt;1 | +4 ms |") for line in lines)
    assert text.index("idle\\_ms&gt;1") < text.index("**Where:** 81 %") < text.index("<details>")
    assert "> ⚠️ EMULATED FABRIC in the candidate" in text
    assert "emulated\\|x" in text
    assert text.count("<details>") == text.count("</details>") == 3
    for title in re.findall(r"<summary>(.*)</summary>\n(.*)", text):
        assert title[1] == ""  # without an empty line GitHub shows the table as words


def test_every_number_of_the_sentence_stands_in_a_table() -> None:
    text = markdown_summary(SUMMARY | GATED)
    assert "| exposed communication | 1 | 13.3 | 12.3 | 100% |" in text
    assert "| computation | 1 | 13.3 | 12.3 | - |" in text
    assert text.index("| reducescatter | ") < text.index("| transfer | ")


def test_rows_of_zeros_are_left_out_and_so_are_deltas_of_other_work() -> None:
    metrics = {"overlap_ratio": metric(0.8, 0.7, "ratio"), "exposed_send_ms": metric(0.0, 0.0001)}
    assert "exposed\\_send" not in markdown_summary({"comparison": comparison(**metrics)})
    unlike = {"unlike": ["header.world_size"]}
    keys = [{"key": "header.world_size", "reference": 2, "candidate": 4}]
    text = markdown_summary({"comparison": comparison(**metrics) | unlike | {"manifest_differences": keys}})
    assert text.startswith("### AORTA: not comparable\n")
    assert "| metric | reference | candidate | unit | verdict |" in text
    assert "0.1000" not in text


def test_every_row_of_a_table_has_as_many_cells_as_its_head() -> None:
    tables = re.findall(r"(?:^\|.*\|\n)+", markdown_summary(SUMMARY | GATED), re.MULTILINE)
    assert len(tables) == 4
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_without_a_gate_the_verdict_comes_first_and_without_a_comparison_that_is_said() -> None:
    assert markdown_summary(SUMMARY).startswith("### AORTA: not tested\n")
    assert markdown_summary({}) == "### AORTA report\n\nNo comparison was asked for.\n"


@given(st.text())
def test_no_word_becomes_markup(text: str) -> None:
    line = escaped(text)
    assert "\n" not in line
    assert not re.search(r"[<>]", line)
    assert not re.search(r"(?<!\\)(?:\\\\)*[|`*_\[\]@#]", line)


def test_words_that_would_run_are_shown_as_they_are() -> None:
    hostile = "</summary><script>alert(1)</script> | @everyone `x` [a](javascript:b) \n# h"
    text = markdown_summary({"comparison": {**COMPARED, "candidate": hostile, "warnings": [hostile]}} | GATED)
    assert "<script" not in text
    assert "\\@everyone" in text
    assert not re.search(r"^# h", text, re.MULTILINE)


def test_what_github_would_refuse_for_its_size_is_cut_and_says_so() -> None:
    text = markdown_summary({"comparison": {**COMPARED, "warnings": ["x" * (LIMIT_BYTES + 1)]}} | GATED)
    assert len(text.encode()) < LIMIT_BYTES
    assert text.startswith("### ❌ AORTA gate failed")
    assert "summary.json" in text
