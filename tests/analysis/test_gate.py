"""The gate: how runs and launch sets are held to conditions, exit codes, the page of a CI job."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.analysis import gate
from aorta.analysis.compare.launch_set import read_subjects
from aorta.analysis.compare.verdict import Rules
from aorta.analysis.gate import SINGLE, evaluate, parse_condition
from aorta.documents.comparison import (
    AccountChange,
    AccountComparison,
    ComparedMetric,
    Comparison,
    Effect,
    FactDifference,
    Interval,
    JudgedCondition,
    LaunchEntry,
    LaunchTest,
    Power,
    Summary,
)
from aorta.documents.dataset import Statistics
from aorta.errors import InputError
from aorta.report.command import overlap_report
from aorta.report.markdown import LIMIT_BYTES, append_markdown, escaped, markdown_summary
from aorta.report.summary import summarize
from aorta.terminal_style import Style
from tests.analysis.builders import partial
from tests.analysis.compare.builders import launch


def metric(
    reference: float | None,
    candidate: float | None,
    unit: str = "ms",
    launches: tuple[int, int] = (4, 4),
    **more: Any,
) -> ComparedMetric:
    """A metric of a comparison, of which less is better."""
    known = reference is not None and candidate is not None
    told: dict[str, Any] = {
        "reference": partial(Statistics, value=reference, count=launches[0]),
        "candidate": partial(Statistics, value=candidate, count=launches[1]),
        "difference": candidate - reference if known else None,  # type: ignore[operator]
        "quotient": candidate / reference if known and reference else None,  # type: ignore[operator]
        "judgement": "worse",
    }
    return partial(ComparedMetric, unit=unit, better="lower", **told | more)


def launch_test(
    kind: Any, value: float | None, low: float | None, high: float | None, needed: int | None = None, **more: Any
) -> dict[str, LaunchTest]:
    """The test that a comparison of launches adds to a metric. The interval of the difference is that of the effect, if
    that is a difference, or else `difference_interval`.
    """
    told: dict[str, Any] = {
        "difference_interval": Interval(low, high) if kind == "difference" else Interval(None, None),
        "role": "primary",
        "effect": Effect(kind, value, low, high),
        "margin": 0.02,
        "p": 0.029,
        "verdict": "regression",
        "power": partial(Power, launches=needed),
    }
    return {"test": partial(LaunchTest, **told | more)}


def comparison(launches: int = 0, *, of: dict[str, Any] | None = None, **metrics: ComparedMetric) -> Comparison:
    """Two sides with these metrics; `of`: what else is told of them."""
    told: dict[str, Any] = {"reference": "cuda", "candidate": "rocm", "verdict": "inconclusive"}
    if launches:
        side = [partial(LaunchEntry, path=f"{number:02}", run_id="x") for number in range(launches)]
        told |= {"launches": {"reference": side, "candidate": side}, "alpha": 0.05, "primary": "overlap_ratio"}
    return partial(Comparison, metrics=metrics, **told | (of or {}))


def judged(text: str, compared: Comparison) -> JudgedCondition:
    (found,) = evaluate([parse_condition(text)], compared).conditions
    return found


# --- two single runs: the threshold alone


@pytest.mark.parametrize(
    ("text", "outcome", "value"),
    [
        ("exposed_comm_ms>2", "fail", 3),
        ("exposed_comm_ms>3", "pass", 3),  # beyond means beyond
        ("exposed_comm_ms>10%", "fail", 0.3),
        ("exposed_comm_ms>30.1%", "pass", 0.3),
        ("exposed_comm_ms<0", "pass", 3),
        ("overlap_ratio<-0.05", "fail", -0.1),
        ("ratio_delta<-0.05", "fail", -0.1),
        ("ratio_delta<-20%", "pass", -0.125),
        ("overlap_efficiency<-50%", "fail", -1),  # of a reference below 0: a part of its size
    ],
)
def test_two_single_runs_are_held_to_the_threshold_alone(text: str, outcome: str, value: float) -> None:
    compared = comparison(
        exposed_comm_ms=metric(10, 13),
        overlap_ratio=metric(0.8, 0.7, "ratio"),
        overlap_efficiency=metric(-0.2, -0.4, "ratio"),
    )
    found = judged(text, compared)
    assert (found.outcome, found.value) == (outcome, pytest.approx(value))
    assert found.reason == SINGLE
    assert (found.low, found.high, found.p) == (None, None, None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("overlap_ratio<-0.05", "candidate: no communication in this window"),
        ("exposed_allgather_ms>1", "neither side has exposed_allgather_ms"),
        ("idle_ms>5%", "the reference is 0: no percentage of it"),
    ],
)
def test_what_is_not_known_cannot_be_judged(text: str, reason: str) -> None:
    null = metric(0.8, None, "ratio", judgement="not judged", judgement_reason=reason)
    found = judged(text, comparison(overlap_ratio=null, idle_ms=metric(0, 5)))
    assert (found.outcome, found.value, found.reason) == ("inconclusive", None, reason)


# --- launches


def ratio(
    value: float,
    low: float | None,
    high: float | None,
    p: float = 0.029,
    needed: int | None = None,
    launches: Any = (4, 4),
) -> ComparedMetric:
    """The overlap ratio of launch sets, 0.8 in the reference."""
    return metric(0.8, 0.8 + value, "ratio", launches, **launch_test("difference", value, low, high, needed, p=p))


@pytest.mark.parametrize(
    ("text", "entry", "outcome", "reason"),
    [
        ("<-0.05", ratio(-0.10, -0.14, -0.06), "fail", "significant: p 0.029 is at most 0.05"),
        ("<-0.05", ratio(-0.10, -0.14, -0.01), "fail", "significant"),
        ("<-0.05", ratio(-0.10, -0.14, -0.06, 0.1), "inconclusive", "p 0.1 is above 0.05: may be chance"),
        ("<-0.05", ratio(-0.10, -0.22, 0.02, 0.04), "inconclusive", "the interval holds 0"),
        ("<-0.05", ratio(-0.02, -0.04, 0.00, 0.2), "pass", "neither is its interval"),
        ("<-0.05", ratio(-0.10, None, None), "inconclusive", "no interval"),
        ("<-0.05", ratio(-0.02, -0.08, 0.04, 0.9), "inconclusive", "the interval reaches beyond it"),
        ("<-0.05", ratio(0.10, 0.08, 0.12), "pass", "neither is its interval"),
        # An improvement can be asked for, and no difference is not one.
        ("<0.05", ratio(0.03, 0.01, 0.045, 0.9), "fail", "the whole interval is beyond"),
        ("<0.05", ratio(0.03, 0.01, 0.06, 0.9), "inconclusive", "reaches back across it"),
        ("<0.05", ratio(0.07, 0.06, 0.08, 0.9), "pass", "neither is its interval"),
        ("<0.05", ratio(0.06, 0.04, 0.08, 0.9), "inconclusive", "the interval reaches beyond it"),
        ("<0.05", ratio(0.0, -0.01, 0.01, 0.9), "fail", "the whole interval is beyond"),
        # More launches are asked for only where they are what lacks.
        ("<-0.05", ratio(-0.1, -0.2, -0.05, 0.3, needed=6), "inconclusive", "; 6 launches per side would be"),
        ("<-0.05", ratio(-0.1, -0.2, -0.05, 0.3, needed=4), "inconclusive", "may be chance"),
        ("<-0.05", ratio(-0.1, -0.2, 0.05, 0.03, needed=6), "inconclusive", "holds 0"),
        ("<-0.05", ratio(-0.04, -0.2, 0.05, 0.3, needed=6), "inconclusive", "reaches beyond it"),
        ("<0.05", ratio(0.04, 0.01, 0.06, 0.3, needed=6), "inconclusive", "reaches back across it"),
    ],
)
def test_launches_fail_only_beyond_the_threshold_and_not_by_chance(
    text: str, entry: ComparedMetric, outcome: str, reason: str
) -> None:
    found = judged(f"overlap_ratio{text}", comparison(4, overlap_ratio=entry))
    assert found.outcome == outcome
    assert reason in found.reason
    assert ("would be" in reason) == ("would be needed" in found.reason)


@pytest.mark.parametrize(
    ("test", "more", "p"),
    [
        ({"role": "primary", "p_corrected": 0.3}, {}, 0.029),
        ({"role": "guard", "p_corrected": 0.3}, {}, 0.029),
        ({"role": "secondary", "p_corrected": 0.3}, {}, 0.3),
        ({"role": "sequence"}, {}, 0.029),
        # Milliseconds across platforms were not judged: one more test beside the one of idle_ms.
        ({"role": "sequence"}, {"judgement": "not judged", "judgement_reason": "only ratios"}, 0.058),
    ],
)
def test_a_condition_is_held_to_the_p_of_its_metric(test: dict[str, Any], more: dict[str, Any], p: float) -> None:
    others = {"idle_ms": metric(1, 1, **launch_test("quotient", 0.0, -0.1, 0.1, p=0.9, p_corrected=0.9))}
    entry = metric(10, 13, **launch_test("quotient", 0.3, 0.2, 0.4, p=0.029, **test), **more)
    found = judged("exposed_comm_ms>5%", comparison(4, exposed_comm_ms=entry, **others))
    assert found.p == pytest.approx(p)
    assert found.outcome == ("fail" if p <= 0.05 else "inconclusive")


def test_an_interval_is_that_of_the_terms_of_the_condition() -> None:
    """Of a quotient the difference has an interval of its own: 5 % to 15 % of 200 ms need not be 10 to 30 ms."""
    around = {"difference_interval": Interval(9.0, 33.0)}
    entry = metric(200, 220, **launch_test("quotient", 0.1, 0.05, 0.15, **around))
    found = judged("job_step_ms>8", comparison(4, job_step_ms=entry))
    assert (found.value, found.low, found.high, found.outcome) == (20, 9, 33, "fail")
    found = judged("job_step_ms>4%", comparison(4, job_step_ms=entry))
    assert (found.value, found.low, found.high) == (pytest.approx(0.1), 0.05, 0.15)
    found = judged("overlap_ratio<-5%", comparison(4, overlap_ratio=ratio(-0.08, -0.12, -0.04)))
    assert (found.value, found.low, found.high) == pytest.approx((-0.1, -0.15, -0.05))


def test_fewer_launches_than_a_verdict_takes_neither_fail_nor_pass() -> None:
    """Not even one launch a side, if it is a set; three have no p at or below 0.05."""
    for value, sides in ((-0.1, (3, 3)), (0.0, (1, 1)), (0.0, (3, 9))):
        found = judged("overlap_ratio<-0.05", comparison(3, overlap_ratio=ratio(value, -0.02, 0.02, launches=sides)))
        assert found.outcome == "inconclusive"
        assert found.reason.startswith("needs 4 launches per side for p <= 0.05")
        assert found.value == pytest.approx(value)


def test_a_metric_that_was_not_tested_neither_fails_nor_is_it_called_chance() -> None:
    why = "needs 5 launches per side: with 4 against 4 launches no metric of 2 tested together (minP) can reach 0.05"
    told = {"role": "secondary", "verdict": "not tested", "verdict_reason": why, "p_corrected": 4 / 70}
    entry = metric(1.0, 2.0, **launch_test("quotient", 1.0, 0.5, 1.5, **told))
    found = judged("idle_ms>5%", comparison(4, idle_ms=entry))
    assert (found.outcome, found.reason) == ("inconclusive", f"not tested: {why}")
    kept = metric(1.0, 1.0, **launch_test("quotient", 0.0, -0.01, 0.01, **told))
    assert judged("idle_ms>5%", comparison(4, idle_ms=kept)).outcome == "pass"


# --- all together


@pytest.mark.parametrize(
    ("texts", "outcome", "code"),
    [
        (["idle_ms>50"], "pass", 0),
        (["idle_ms>50", "idle_ms>1"], "fail", 3),
        (["idle_ms>50", "copy_ms>1"], "inconclusive", 4),
        (["copy_ms>1", "idle_ms>1"], "fail", 3),
    ],
)
def test_a_failure_outweighs_what_cannot_be_decided(texts: list[str], outcome: str, code: int) -> None:
    compared = comparison(idle_ms=metric(1, 5))
    result = evaluate([parse_condition(text) for text in texts], compared)
    assert (result.outcome, result.exit_code) == (outcome, code)
    assert [entry.condition for entry in result.conditions] == texts


def test_the_text_of_the_terminal() -> None:
    compared = comparison(idle_ms=metric(1, 5))
    result = evaluate([parse_condition(text) for text in ("idle_ms>1", "copy_ms>10%", "idle_ms>500%")], compared)
    assert gate.gate_text(result, Style(width=300)).splitlines() == [
        "gate failed: 1 failed, 1 inconclusive, 1 passed of 3 conditions (exit code 3)",
        f"  FAIL  idle_ms>1: +4 ms: {SINGLE}",
        "  ?     copy_ms>10%: unknown: neither side has copy_ms",
        f"  pass  idle_ms>500%: +400 %: {SINGLE}",
    ]


def compared(reference: Path, candidate: Path, **rules: Any) -> Comparison:
    of = Rules(**rules)
    return summarize(read_subjects({"a": reference, "b": candidate}, of), "a", "b", of).comparison


@pytest.mark.thorough
def test_single_runs_that_did_different_work_cannot_pass(tmp_path: Path) -> None:
    other = {"workload": {"name": "ranking", "model_dim": 128}, "training": {"mixed_precision": "none"}}
    sides = launch(tmp_path / "a", 0.8), launch(tmp_path / "b", 0.8, config=other)
    condition = judged("overlap_ratio<-0.05", compared(*sides))
    assert (condition.outcome, condition.value) == ("inconclusive", pytest.approx(0))
    assert "they differ in config.workload.model_dim." in condition.reason
    assert "--allow-unlike config.workload.model_dim" in condition.reason
    for word in ("workload.model_dim", "all"):
        assert judged("overlap_ratio<-0.05", compared(*sides, allow_unlike=(word,))).outcome == "pass"


def test_over_a_reference_of_0_milliseconds_can_be_held_to_a_threshold_and_a_part_of_it_cannot() -> None:
    around = {"difference_interval": Interval(4.7, 5.0)}
    entry = metric(0, 4.85, **launch_test("quotient", None, None, None, **around))
    for text, outcome in (("exposed_comm_ms>1", "fail"), ("exposed_comm_ms>10", "pass")):
        found = judged(text, comparison(4, exposed_comm_ms=entry))
        assert (found.outcome, found.low, found.high) == (outcome, 4.7, 5.0)
    part = judged("exposed_comm_ms>10%", comparison(4, exposed_comm_ms=entry))
    assert (part.outcome, part.value) == ("inconclusive", None)


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="overlap_report.py")
    gate.add_gate_arguments(parser)
    return parser.parse_args(words)


def summary(compared: Comparison, *conditions: str) -> Summary:
    found = partial(Summary, comparison=compared)
    gate.judge(options(*(word for each in conditions for word in ("--fail-on", each))), found)
    return found


@pytest.mark.spec("D23")
def test_D23_exit_codes_files_and_the_summary(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# an earlier step\n")
    found = summary(comparison(idle_ms=metric(1, 5)), "idle_ms>1", "idle_ms>50")
    assert (found.gate.outcome, found.gate.exit_code) == ("fail", 3)
    append_markdown(tmp_path / "page.md", found)
    assert (tmp_path / "page.md").read_text().startswith("# an earlier step\n### ❌")
    nothing = summary(comparison(idle_ms=metric(1, 5)))
    assert not nothing.gate, "without a condition nothing is judged"


def test_a_condition_without_something_to_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert overlap_report(["--reference", str(launch(tmp_path / "a", 0.8)), "--fail-on", "idle_ms>1"]) == 2
    assert "give two runs: aorta report REFERENCE CANDIDATE --fail-on" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"page\.md: cannot be written: .*--markdown"):
        append_markdown(tmp_path / "file" / "page.md", summary(comparison(idle_ms=metric(1, 5)), "idle_ms>1"))


def part(name: str, cause: bool = False, parts: Sequence[AccountChange] = ()) -> AccountChange:
    told = {"reference_ms": 1.0, "candidate_ms": 13.3, "change_ms": 12.3, "low_ms": 12.0, "high_ms": 12.6}
    return AccountChange(name=name, cause=cause, parts=list(parts), **told)


def explained(*, candidate: str = "rocm", warning: str = "both sides are the same run") -> Comparison:
    """A comparison with a warning, a setting that differs, and an account."""
    account = AccountComparison(
        reason=None,
        step=part("step"),
        decided=True,
        parts=[part("exposed communication", cause=True)],
        causes=["exposed reducescatter, transfer +12.3 ms"],
        sentence="Exposed reducescatter, transfer +12.3 ms.",
    )
    told = {
        "candidate": candidate,
        "warnings": [warning],
        "manifest_differences": [FactDifference("config.fabric.kind", "none", "emulated|x")],
        "account": account,
    }
    return comparison(of=told, idle_ms=metric(1, 5), overlap_ratio=metric(0.8, 0.7, "ratio"))


GATED = "idle_ms>1", "idle_ms>500%"


def test_the_outcome_comes_first_and_the_rest_folds_away() -> None:
    text = markdown_summary(summary(explained(), *GATED))
    lines = text.splitlines()
    assert lines[0] == "### ❌ AORTA gate failed\\: 1 failed, 1 passed of 2 conditions"
    assert lines[2].startswith("rocm against cuda: **Not tested\\: hidden 80 % \\-&gt; 70 %\\.** Hidden 80 %")
    assert any(line.startswith("| ❌ failed | idle\\_ms&gt;1 | +4 ms |") for line in lines)
    assert text.index("idle\\_ms&gt;1") < text.index("**Cause:** Exposed") < text.index("<details>")
    assert "> ⚠️ both sides are the same run" in text
    assert "emulated\\|x" in text
    assert text.count("<details>") == text.count("</details>") == 3
    for title in re.findall(r"<summary>(.*)</summary>\n(.*)", text):
        assert title[1] == ""  # without an empty line GitHub shows the table as words
    assert "| step | 1 | 13.3 | +12.3 | \\+12 to \\+12\\.6 |  |" in text
    assert "| exposed communication | 1 | 13.3 | +12.3 | \\+12 to \\+12\\.6 | &lt;\\- |" in text
    tables = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    assert len(tables) == 4
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1, "cells of each row"


def test_without_a_gate_the_verdict_comes_first_and_without_a_comparison_that_is_said() -> None:
    assert markdown_summary(summary(explained())).startswith("### AORTA: not tested\n")
    assert "No comparison was asked for." in markdown_summary(partial(Summary))


@given(st.text())
def test_no_word_becomes_markup(text: str) -> None:
    line = escaped(text)
    assert "\n" not in line
    assert not re.search(r"[<>]", line)
    assert not re.search(r"(?<!\\)(?:\\\\)*[|`*_\[\]@#]", line)


def test_words_that_would_run_are_shown_as_they_are() -> None:
    hostile = "</summary><script>alert(1)</script> | @everyone `x` [a](javascript:b) \n# h"
    text = markdown_summary(summary(explained(candidate=hostile, warning=hostile), *GATED))
    assert not re.search(r"<script|^# h|(?<!\\)@", text, re.MULTILINE)


def test_what_github_would_refuse_for_its_size_is_cut_and_says_so() -> None:
    text = markdown_summary(summary(explained(warning="x" * (LIMIT_BYTES + 1)), *GATED))
    assert len(text.encode()) < LIMIT_BYTES
    assert text.startswith("### ❌ AORTA gate failed")
    assert "summary.json" in text
