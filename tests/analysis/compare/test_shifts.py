"""The interval of an effect is the test turned round: it holds what the test does not reject, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.analysis.compare.effects import accepted, effect_of, estimated
from aorta.analysis.compare.rank_tests import mann_whitney


def test_four_against_four_it_reaches_over_all_pairs() -> None:
    """Only U = 0 and U = 16 have p <= 0.05."""
    reference, candidate = np.array([1.0, 2.0, 3.0, 4.0]), np.array([10.0, 20.0, 30.0, 40.0])
    assert accepted(reference, candidate, 0.05, "difference") == (10 - 4, 40 - 1)
    assert accepted(reference, candidate, 0.05, "quotient") == (10 / 4 - 1, 40 / 1 - 1)


def test_five_against_five_it_leaves_two_pairs_out_on_each_side() -> None:
    """U <= 2 and U >= 23 have p <= 0.05 (tables): three pairs reject, so the third of 25 bounds it."""
    generator = np.random.default_rng(0)
    reference, candidate = generator.standard_normal(5), generator.standard_normal(5)
    pairs = np.sort((candidate[:, None] - reference).ravel())
    assert accepted(reference, candidate, 0.05, "difference") == (pairs[2], pairs[-3])


@pytest.mark.parametrize("sizes", [(4, 4), (5, 5), (4, 7), (8, 8)])
def test_what_lies_within_is_not_rejected_and_what_lies_outside_is(sizes: tuple[int, int]) -> None:
    generator = np.random.default_rng(sum(sizes))
    reference, candidate = (generator.standard_normal(size) for size in sizes)
    found = accepted(reference, candidate, 0.05, "difference")
    assert found is not None
    low, high = found
    for inside in np.linspace(low, high, 23)[1:-1]:
        assert mann_whitney(reference, candidate - inside) > 0.05
    for outside in (low - 1e-6, low - 1, high + 1e-6, high + 1):
        assert mann_whitney(reference, candidate - outside) <= 0.05


FEW = st.lists(st.integers(1, 6).map(float), min_size=5, max_size=5)


@given(FEW, FEW, st.sampled_from(["difference", "quotient"]), st.sampled_from([0.05, 0.01, 0.3]))
def test_where_p_is_above_the_level_it_holds_zero_and_always_the_effect(
    left: list[float], right: list[float], kind: str, level: float
) -> None:
    """Ties included, of which pairs alone do not say what the test does."""
    reference, candidate = np.array(left), np.array(right)
    p = mann_whitney(reference, candidate)
    found = estimated(kind, reference, candidate, p, level)  # type: ignore[arg-type]
    assert found.low is not None
    assert found.high is not None
    assert found.value is not None
    assert found.low <= found.value <= found.high
    assert found.holds_zero or p <= level


def test_the_effect_is_of_medians_of_launch_medians() -> None:
    reference, candidate = np.array([1.0, 2.0, 9.0]), np.array([4.0, 3.0])
    assert estimated("difference", reference, candidate, 0.4, 0.05).value == 1.5
    assert estimated("quotient", reference, candidate, 0.4, 0.05).value == 0.75


def test_over_zero_there_is_no_quotient() -> None:
    ones = np.ones(4)
    assert estimated("quotient", np.zeros(4), ones, 0.03, 0.05).value is None
    mixed = estimated("quotient", np.array([1.0, 1.0, 1.0, 0.0]), ones, 1.0, 0.05)
    assert (mixed.value, mixed.low, mixed.high) == (0, None, None)
    assert effect_of("quotient", 0.0, 1.0) is None


@pytest.mark.parametrize("launches", [4, 5, 8])
def test_the_interval_holds_the_truth_at_least_as_often_as_it_says(launches: int) -> None:
    """Exact: 1 less the p of the last value that rejects, 97.1, 96.8 and 95.0 % for 4, 5 and 8."""
    generator, held, plans = np.random.default_rng(launches), 0, 2000
    for _ in range(plans):
        reference, candidate = generator.standard_normal((2, launches))
        found = accepted(reference, candidate + 0.7, 0.05, "difference")
        assert found is not None
        held += found[0] <= 0.7 <= found[1]
    assert held / plans >= 0.95 - 4 * (0.05 * 0.95 / plans) ** 0.5
