"""Conditions: what is read, and how two runs or two launch sets are held to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.analysis.compare.verdict import Rules
from aorta.analysis.gate.gate_checks import SINGLE, Condition, parse_condition
from aorta.analysis.gate.gate_command import gate_text
from aorta.analysis.metrics import STEP_METRIC_NAMES
from aorta.analysis.report.report_folder import write_report
from aorta.errors import InputError
from aorta.terminal_style import Style
from tests.analysis.by_json import evaluate
from tests.analysis.compare.builders import launch, launch_set
from tests.analysis.gate.comparisons import comparison, effect, metric


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
def test_what_is_read(text: str, expected: tuple[str, str, float, bool]) -> None:
    found = parse_condition(text)
    assert (found.metric, found.sign, found.threshold, found.relative) == pytest.approx(expected)
    assert found.text == text.strip()


@pytest.mark.parametrize(
    ("text", "at", "message"),
    [
        ("overlap_ratio", 13, "no < or > in it"),
        ("<0.1", 0, "no metric before <"),
        ("overlap_ratio<=0.1", 14, "there is no <="),
        ("overlap_ratio<0.1<0.2", 17, "a second comparison"),
        ("overlap_ratio<", 14, "'' is no number"),
        ("overlap_ratio<five", 14, "'five' is no number"),
        ("overlap_ratio< 0,5", 15, "'0,5' is no number"),
        ("overlap_ratio<5ms", 14, "'5ms' is no number"),
        ("overlap_ratio<nan", 14, "'nan' is no number"),
        ("overlap_ratio<inf", 14, "'inf' is no number"),
        ("overlap_ratio<1e999", 14, "1e999 is too large"),
        ("  overlap<0.1", 2, "'overlap' is no metric; did you mean overlap_ratio"),
        ("Overlap_Ratio<0.1", 0, "'Overlap_Ratio' is no metric; did you mean overlap_ratio"),
        ("speed>3", 0, "'speed' is no metric. Known metrics: job_step_ms, overlap_ratio, "),
    ],
)
def test_what_is_refused_with_its_place(text: str, at: int, message: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_condition(text)
    said = str(raised.value)
    assert said.startswith(f"condition {text!r}: ")
    assert message in said
    assert said.splitlines()[-2:] == [f"    {text}", f"    {' ' * at}^"]
    assert raised.value.exit_code == 2


@given(st.sampled_from(STEP_METRIC_NAMES), st.sampled_from("<>"), st.floats(-1e6, 1e6), st.booleans())
def test_what_is_written_is_read_again(metric: str, sign: str, number: float, relative: bool) -> None:
    found = parse_condition(f"{metric}{sign}{number!r}{'%' if relative else ''}")
    assert (found.metric, found.sign, found.relative) == (metric, sign, relative)
    assert found.threshold == pytest.approx(number / 100 if relative else number)


@given(st.text(max_size=30))
def test_any_text_is_a_condition_or_an_error_in_words(text: str) -> None:
    try:
        found = parse_condition(text)
    except InputError:
        return
    assert isinstance(found, Condition)


def judged(text: str, compared: dict[str, Any]) -> Any:
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


def test_milliseconds_across_platforms_are_judged_when_asked_for_and_it_is_said() -> None:
    why = "only ratios are judged across platforms"
    found = judged("idle_ms>1", comparison(idle_ms=metric(1, 5, judgement="not judged", judgement_reason=why)))
    assert found.outcome == "fail"
    assert why in found.reason


# --- launches

# effect, low, high, p; outcome of overlap_ratio<-0.05
LAUNCHES = [
    (-0.10, -0.14, -0.06, 0.029, "fail", "significant: p 0.029 is at most 0.05"),
    (-0.10, -0.14, -0.01, 0.029, "fail", "significant"),
    (-0.10, -0.14, -0.06, 0.1, "inconclusive", "p 0.1 is above 0.05: may be chance"),
    (-0.10, -0.22, 0.02, 0.04, "inconclusive", "the interval holds 0"),
    (-0.02, -0.04, 0.00, 0.2, "pass", "neither is its interval"),
    (-0.02, -0.08, 0.04, 0.9, "inconclusive", "the interval reaches beyond it"),
    (0.10, 0.08, 0.12, 0.029, "pass", "neither is its interval"),
]


@pytest.mark.parametrize(("value", "low", "high", "p", "outcome", "reason"), LAUNCHES)
def test_launches_fail_only_beyond_the_threshold_and_not_by_chance(
    value: float, low: float | None, high: float | None, p: float | None, outcome: str, reason: str
) -> None:
    entry = metric(0.8, 0.8 + value, "ratio", **effect("difference", value, low, high, p=p))
    found = judged("overlap_ratio<-0.05", comparison(4, overlap_ratio=entry))
    assert found.outcome == outcome
    assert reason in found.reason


@pytest.mark.parametrize(("judgement", "outcome"), [("worse", "fail"), ("not judged", "inconclusive")])
def test_a_metric_of_the_sequence_that_was_not_judged_is_one_more_test(judgement: str, outcome: str) -> None:
    """As milliseconds across platforms; its p counts as many times as there are tests."""
    found = effect("quotient", 0.3, 0.2, 0.4, p=0.029) | {"role": "sequence"}
    others = {"idle_ms": metric(1, 1, **effect("quotient", 0.0, -0.1, 0.1, p=0.9) | {"p_corrected": 0.9})}
    entry = metric(10, 13, judgement=judgement, judgement_reason="only ratios", **found)
    assert judged("exposed_comm_ms>5%", comparison(4, exposed_comm_ms=entry, **others)).outcome == outcome


@pytest.mark.parametrize(
    ("value", "low", "high", "outcome"),
    [
        (0.03, 0.01, 0.045, "fail"),  # certainly less than was asked for
        (0.03, 0.01, 0.06, "inconclusive"),
        (0.07, 0.06, 0.08, "pass"),
        (0.06, 0.04, 0.08, "inconclusive"),
        (0.0, -0.01, 0.01, "fail"),
    ],
)
def test_an_improvement_can_be_asked_for_and_no_difference_is_not_one(
    value: float, low: float, high: float, outcome: str
) -> None:
    entry = metric(0.5, 0.5 + value, "ratio", **effect("difference", value, low, high, p=0.9))
    assert judged("overlap_ratio<0.05", comparison(4, overlap_ratio=entry)).outcome == outcome


def test_secondary_metrics_are_held_to_the_corrected_p() -> None:
    for role, outcome in (("secondary", "inconclusive"), ("guard", "fail"), ("primary", "fail")):
        more = effect("quotient", 0.2, 0.1, 0.3, p=0.029, p_corrected=0.3, role=role)
        found = judged("exposed_comm_ms>5%", comparison(4, exposed_comm_ms=metric(10, 12, **more)))
        assert found.outcome == outcome
        assert found.p == (0.3 if role == "secondary" else 0.029)


def test_an_interval_is_that_of_the_terms_of_the_condition() -> None:
    """Of a quotient the difference has an interval of its own: 5 % to 15 % of 200 ms need not be 10 to 30 ms."""
    around = {"difference_interval": {"low": 9.0, "high": 33.0}}
    entry = metric(200, 220, **effect("quotient", 0.1, 0.05, 0.15, **around))
    found = judged("job_step_ms>8", comparison(4, job_step_ms=entry))
    assert (found.value, found.low, found.high, found.outcome) == (20, 9, 33, "fail")
    found = judged("job_step_ms>4%", comparison(4, job_step_ms=entry))
    assert (found.value, found.low, found.high) == (pytest.approx(0.1), 0.05, 0.15)
    ratio = metric(0.5, 0.4, "ratio", **effect("difference", -0.1, -0.15, -0.05))
    found = judged("overlap_ratio<-5%", comparison(4, overlap_ratio=ratio))
    assert (found.value, found.low, found.high) == pytest.approx((-0.2, -0.3, -0.1))


def test_how_many_launches_are_needed_is_said_where_nothing_can_be_decided() -> None:
    entry = metric(0.8, 0.7, "ratio", **effect("difference", -0.1, -0.2, -0.05, p=0.3, launches_needed=6))
    found = judged("overlap_ratio<-0.05", comparison(4, overlap_ratio=entry))
    assert found.reason.endswith("; 6 launches per side would be needed")


@pytest.mark.parametrize(
    ("text", "value", "low", "high", "more"),
    [
        ("overlap_ratio<-0.05", -0.1, -0.2, -0.05, {"p": 0.3, "launches_needed": 4}),  # as many are there
        ("overlap_ratio<-0.05", -0.1, -0.2, 0.05, {"p": 0.03, "launches_needed": 6}),  # p is not what lacks
        ("overlap_ratio<-0.05", -0.04, -0.2, 0.05, {"p": 0.3, "launches_needed": 6}),  # it asks for less than was seen
        ("overlap_ratio<0.05", 0.04, 0.01, 0.06, {"p": 0.3, "launches_needed": 6}),  # p says nothing here
    ],
)
def test_more_launches_are_asked_for_only_where_they_are_what_lacks(
    text: str, value: float, low: float, high: float, more: dict[str, Any]
) -> None:
    entry = metric(0.8, 0.8 + value, "ratio", **effect("difference", value, low, high, **more))
    found = judged(text, comparison(4, overlap_ratio=entry))
    assert found.outcome == "inconclusive"
    assert "would be needed" not in found.reason


def test_fewer_launches_than_a_verdict_takes_neither_fail_nor_pass() -> None:
    """Not even one launch a side, if it is a set; three have no p at or below 0.05."""
    for value, sides in ((-0.1, (3, 3)), (0.0, (1, 1)), (0.0, (3, 9))):
        counts = dict(zip(("reference", "candidate"), sides, strict=True))
        entry = metric(0.8, 0.8 + value, "ratio", **effect("difference", value, -0.02, 0.02, launches=counts))
        found = judged("overlap_ratio<-0.05", comparison(3, overlap_ratio=entry))
        assert found.outcome == "inconclusive"
        assert found.reason.startswith("needs 4 launches per side for p <= 0.05")
        assert found.value == pytest.approx(value)


def test_a_metric_that_was_not_tested_neither_fails_nor_is_it_called_chance() -> None:
    why = "needs 5 launches per side: with 4 against 4 launches no metric of 2 tested together (minP) can reach 0.05"
    told = {"role": "secondary", "verdict": "not tested", "verdict_reason": why, "p_corrected": 4 / 70}
    entry = metric(1.0, 2.0, **effect("quotient", 1.0, 0.5, 1.5, **told))
    found = judged("idle_ms>5%", comparison(4, idle_ms=entry))
    assert (found.outcome, found.reason) == ("inconclusive", f"not tested: {why}")
    kept = metric(1.0, 1.0, **effect("quotient", 0.0, -0.01, 0.01, **told))
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
    assert gate_text(result, Style(width=300)).splitlines() == [
        "gate failed: 1 failed, 1 inconclusive, 1 passed of 3 conditions (exit code 3)",
        f"  FAIL  idle_ms>1: +4 ms: {SINGLE}",
        "  ?     copy_ms>10%: unknown: neither side has copy_ms",
        f"  pass  idle_ms>500%: +400 %: {SINGLE}",
    ]
    narrow = gate_text(result, Style(width=60))
    assert max(map(len, narrow.splitlines()[1:])) <= 60
    assert narrow.split() == gate_text(result).split()


def test_the_outcome_has_a_colour_where_there_is_colour() -> None:
    result = evaluate([parse_condition("idle_ms>1"), parse_condition("idle_ms>500%")], comparison(idle_ms=metric(1, 5)))
    head, *conditions = gate_text(result, Style(enabled=True, width=300)).splitlines()
    assert head.startswith("\033[1;31mgate failed")
    assert [line[:11] for line in conditions] == ["  \033[31mFAIL", "  \033[32mpass"]


def compared(folder: Path, reference: Path, candidate: Path, **rules: Any) -> dict[str, Any]:
    made = write_report({"a": reference, "b": candidate}, folder / "out", "a", "b", rules=Rules(**rules), html=False)
    found: dict[str, Any] = made.summary["comparison"]
    return found


def varied(folder: Path, comm_ms: float) -> Path:
    """Four launches whose communication takes a little longer from one to the next."""
    for number in range(4):
        step_ms, each_ms = 100 + 0.1 * number, comm_ms + 0.01 * number
        launch(folder / f"{number:02}", 0.8 + number / 1000, step_ms, comm_ms=each_ms)
    return folder


def test_four_launches_cannot_fail_what_was_left_out_of_the_correction_and_it_is_said_why(tmp_path: Path) -> None:
    sides = varied(tmp_path / "a", 10), varied(tmp_path / "b", 20)
    condition = judged("comm_ms>5%", compared(tmp_path, *sides))
    assert condition.outcome == "inconclusive"
    assert "beyond the threshold, but p" in condition.reason
    assert condition.p is not None
    assert condition.p > 2 / 70


@pytest.mark.thorough
def test_single_runs_that_did_different_work_cannot_pass(tmp_path: Path) -> None:
    other = {"workload": {"name": "ranking", "model_dim": 128}, "training": {"mixed_precision": "none"}}
    sides = launch(tmp_path / "a", 0.8), launch(tmp_path / "b", 0.8, config=other)
    condition = judged("overlap_ratio<-0.05", compared(tmp_path, *sides))
    assert (condition.outcome, condition.value) == ("inconclusive", pytest.approx(0))
    assert "they differ in config.workload.model_dim." in condition.reason
    assert "--allow-unlike config.workload.model_dim" in condition.reason
    for word in ("workload.model_dim", "all"):
        assert judged("overlap_ratio<-0.05", compared(tmp_path, *sides, allow_unlike=(word,))).outcome == "pass"


@pytest.mark.thorough
def test_milliseconds_can_be_held_to_a_threshold_over_a_reference_of_0(tmp_path: Path) -> None:
    """There all communication is hidden; 5 ms are not, in every launch of the candidate."""
    sides = launch_set(tmp_path / "a", [1.0] * 4), launch_set(tmp_path / "b", [0.5, 0.51, 0.52, 0.53])
    for folder in (tmp_path / "a").iterdir():
        for file in folder.glob("rank_*"):  # the steps differ by thousandths; here exactly nothing is exposed
            file.write_text(nothing_exposed(file.read_text()))
    found = compared(tmp_path, *sides, primary="exposed_comm_ms")
    assert found["metrics"]["exposed_comm_ms"]["reference"] == 0
    assert found["metrics"]["exposed_comm_ms"]["effect"]["value"] is None
    condition = judged("exposed_comm_ms>1", found)
    assert (condition.outcome, condition.value) == ("fail", pytest.approx(4.85))
    assert condition.low == pytest.approx(4.7, abs=0.02)
    assert condition.high == pytest.approx(5.0, abs=0.02)
    assert judged("exposed_comm_ms>10", found).outcome == "pass"
    assert judged("exposed_comm_ms>10%", found).reason == "the reference is 0: no percentage of it"


def nothing_exposed(text: str) -> str:
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        if line["record"] == "step":
            line["overlap"]["exposed_comm_ms"] = 0.0
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_why_a_part_of_the_reference_has_no_interval(tmp_path: Path) -> None:
    """One launch in four hides all: some resamples of the reference are 0, though the reference is not."""
    sides = launch_set(tmp_path / "a", [0.8, 0.81, 0.82, 1.0]), launch_set(tmp_path / "b", [0.5, 0.51, 0.52, 0.53])
    for file in (tmp_path / "a" / "03").glob("rank_*"):
        file.write_text(nothing_exposed(file.read_text()))
    found = compared(tmp_path, *sides, primary="exposed_comm_ms")
    part = judged("exposed_comm_ms>10%", found)
    assert part.outcome == "inconclusive"
    assert part.reason == "no interval: the reference is 0, or the interval would divide by 0"
    assert judged("exposed_comm_ms>1", found).outcome == "fail"
