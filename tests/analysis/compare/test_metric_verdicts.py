"""Which metric gets which verdict, from launches written by hand: guard, sequence, and what is tested together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aorta.analysis.compare.rank_tests import mann_whitney
from aorta.analysis.compare.verdict import GUARD, Rules
from tests.analysis.by_json import intervals, judge

LEVEL = [0.50, 0.51, 0.52, 0.53, 0.54]
FIRST = "exposed_comm_ms"
SEQUENCE = (FIRST, "overlap_ratio", "compute_stall_ms")
Metrics = dict[str, dict[str, Any]]


def entry(shift: float, role: str = "secondary", launches: int = 5, order: int = 0, **changes: Any) -> dict[str, Any]:
    """A metric of which more is better; `order` rolls its launches, so that a labelling is not extreme in two metrics.

    A shift of 0.2 or more separates the sides; one of 0.01 does not.
    """
    level = np.array(LEVEL[:launches] if launches <= len(LEVEL) else np.linspace(0.5, 0.54, launches))
    left, right = np.roll(level, order), level + shift
    p = mann_whitney(left, right)
    return {
        "role": role,
        "better": "higher",
        "judgement": "better",
        "judgement_reason": None,
        "constant": False,
        "launches": {"reference": launches, "candidate": launches},
        "margin": 0.02,
        "p": p,
        "p_corrected": None,
        "values": (left, right),
        **intervals("overlap_ratio", left, right, p, 0.05),
    } | changes


def constant(role: str = "secondary", launches: int = 5) -> dict[str, Any]:
    none = np.zeros(launches)
    return entry(0.0, role, launches, constant=True, p=1.0, values=(none, none))


def guard(shift: float, role: str = "guard") -> dict[str, Any]:
    return entry(shift, role, better="lower")


def judged(metrics: Metrics, rules: Rules | None = None) -> dict[str, str | None]:
    judge(metrics, rules or Rules(), {name: found["values"] for name, found in metrics.items()})
    return {name: found["verdict"] for name, found in metrics.items()}


def test_a_slower_step_withholds_every_improvement_and_nothing_else() -> None:
    def metrics(step: float) -> Metrics:
        return {FIRST: entry(0.2, "primary"), "better": entry(0.2), "worse": entry(-0.2), GUARD: guard(step)}

    assert judged(metrics(-0.2)) == {
        FIRST: "improvement",
        "better": "improvement",
        "worse": "regression",
        GUARD: "improvement",
    }
    slower = metrics(0.2)
    assert judged(slower) == {
        FIRST: "inconclusive",
        "better": "inconclusive",
        "worse": "regression",
        GUARD: "regression",
    }
    assert "better by itself" in slower["better"]["verdict_reason"]
    unknown = metrics(0.0)
    del unknown[GUARD]
    assert judged(unknown)["better"] == "inconclusive", "a step time that nobody knows withholds too"


def test_a_step_time_that_was_itself_asked_about_withholds_nothing() -> None:
    found = judged({GUARD: guard(0.2, role="primary"), "better": entry(0.2)}, Rules(primary=GUARD))
    assert found == {GUARD: "regression", "better": "improvement"}


def in_turn(*shifts: float, launches: int = 4) -> Metrics:
    roles = ("primary", "sequence", "sequence")
    made = {name: entry(shift, role, launches) for name, shift, role in zip(SEQUENCE, shifts, roles, strict=True)}
    return made | {GUARD: entry(0.0, "guard", launches, better="lower")}


def test_each_of_the_sequence_is_tested_at_alpha_where_the_one_before_it_differs() -> None:
    """With four launches a side each p is 0.029: enough, as none of them is corrected."""
    found = in_turn(-0.2, -0.2, -0.2)
    assert [judged(found)[name] for name in SEQUENCE] == ["regression"] * 3
    assert [found[name]["p_corrected"] for name in SEQUENCE] == [None] * 3


@pytest.mark.parametrize(
    ("shifts", "words"),
    [
        ((0.01, -0.2, -0.2), ["inconclusive", "not tested", "not tested"]),
        ((-0.2, 0.01, -0.2), ["regression", "inconclusive", "not tested"]),
    ],
)
def test_behind_the_first_that_does_not_differ_none_is_tested(shifts: tuple[float, ...], words: list[str]) -> None:
    metrics = in_turn(*shifts)
    found = judged(metrics)
    assert [found[name] for name in SEQUENCE] == words
    stopped = SEQUENCE[words.index("inconclusive")]
    last = metrics["compute_stall_ms"]
    assert last["verdict_reason"] == (
        "exposed_comm_ms -> overlap_ratio -> compute_stall_ms are tested in turn, each if the one before differs: "
        f"p = {metrics[stopped]['p']:.2g} of {stopped} is above 0.05; to test it first, name it with --primary "
        "before the next launches are made"
    )
    assert last["p"] == pytest.approx(2 / 70), "its own p stays"
    assert last["needs_launches"] is None, "more launches of this metric are not what it lacks"


def test_a_smaller_effect_than_the_margin_goes_on_with_the_sequence() -> None:
    """The test found a difference; that it is too small to matter is another matter."""
    tight = np.array([0.500, 0.5001, 0.5002, 0.5003])
    first = entry(0.0, "primary", 4, p=2 / 70, **intervals("overlap_ratio", tight, tight + 0.001, 2 / 70, 0.05))
    found = judged(in_turn(0.0, -0.2, -0.2) | {FIRST: first})
    assert [found[name] for name in SEQUENCE] == ["equivalent", "shifted", "regression"]


def test_a_metric_of_one_value_neither_stops_the_sequence_nor_counts() -> None:
    metrics = in_turn(-0.2, 0.0, -0.2) | {"overlap_ratio": constant("sequence", 4)}
    assert [judged(metrics)[name] for name in SEQUENCE] == ["regression", "equivalent", "regression"]


def test_a_metric_that_is_not_judged_does_not_stop_the_sequence() -> None:
    elsewhere = entry(-0.2, "primary", 4, judgement="not judged", judgement_reason="only ratios", p=0.9)
    found = judged(in_turn(0.0, -0.2, 0.0) | {FIRST: elsewhere, GUARD: elsewhere | {"role": "guard"}})
    assert [found[name] for name in SEQUENCE] == [None, "regression", "inconclusive"]


def test_only_secondary_metrics_that_are_judged_and_vary_are_tested_together() -> None:
    metrics = {
        FIRST: entry(0.2, "primary"),
        "one": entry(0.2),
        "two": entry(0.01, order=2),
        "constant": constant(),
        "neutral": entry(0.2, better=None),
        "elsewhere": entry(0.2, judgement="not judged", judgement_reason="only ratios are judged across platforms"),
        GUARD: guard(0.0),
    }
    found = judged(metrics)
    corrected = {name: metric["p_corrected"] for name, metric in metrics.items() if metric["p_corrected"] is not None}
    assert set(corrected) == {"one", "two"}
    assert corrected["one"] == pytest.approx(4 / 252), "each has two labellings of 252 that are as extreme"
    assert corrected["two"] == metrics["two"]["p"]
    assert [found[name] for name in ("one", "constant", "neutral", "elsewhere")] == [
        "improvement",
        "equivalent",
        None,
        None,
    ]


def test_what_these_launches_cannot_decide_is_not_tested_and_says_how_many_would() -> None:
    def metrics(launches: int) -> Metrics:
        return {
            FIRST: entry(0.2, "primary", launches),
            "apart": entry(-0.2, "secondary", launches),
            "null": entry(0.001, "secondary", launches, order=2),
            GUARD: entry(0.0, "guard", launches, better="lower"),
        }

    four = metrics(4)
    assert judged(four)["apart"] == "not tested"
    assert four["apart"]["verdict_reason"] == (
        "needs 5 launches per side: with 4 against 4 launches no metric of 2 tested together (minP) can reach p <= 0.05"
    )
    assert four["apart"]["needs_launches"] == four["null"]["needs_launches"] == 5
    assert four["apart"]["p"] == pytest.approx(2 / 70), "the raw p stays"
    assert judged(metrics(5))["apart"] == "regression", "and with as many it is decided"


def test_the_interval_of_a_metric_tested_beside_others_is_that_of_its_test() -> None:
    """At 6 against 6 a raw p of 0.026 may be too much beside others: then the interval holds 0, as at that level."""
    generator = np.random.default_rng(7)
    metrics: Metrics = {FIRST: entry(0.2, "primary", 6), GUARD: guard(0.0)}
    for place in range(5):
        left, right = generator.normal(0.5, 0.02, (2, 6))
        p = mann_whitney(left, right)
        made = entry(0.0, launches=6, p=p, values=(left, right), **intervals("overlap_ratio", left, right, p, 0.05))
        metrics[f"null {place}"] = made
    judged(metrics)
    for name, found in metrics.items():
        if name.startswith("null"):
            assert found["interval_level"] > 0.95
            assert (found["effect"]["low"] <= 0 <= found["effect"]["high"]) == (found["p_corrected"] > 0.05)


def test_the_same_value_in_too_few_launches_says_nothing() -> None:
    few = constant() | {"launches": {"reference": 3, "candidate": 5}}
    assert judged({"metric": few}) == {"metric": "not tested"}
    assert few["needs_launches"] == 4
    assert "1 more of the reference" in few["verdict_reason"]


@pytest.mark.parametrize(
    ("first", "step", "verdict"),
    [
        (-0.2, 0.0, "regression"),
        (0.2, 0.0, "improvement"),
        (0.01, 0.2, "regression"),
        (0.01, -0.2, "improvement"),
        (-0.2, -0.2, "improvement"),
        (0.2, 0.2, "regression"),
        (0.01, 0.0, "inconclusive"),
    ],
)
def test_step_time_leads_and_then_the_primary_metric(first: float, step: float, verdict: str) -> None:
    metrics = {FIRST: entry(first, role="primary"), GUARD: guard(step)}
    values = {name: found["values"] for name, found in metrics.items()}
    found = judge(metrics, Rules(), values)
    assert found[0] == verdict
    assert found[1].startswith(f"{GUARD}: ") == (step != 0)


def test_a_comparison_without_its_primary_metric_or_launches_enough_is_inconclusive() -> None:
    values = {"better": entry(0.2)["values"]}
    assert judge({"better": entry(0.2)}, Rules(), values) == (
        "inconclusive",
        f"{FIRST}, the primary metric, is in neither record",
    )
    few = {FIRST: entry(-0.2, "primary", 3)}
    found = judge(few, Rules(), {FIRST: few[FIRST]["values"]})
    assert found[0] == "inconclusive"
    assert found[1].startswith("needs 4 launches per side")


@pytest.mark.parametrize(
    ("ratio", "exposed", "step", "verdict"),
    [
        (0.2, 0.01, -0.01, "shifted"),
        (0.2, 0.2, 0.0, "improvement"),
        (0.2, 0.01, -0.2, "improvement"),
        (0.2, -0.2, 0.0, "shifted"),
        (-0.2, 0.01, 0.0, "shifted"),
        (-0.2, -0.2, 0.0, "regression"),
        (-0.2, 0.01, 0.2, "regression"),
        (-0.2, 0.01, -0.2, "shifted"),
    ],
)
def test_a_share_counts_only_with_exposed_or_step_time(ratio: float, exposed: float, step: float, verdict: str) -> None:
    """Of each more is better here, of the step time less."""
    metrics = {"overlap_ratio": entry(ratio, "primary"), FIRST: entry(exposed, "sequence"), GUARD: guard(step)}
    values = {name: found["values"] for name, found in metrics.items()}
    announced, reason = judge(metrics, Rules(primary="overlap_ratio"), values)
    assert metrics["overlap_ratio"]["verdict"] == verdict
    assert (announced == "shifted") == (verdict == "shifted" and abs(step) < 0.1)
    assert ("shifted, nothing" in reason) == (announced == "shifted")


def test_across_platforms_where_only_shares_are_judged_a_share_stands() -> None:
    elsewhere = {"judgement": "not judged", "judgement_reason": "only ratios"}
    metrics = {
        "overlap_ratio": entry(-0.2, "primary"),
        FIRST: entry(0.0, "sequence", **elsewhere),
        GUARD: guard(0.0) | elsewhere,
    }
    values = {name: found["values"] for name, found in metrics.items()}
    assert judge(metrics, Rules(primary="overlap_ratio"), values)[0] == "regression"
