"""What could have been found, against plans simulated one by one and judged by the product's own decision."""

from __future__ import annotations

import numpy as np
import pytest

from aorta.analysis.compare.effects import Effect, detectable, launches_needed, pooled_sd
from aorta.analysis.compare.rank_tests import mann_whitney
from aorta.analysis.compare.verdict import Evidence, decide


def share_found(sizes: tuple[int, int], sd: float, shift: float, margin: float, plans: int = 1500) -> float:
    generator, found = np.random.default_rng(1), 0
    for _ in range(plans):
        left, right = (sd * generator.standard_normal(size) for size in sizes)
        right = right + shift
        seen = Effect("difference", float(np.median(right) - np.median(left)), None, None)
        evidence = Evidence("lower", seen, mann_whitney(left, right), sizes, 0.05, margin)
        found += decide(evidence)[0] == "regression"
    return found / plans


@pytest.mark.parametrize(("sizes", "sd", "margin"), [((4, 4), 1.0, 0.1), ((5, 5), 0.01, 0.02), ((4, 7), 0.05, 0.02)])
def test_the_smallest_detectable_effect_is_found_in_80_percent_of_plans(
    sizes: tuple[int, int], sd: float, margin: float
) -> None:
    shift = detectable(*sizes, sd, margin, 0.05)
    assert shift is not None
    assert share_found(sizes, sd, shift, margin) == pytest.approx(0.8, abs=0.04)


def test_without_noise_what_is_beyond_the_margin_is_found() -> None:
    assert detectable(4, 4, 0.0, 0.02, 0.05) == 0.02


def test_with_three_launches_nothing_is() -> None:
    assert detectable(3, 3, 0.01, 0.02, 0.05) is None


def test_launches_needed_are_those_that_find_it_in_80_percent_of_plans() -> None:
    needed = launches_needed(1.5, 1.0, 0.05)
    assert needed is not None
    assert share_found((needed, needed), 1.0, 1.5, 0.0) >= 0.77
    assert share_found((needed - 1, needed - 1), 1.0, 1.5, 0.0) <= 0.83
    assert launches_needed(-1.5, 1.0, 0.05) == needed
    assert launches_needed(100, 1.0, 0.05) == 4
    assert launches_needed(0.1, 1.0, 0.05) is None


def test_the_pooled_deviation_is_not_too_small_on_average() -> None:
    generator = np.random.default_rng(4)
    draws = [pooled_sd(generator.normal(0, 2, 4), generator.normal(9, 2, 3)) for _ in range(4000)]
    assert np.mean([draw for draw in draws if draw is not None]) == pytest.approx(2, rel=0.02)
    assert pooled_sd(np.ones(1), np.ones(1)) is None
