"""The U test and step-down minP, against counting out every assignment of launches to sides."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.analysis.compare.rank_tests import (
    DRAWN,
    EXACT_LABELLINGS,
    critical_u,
    labellings,
    launches_for,
    mann_whitney,
    p_values,
    step_down,
    u_of,
)


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


Sides = tuple[np.ndarray, np.ndarray]


def sides(values: list[float], reference: int) -> Sides:
    return np.array(values[:reference], float), np.array(values[reference:], float)


def test_two_metrics_of_two_launches_a_side_by_hand() -> None:
    """Six labellings. Rank sums of the candidate in `a` (1 2 | 3 4) are 7, 3, 6, 4, 5, 5, so p = 2/6, 2/6, 4/6, 4/6,
    1, 1; in `b` (1 3 | 2 4), of the same labellings, 6, 4, 7, 3, 5, 5, so p = 4/6, 4/6, 2/6, 2/6, 1, 1. The smaller of
    both is 2/6 in four labellings: a has 4/6. Of b alone p is at most 4/6 in four labellings as well.
    """
    found = step_down({"a": sides([1, 2, 3, 4], 2), "b": sides([1, 3, 2, 4], 2)}, 0.05)
    assert {name: each.p for name, each in found.items()} == pytest.approx({"a": 4 / 6, "b": 4 / 6})


def test_metrics_that_move_together_cost_nothing() -> None:
    """Both are extreme in the same two of 70 labellings; Holm would say 0.057."""
    apart = sides([1, 2, 3, 4, 5, 6, 7, 8], 4)
    found = step_down({"a": apart, "b": (apart[0] * 3, apart[1] * 3)}, 0.05)
    assert [each.p for each in found.values()] == pytest.approx([2 / 70, 2 / 70])
    assert all(each.level is not None and each.level == 0.05 for each in found.values())


def test_a_null_metric_beside_it_makes_four_against_four_undecidable() -> None:
    """Its extremes are two labellings more: 4 of 70 have the smallest p that there is."""
    found = step_down({"a": sides([1, 2, 3, 4, 5, 6, 7, 8], 4), "b": sides([1, 5, 3, 7, 2, 6, 4, 8], 4)}, 0.05)
    assert found["a"].p == pytest.approx(4 / 70)
    assert found["a"].level is None
    assert found["b"].level is None


def by_force(values: dict[str, Sides]) -> dict[str, float]:
    """The definition, one labelling after another."""
    reference = len(next(iter(values.values()))[0])
    pooled = {name: np.concatenate(each) for name, each in values.items()}
    count = len(next(iter(pooled.values())))
    raw = {name: mann_whitney(*each) for name, each in values.items()}
    table = []
    for chosen in combinations(range(count), reference):
        rest = [at for at in range(count) if at not in chosen]
        table.append({name: mann_whitney(each[list(chosen)], each[rest]) for name, each in pooled.items()})
    adjusted: dict[str, float] = {}
    remaining, least = sorted(raw, key=raw.__getitem__), 0.0
    while remaining:
        name = remaining[0]
        hits = sum(min(row[each] for each in remaining) <= raw[name] * (1 + 1e-9) for row in table)
        least = max(least, raw[name], hits / len(table))
        adjusted[name] = least
        remaining.pop(0)
    return adjusted


@pytest.mark.parametrize("sizes", [(3, 3), (4, 4), (3, 5)])
@pytest.mark.parametrize("tied", [False, True])
def test_it_is_the_definition_worked_through_labelling_by_labelling(sizes: tuple[int, int], tied: bool) -> None:
    generator = np.random.default_rng(sum(sizes) + tied)
    for _ in range(3):
        values = {}
        for place in range(3):
            drawn = generator.integers(0, 5, sum(sizes)) if tied else generator.standard_normal(sum(sizes))
            values[str(place)] = sides([*(drawn + 2.0 * place * (np.arange(sum(sizes)) >= sizes[0]))], sizes[0])
        found = {name: each.p for name, each in step_down(values, 0.05).items()}
        assert found == pytest.approx(by_force(values))


FEW = st.integers(0, 6).map(float)
METRICS = st.lists(st.lists(FEW, min_size=9, max_size=9), min_size=1, max_size=5)


@given(METRICS, st.sampled_from([0.05, 0.2, 0.5]))
def test_step_down_is_monotone_and_its_level_says_the_same(rows: list[list[float]], alpha: float) -> None:
    values = {str(place): sides(row, 4) for place, row in enumerate(rows)}
    found = step_down(values, alpha)
    raw = {name: mann_whitney(*each) for name, each in values.items()}
    ordered = sorted(found, key=raw.__getitem__)
    adjusted = [found[name].p for name in ordered]
    assert adjusted == sorted(adjusted)
    for name, each in found.items():
        assert each.p >= raw[name] - 1e-12
        assert each.p <= min(1.0, len(rows) * raw[name]) + 1e-12, "never worse than Bonferroni"
        assert (each.p <= alpha) == (each.level is not None and raw[name] <= each.level)


def test_of_more_labellings_some_are_drawn_the_observed_one_among_them() -> None:
    labels = labellings(12, 12)
    assert labels.shape == (DRAWN, 24)
    assert labels[0].tolist() == [0.0] * 12 + [1.0] * 12
    assert (labels.sum(axis=1) == 12).all()
    assert len(labellings(10, 10)) == 184_756 <= EXACT_LABELLINGS
    generator = np.random.default_rng(3)
    values = {"a": (generator.standard_normal(12), generator.standard_normal(12) + 1)}
    p = mann_whitney(*values["a"])
    found = step_down(values, 0.05)["a"].p
    assert found == pytest.approx(p, abs=4 * (p * (1 - p) / DRAWN) ** 0.5)
    assert step_down(values, 0.05)["a"].p == found


def test_every_labelling_is_there_once_the_observed_one_first() -> None:
    labels = labellings(3, 4)
    assert labels[0].tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert len({tuple(row) for row in labels.tolist()}) == len(labels) == 35


def test_a_launch_without_a_value_counts_as_one_of_middle_rank() -> None:
    """It shares the rank of the 5: of 20 labellings two have the largest rank sum, and two the smallest."""
    found = step_down({"a": sides([1, 2, float("nan"), 5, 6, 7], 3)}, 0.05)["a"].p
    assert found == pytest.approx(4 / 20)


def test_nothing_to_test_is_no_result() -> None:
    assert step_down({}, 0.05) == {}


def test_launches_are_asked_for_by_the_worst_case() -> None:
    """2 m / C(2n, n): 2 / 70, 4 / 252, 12 / 252 = 0.048, 14 / 252 = 0.056, 14 / 924."""
    assert [launches_for(metrics, 0.05, 4) for metrics in (1, 2, 6, 7)] == [4, 5, 5, 6]
    for metrics in (2, 3, 6, 7):
        launches = launches_for(metrics, 0.05, 4)
        generator = np.random.default_rng(metrics)
        values = {"apart": (np.arange(launches) * 1.0, np.arange(launches) + 100.0)}
        for place in range(metrics - 1):
            values[str(place)] = (generator.standard_normal(launches), generator.standard_normal(launches))
        assert step_down(values, 0.05)["apart"].p <= 0.05
