"""Small plans of `benchmarks.verdict_error_rates` and `benchmarks.many_metrics`: no difference, hardly a finding."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from aorta.analysis.compare.verdict import SEQUENCE
from benchmarks.many_metrics import OTHERS, TRUTHS, contradicts, holm, judged, plan, setting, targets_of
from benchmarks.verdict_error_rates import a_a, at_most, found, interval, medians, order, recorded

PLANS = 80


@pytest.mark.thorough
@pytest.mark.parametrize("launches", [4, 8])
def test_identical_launches_are_rarely_told_apart(launches: int) -> None:
    rates = a_a(recorded(), launches, PLANS)
    assert at_most(rates["false_regressions"], PLANS, 0.05), rates
    assert at_most(rates["false_improvements"], PLANS, 0.05), rates
    assert at_most(rates["any_sequence"], PLANS, 0.05), rates
    assert at_most(rates["any_secondary"], PLANS, 0.05), rates


def test_the_same_machinery_finds_what_is_there() -> None:
    """Else a rate of 0 would say nothing."""
    generator = np.random.default_rng(0)
    left, right = (medians(generator, PLANS, 5, 0.01) for _ in range(2))
    hits = sum(found(a, b) == "regression" for a, b in zip(left, right * 1.2, strict=True))
    assert hits > 0.95 * PLANS


def test_an_effect_of_the_margin_is_rarely_called_equivalent() -> None:
    assert interval(8, PLANS, 0.005, 0.005)["equivalent_at_the_margin"] < 0.1


def test_on_a_machine_that_wanders_only_launches_in_turns_are_rarely_told_apart() -> None:
    rates = order(8, PLANS)
    assert rates["a_then_b"] > 0.15, rates
    assert rates["a_b_b_a"] <= 0.025, rates
    assert rates["accepted_mean"] <= 0.025 < rates["refused_mean"], rates


@pytest.mark.parametrize(
    ("launches", "correlation"),
    [pytest.param(4, 0.9, marks=pytest.mark.thorough), (5, 0.0), pytest.param(8, 0.5, marks=pytest.mark.thorough)],
)
def test_metrics_tested_together_are_rarely_wrong_and_never_contradict_themselves(
    launches: int, correlation: float
) -> None:
    rows = [setting(launches, correlation, truth, 60) for truth in TRUTHS]
    assert all(targets_of(rows).values()), rows


def test_the_same_machinery_finds_what_is_there_where_holm_cannot() -> None:
    """Else no false finding would say nothing."""
    several = setting(4, 0.5, "several", 60)
    assert several["power"]["overlap_ratio"] > 0.8
    assert several["power_holm"]["overlap_ratio"] == 0.0
    assert several["undecidable"] > 0.9
    five = setting(5, 0.5, "several", 60)
    assert min(five["power"].values()) > 0.8
    assert five["undecidable"] == 0.0


def test_a_contradiction_would_be_seen() -> None:
    found = judged(plan(np.random.default_rng(1), 5, 0.0, (*SEQUENCE, *OTHERS)))
    entry = found["overlap_ratio"]
    assert not contradicts(entry)
    assert entry.verdict == "regression"
    effect = replace(entry.test.effect, high=0.1)
    for change in ({"verdict": "inconclusive"}, {"effect": effect}, {"verdict": "equivalent"}):
        assert contradicts(replace(entry, test=replace(entry.test, **change)))


def test_holm_by_hand() -> None:
    """Sorted: 4 x 0.005, 3 x 0.01, 2 x 0.03, 1 x 0.04, of which none may fall below the one before."""
    found = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert found == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
