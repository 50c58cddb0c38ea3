"""The gate: how runs and launch sets are held to conditions, exit codes, the page of a CI job."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aorta.analysis import gate
from aorta.analysis.gate import SINGLE, Condition, evaluate, parse_condition
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
from aorta.errors import InputError
from aorta.report.text import LIMIT_BYTES, append_markdown, escaped, markdown_summary
from aorta.terminal_style import Style
from tests.analysis.builders import partial
from tests.analysis.compare.builders import metric

CASES = json.loads(Path(__file__).with_suffix(".json").read_text())


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


# --- conditions


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("overlap_ratio<-0.05", ("overlap_ratio", "<", -0.05, False)),
        (" job_step_ms > 5 % ", ("job_step_ms", ">", 0.05, True)),
        ("ratio_delta<-.05", ("overlap_ratio", "<", -0.05, False)),
        ("exposed_allreduce_ms>1e1", ("exposed_allreduce_ms", ">", 10.0, False)),
        ("exposed_comm_ms>+2.5%", ("exposed_comm_ms", ">", 0.025, True)),
        ("idle_ms>3.", ("idle_ms", ">", 3.0, False)),
    ],
)
def test_what_is_read(text, expected):
    found = parse_condition(text)
    assert (found.metric, found.sign, found.threshold, found.relative) == pytest.approx(expected)
    assert found.text == text.strip()


@pytest.mark.parametrize(("text", "at", "message"), CASES["refused"])
def test_what_is_refused_with_its_place(text, at, message):
    with pytest.raises(InputError) as raised:
        parse_condition(text)
    said = str(raised.value)
    assert said.startswith(f"condition {text!r}: ")
    assert message in said
    assert said.splitlines()[-2:] == [f"    {text}", f"    {' ' * at}^"]


@settings(max_examples=30)
@given(st.text(max_size=30))
def test_any_text_is_a_condition_or_an_error_in_words(text):
    with contextlib.suppress(InputError):
        assert isinstance(parse_condition(text), Condition)


def gated(compared: Comparison, *conditions: str) -> Summary:
    """A summary held to conditions as the command does it."""
    parser = argparse.ArgumentParser(prog="overlap_report.py")
    gate.add_gate_arguments(parser)
    found = partial(Summary, comparison=compared)
    gate.judge(parser.parse_args([word for text in conditions for word in ("--fail-on", text)]), found)
    return found


# --- two single runs: the threshold alone


@pytest.mark.parametrize(("text", "outcome", "value"), CASES["single runs"])
def test_two_single_runs_are_held_to_the_threshold_alone(text, outcome, value):
    """Beyond means beyond; of a reference below 0 a percentage is a part of its size."""
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
def test_what_is_not_known_cannot_be_judged(text, reason):
    null = metric(0.8, None, "ratio", judgement="not judged", judgement_reason=reason)
    found = judged(text, comparison(overlap_ratio=null, idle_ms=metric(0, 5)))
    assert (found.outcome, found.value, found.reason) == ("inconclusive", None, reason)


def test_single_runs_that_did_different_work_cannot_pass():
    unlike = {"unlike": ["config.workload.model_dim"]}
    found = judged("overlap_ratio<-0.05", comparison(of=unlike, overlap_ratio=metric(0.8, 0.8, "ratio")))
    assert (found.outcome, found.value) == ("inconclusive", pytest.approx(0))
    assert "they differ in config.workload.model_dim." in found.reason
    assert "--allow-unlike config.workload.model_dim" in found.reason


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


@pytest.mark.parametrize(("text", "of", "outcome", "reason"), CASES["launches"])
def test_launches_fail_only_beyond_the_threshold_and_not_by_chance(text, of, outcome, reason):
    """An improvement can be asked for, and no difference is not one. More launches are asked for only where they are
    what lacks; fewer than a verdict takes neither fail nor pass. `of`: effect, both ends of its interval, p, launches
    that are needed, and those of the sides.
    """
    found = judged(f"overlap_ratio{text}", comparison(4, overlap_ratio=ratio(*of)))
    assert found.outcome == outcome
    assert reason in found.reason
    assert ("would be" in reason) == ("would be needed" in found.reason)


@pytest.mark.parametrize(("test", "more", "p"), CASES["p of a metric"])
def test_a_condition_is_held_to_the_p_of_its_metric(test, more, p):
    """Milliseconds across platforms are not judged: a condition on them is one more test beside that of idle_ms."""
    others = {"idle_ms": metric(1, 1, **launch_test("quotient", 0.0, -0.1, 0.1, p=0.9, p_corrected=0.9))}
    entry = metric(10, 13, **launch_test("quotient", 0.3, 0.2, 0.4, p=0.029, **test), **more)
    found = judged("exposed_comm_ms>5%", comparison(4, exposed_comm_ms=entry, **others))
    assert found.p == pytest.approx(p)
    assert found.outcome == ("fail" if p <= 0.05 else "inconclusive")


AROUND = launch_test("quotient", 0.1, 0.05, 0.15, difference_interval=Interval(9.0, 33.0))
OVER_ZERO = launch_test("quotient", None, None, None, difference_interval=Interval(4.7, 5.0))


@pytest.mark.parametrize(
    ("text", "entry", "outcome", "value", "low", "high"),
    [
        # Of a quotient the difference has an interval of its own: 5 % to 15 % of 200 ms need not be 10 to 30 ms.
        ("job_step_ms>8", metric(200, 220, **AROUND), "fail", 20, 9, 33),
        ("job_step_ms>4%", metric(200, 220, **AROUND), "fail", 0.1, 0.05, 0.15),
        ("overlap_ratio<-5%", ratio(-0.08, -0.12, -0.04), "fail", -0.1, -0.15, -0.05),
        # Over a reference of 0 milliseconds a threshold holds, and there is no part of it.
        ("job_step_ms>1", metric(0, 4.85, **OVER_ZERO), "fail", 4.85, 4.7, 5.0),
        ("job_step_ms>10", metric(0, 4.85, **OVER_ZERO), "pass", 4.85, 4.7, 5.0),
        ("job_step_ms>10%", metric(0, 4.85, **OVER_ZERO), "inconclusive", None, None, None),
    ],
)
def test_an_interval_is_that_of_the_terms_of_the_condition(text, entry, outcome, value, low, high):
    found = judged(text, comparison(4, **{text.replace(">", "<").partition("<")[0]: entry}))
    assert found.outcome == outcome
    assert (found.value, found.low, found.high) == pytest.approx((value, low, high))


def test_a_metric_that_was_not_tested_neither_fails_nor_is_it_called_chance():
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
        ([], None, None),  # without a condition nothing is judged
    ],
)
@pytest.mark.spec("D23")
def test_D23_a_failure_outweighs_what_cannot_be_decided(texts, outcome, code):
    found = gated(comparison(idle_ms=metric(1, 5)), *texts).gate
    if outcome is None:
        assert not found
    else:
        assert (found.outcome, found.exit_code) == (outcome, code)
        assert [entry.condition for entry in found.conditions] == texts


def test_the_text_of_the_terminal():
    compared = comparison(idle_ms=metric(1, 5))
    result = evaluate([parse_condition(text) for text in ("idle_ms>1", "copy_ms>10%", "idle_ms>500%")], compared)
    assert gate.gate_text(result, Style(width=300)).splitlines() == [
        "gate failed: 1 failed, 1 inconclusive, 1 passed of 3 conditions (exit code 3)",
        f"  FAIL  idle_ms>1: +4 ms: {SINGLE}",
        "  ?     copy_ms>10%: unknown: neither side has copy_ms",
        f"  pass  idle_ms>500%: +400 %: {SINGLE}",
    ]


@pytest.mark.spec("D23")
def test_D23_a_page_is_appended_to_a_file_or_the_error_says_why(tmp_path):
    (path := tmp_path / "page.md").write_text("# an earlier step\n")
    found = gated(comparison(idle_ms=metric(1, 5)), "idle_ms>1", "idle_ms>50")
    append_markdown(path, found)
    assert path.read_text().startswith("# an earlier step\n### ❌")
    with pytest.raises(InputError, match=r"page\.md: cannot be written: .*--markdown"):
        append_markdown(path / "page.md", found)


def explained(**more: Any) -> Comparison:
    """A comparison with a warning, a setting that differs, and an account."""
    change = {"reference_ms": 1.0, "candidate_ms": 13.3, "change_ms": 12.3, "low_ms": 12.0, "high_ms": 12.6}
    account = AccountComparison(
        reason=None,
        step=AccountChange(name="step", cause=False, parts=[], **change),
        decided=True,
        parts=[AccountChange(name="exposed communication", cause=True, parts=[], **change)],
        causes=["exposed reducescatter, transfer +12.3 ms"],
        sentence="Exposed reducescatter, transfer +12.3 ms.",
    )
    told = {
        "warnings": ["both sides are the same run"],
        "manifest_differences": [FactDifference("config.fabric.kind", "none", "emulated|x")],
        "account": account,
    }
    return comparison(of=told | more, idle_ms=metric(1, 5), overlap_ratio=metric(0.8, 0.7, "ratio"))


GATED = "idle_ms>1", "idle_ms>500%"


def test_the_outcome_comes_first_and_the_rest_folds_away():
    text = markdown_summary(gated(explained(), *GATED))
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


@given(st.text())
def test_no_word_becomes_markup(text):
    line = escaped(text)
    assert "\n" not in line
    assert not re.search(r"[<>]", line)
    assert not re.search(r"(?<!\\)(?:\\\\)*[|`*_\[\]@#]", line)


def test_words_that_would_run_are_shown_as_they_are_and_what_is_too_large_is_cut():
    hostile = "</summary><script>alert(1)</script> | @everyone `x` [a](javascript:b) \n# h"
    text = markdown_summary(gated(explained(candidate=hostile, warnings=[hostile]), *GATED))
    assert not re.search(r"<script|^# h|(?<!\\)@", text, re.MULTILINE)
    text = markdown_summary(gated(explained(warnings=["x" * (LIMIT_BYTES + 1)]), *GATED))
    assert len(text.encode()) < LIMIT_BYTES
    assert text.startswith("### ❌ AORTA gate failed")
    assert "summary.json" in text
    assert markdown_summary(gated(explained())).startswith("### AORTA: not tested\n")
    assert "No comparison was asked for." in markdown_summary(partial(Summary))
