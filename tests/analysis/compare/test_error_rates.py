"""A small plan of `benchmarks.verdict_error_rates`: noise of real launches, no difference, no finding."""

from __future__ import annotations

import pytest

from benchmarks.verdict_error_rates import a_a, at_most, found, interval, medians, order, recorded

PLANS = 80


@pytest.mark.thorough
@pytest.mark.parametrize("launches", [4, 8])
def test_identical_launches_are_rarely_told_apart(launches: int) -> None:
    rates = a_a(recorded(), launches, PLANS)
    assert at_most(rates["false_regressions"], PLANS, 0.025), rates
    assert at_most(rates["false_improvements"], PLANS, 0.025), rates
    assert at_most(rates["any_sequence"], PLANS, 0.05), rates
    assert at_most(rates["any_secondary"], PLANS, 0.05), rates


def test_the_same_machinery_finds_what_is_there() -> None:
    """Else a rate of 0 would say nothing."""
    import numpy as np

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
