"""The U test against counting out every assignment of launches to sides."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from aorta.analysis.compare.rank_tests import critical_u, mann_whitney, p_values, u_of


def counted_out(reference: list[float], candidate: list[float]) -> float:
    """Twice the share of assignments with a U as far out on the nearer side; ties count half."""

    def u(left: list[float], right: list[float]) -> float:
        return sum((b > a) + 0.5 * (a == b) for a in left for b in right)

    pool = reference + candidate
    seen = u(reference, candidate)
    every = []
    for chosen in combinations(range(len(pool)), len(reference)):
        left = [pool[place] for place in chosen]
        right = [pool[place] for place in range(len(pool)) if place not in chosen]
        every.append(u(left, right))
    low, high = (sum(value <= seen for value in every), sum(value >= seen for value in every))
    return min(1.0, 2 * min(low, high) / len(every))


@pytest.mark.parametrize(("left", "right"), [(1, 1), (2, 5), (4, 4), (3, 6), (5, 5)])
@pytest.mark.parametrize("tied", [False, True])
def test_p_is_that_of_every_assignment_counted_out(left: int, right: int, tied: bool) -> None:
    generator = np.random.default_rng(left * 10 + right)
    for _ in range(4):
        values = generator.integers(0, 4, left + right) if tied else generator.permutation(left + right)
        reference, candidate = values[:left].astype(float), values[left:].astype(float)
        expected = counted_out(reference.tolist(), candidate.tolist())
        assert mann_whitney(reference, candidate) == pytest.approx(expected)


def test_the_smallest_p_is_the_one_that_measuring_states() -> None:
    smallest = [p_values(n, n)[0] for n in (2, 3, 4, 5)]
    assert smallest == pytest.approx([0.33, 0.10, 0.029, 0.0079], rel=0.02)


def test_u_counts_pairs_in_which_the_candidate_is_larger() -> None:
    assert u_of(np.array([1.0, 2.0]), np.array([1.5, 3.0])) == 3
    assert u_of(np.array([1.0, 2.0]), np.array([2.0, 3.0])) == 3  # the two that are equal do not count


@pytest.mark.parametrize(("sizes", "expected"), [((4, 4), 16), ((5, 5), 23), ((3, 3), None), ((8, 8), 51)])
def test_critical_values_are_those_of_the_tables(sizes: tuple[int, int], expected: int | None) -> None:
    """Two-sided 0.05 of Mann-Whitney tables: U <= 0, 2 and 13 for n = 4, 5, 8, so n * n less that from above."""
    assert critical_u(*sizes, 0.05) == expected


def test_a_u_whose_p_is_alpha_is_critical() -> None:
    assert critical_u(4, 4, float(p_values(4, 4)[16])) == 16


def test_sixty_launches_a_side_are_no_burden() -> None:
    values = np.random.default_rng(0).standard_normal(120)
    assert 0 < mann_whitney(values[:60], values[60:] + 0.5) < 0.2


def test_equal_values_on_both_sides_say_nothing() -> None:
    assert mann_whitney(np.ones(4), np.ones(4)) == 1
