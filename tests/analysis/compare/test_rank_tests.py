"""U test, step-down minP, intervals and power: by hand, against counting out every assignment, and simulated plans,
those of `benchmarks.verdict_error_rates` and `benchmarks.many_metrics` among them.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import scipy
from hypothesis import given
from hypothesis import strategies as st

from aorta.analysis.compare.rank_tests import (
    DRAWN,
    EXACT_LABELLINGS,
    accepted,
    detectable,
    estimated,
    labellings,
    launches_needed,
    least_launches,
    mann_whitney,
    p_values,
    step_down,
)
from aorta.analysis.compare.verdict import decide
from aorta.documents.comparison import Effect
from benchmarks.many_metrics import TRUTHS, setting, targets_of
from benchmarks.verdict_error_rates import a_a, at_most, found, medians, recorded


@pytest.mark.parametrize(("left", "right"), [(2, 2), (2, 5), (4, 4), (3, 6), (5, 5)])
@pytest.mark.parametrize("tied", [False, True])
def test_p_is_that_of_every_assignment_counted_out(left, right, tied):
    generator = np.random.default_rng(left * 10 + right)
    for _ in range(4):
        values = generator.integers(0, 4, left + right) if tied else generator.permutation(left + right)
        reference, candidate = values[:left].astype(float), values[left:].astype(float)
        every = scipy.stats.PermutationMethod(n_resamples=np.inf)
        expected = scipy.stats.mannwhitneyu(reference, candidate, method=every).pvalue
        assert mann_whitney(reference, candidate) == pytest.approx(expected)


def test_p_is_that_of_the_tables():
    """Two-sided 0.05: U <= 0, 2 and 13 for n = 4, 5, 8, none for 3; the smallest p are those of measuring.md."""
    assert [int((p_values(n, n)[: n * n // 2] <= 0.05).sum()) - 1 for n in (3, 4, 5, 8)] == [-1, 0, 2, 13]
    assert [p_values(n, n)[0] for n in (2, 3, 4, 5)] == pytest.approx([0.33, 0.10, 0.029, 0.0079], rel=0.02)
    assert mann_whitney(np.ones(4), np.ones(4)) == 1
    many = np.random.default_rng(0).standard_normal(140)
    assert 0 < mann_whitney(many[:70], many[70:] + 0.5) < 0.2


Sides = tuple[np.ndarray, np.ndarray]


def sides(values: list[float], reference: int) -> Sides:
    return np.array(values[:reference], float), np.array(values[reference:], float)


def adjusted(values: dict[str, Sides], alpha: float = 0.05) -> dict[str, float]:
    return {name: p for name, (p, _) in step_down(values, alpha).items()}


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
    found: dict[str, float] = {}
    remaining, least = sorted(raw, key=raw.__getitem__), 0.0
    while remaining:
        name = remaining[0]
        hits = sum(min(row[each] for each in remaining) <= raw[name] * (1 + 1e-9) for row in table)
        least = found[name] = max(least, raw[name], hits / len(table))
        remaining.pop(0)
    return found


@pytest.mark.parametrize("sizes", [(3, 3), (4, 4), (3, 5)])
@pytest.mark.parametrize("tied", [False, True])
def test_it_is_the_definition_worked_through_labelling_by_labelling(sizes, tied):
    generator = np.random.default_rng(sum(sizes) + tied)
    for _ in range(3):
        values = {}
        for place in range(3):
            drawn = generator.integers(0, 5, sum(sizes)) if tied else generator.standard_normal(sum(sizes))
            values[str(place)] = sides([*(drawn + 2.0 * place * (np.arange(sum(sizes)) >= sizes[0]))], sizes[0])
        assert adjusted(values) == pytest.approx(by_force(values))


FEW = st.integers(0, 6).map(float)
METRICS = st.lists(st.lists(FEW, min_size=9, max_size=9), min_size=1, max_size=5)


@given(METRICS, st.sampled_from([0.05, 0.2, 0.5]))
def test_step_down_is_monotone_and_its_level_says_the_same(rows, alpha):
    values = {str(place): sides(row, 4) for place, row in enumerate(rows)}
    found = step_down(values, alpha)
    raw = {name: mann_whitney(*each) for name, each in values.items()}
    in_order = [found[name][0] for name in sorted(found, key=raw.__getitem__)]
    assert in_order == sorted(in_order)
    for name, (p, level) in found.items():
        assert raw[name] - 1e-12 <= p <= min(1.0, len(rows) * raw[name]) + 1e-12, "never worse than Bonferroni"
        assert (p <= alpha) == (level is not None and raw[name] <= level)


def test_of_more_labellings_some_are_drawn_the_observed_one_among_them():
    labels = labellings(12, 12)
    assert labels.shape == (DRAWN, 24)
    assert labels[0].tolist() == [0.0] * 12 + [1.0] * 12
    assert (labels.sum(axis=1) == 12).all()
    assert len(labellings(10, 10)) == 184_756 <= EXACT_LABELLINGS
    few = labellings(3, 4)
    assert few[0].tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert len({tuple(row) for row in few.tolist()}) == len(few) == 35
    generator = np.random.default_rng(3)
    values = {"a": (generator.standard_normal(12), generator.standard_normal(12) + 1)}
    p = mann_whitney(*values["a"])
    assert adjusted(values)["a"] == pytest.approx(p, abs=4 * (p * (1 - p) / DRAWN) ** 0.5)
    assert adjusted(values) == adjusted(values)


def test_a_launch_without_a_value_counts_as_one_of_middle_rank():
    """It shares the rank of the 5: of 20 labellings two have the largest rank sum, and two the smallest."""
    assert adjusted({"a": sides([1, 2, float("nan"), 5, 6, 7], 3)})["a"] == pytest.approx(4 / 20)


def test_launches_are_asked_for_by_the_worst_case():
    """2 m / C(2n, n): 2 / 70, 4 / 252, 12 / 252 = 0.048, 14 / 252 = 0.056, 14 / 924."""
    assert [least_launches(0.05, metrics) for metrics in (1, 2, 6, 7)] == [4, 5, 5, 6]
    assert [least_launches(alpha) for alpha in (0.5, 0.05, 0.02, 0.005)] == [4, 4, 5, 6]
    assert [least_launches(alpha) for alpha in (2 / 70, 2 / 252)] == [4, 5], "a p of alpha is significant"


@pytest.mark.parametrize("kind", ["difference", "quotient"])
@pytest.mark.parametrize("sizes", [(4, 4), (5, 5), (4, 7), (8, 8)])
def test_what_lies_within_is_not_rejected_and_what_lies_outside_is(sizes, kind):
    generator = np.random.default_rng(sum(sizes))
    reference, candidate = (generator.uniform(2, 3, size) for size in sizes)
    found = accepted(reference, candidate, 0.05, kind)
    assert found is not None
    low, high = found

    def p_without(effect: float) -> float:
        return mann_whitney(reference, candidate - effect if kind == "difference" else candidate / (1 + effect))

    assert all(p_without(inside) > 0.05 for inside in np.linspace(low, high, 23)[1:-1])
    assert all(p_without(outside) <= 0.05 for outside in (low - 1e-6, low - 0.1, high + 1e-6, high + 0.1))


TIED = st.lists(st.integers(1, 6).map(float), min_size=5, max_size=5)


@given(TIED, TIED, st.sampled_from(["difference", "quotient"]), st.sampled_from([0.05, 0.01, 0.3]))
def test_where_p_is_above_the_level_it_holds_zero_and_always_the_effect(left, right, kind, level):
    """Ties included, of which pairs alone do not say what the test does."""
    reference, candidate = np.array(left), np.array(right)
    p = mann_whitney(reference, candidate)
    found = estimated(kind, reference, candidate, p, level)
    assert found.low is not None
    assert found.high is not None
    assert found.value is not None
    assert found.low <= found.value <= found.high
    assert found.holds_zero or p <= level


def test_the_effect_is_of_medians_and_over_zero_there_is_no_quotient():
    reference, candidate = np.array([1.0, 2.0, 9.0]), np.array([4.0, 3.0])
    assert estimated("difference", reference, candidate, 0.4, 0.05).value == 1.5
    assert estimated("quotient", reference, candidate, 0.4, 0.05).value == 0.75
    assert estimated("quotient", np.zeros(4), np.ones(4), 0.03, 0.05) == Effect("quotient", None, None, None)
    mixed = estimated("quotient", np.array([1.0, 1.0, 1.0, 0.0]), np.ones(4), 1.0, 0.05)
    assert mixed == Effect("quotient", 0, None, None)


def share_found(sizes: tuple[int, int], sd: float, shift: float, margin: float) -> float:
    generator, found = np.random.default_rng(1), 0
    for _ in range(1500):
        left, right = (sd * generator.standard_normal(size) for size in sizes)
        right = right + shift
        effect = Effect("difference", float(np.median(right) - np.median(left)), None, None)
        p = mann_whitney(left, right)
        found += decide(effect, p, better="lower", launches=sizes, alpha=0.05, margin=margin)[0] == "regression"
    return found / 1500


@pytest.mark.parametrize(("sizes", "sd", "margin"), [((4, 4), 1.0, 0.1), ((5, 5), 0.01, 0.02), ((4, 7), 0.05, 0.02)])
def test_the_smallest_detectable_effect_is_found_in_80_percent_of_plans(sizes, sd, margin):
    shift = detectable(*sizes, sd, margin, 0.05)
    assert shift is not None
    assert share_found(sizes, sd, shift, margin) == pytest.approx(0.8, abs=0.04)
    assert detectable(*sizes, 0.0, margin, 0.05) == margin, "without noise what is beyond the margin is found"
    assert detectable(3, 3, sd, margin, 0.05) is None


def test_launches_needed_are_those_that_find_it_in_80_percent_of_plans():
    needed = launches_needed(1.5, 1.0, 0.05)
    assert needed is not None
    assert share_found((needed, needed), 1.0, 1.5, 0.0) >= 0.77
    assert share_found((needed - 1, needed - 1), 1.0, 1.5, 0.0) <= 0.83
    assert launches_needed(-1.5, 1.0, 0.05) == needed
    assert launches_needed(100, 1.0, 0.05) == 4
    assert launches_needed(0.1, 1.0, 0.05) is None


PLANS = 80


@pytest.mark.thorough
@pytest.mark.parametrize("launches", [4, 8])
def test_identical_launches_are_rarely_told_apart(launches: int) -> None:
    rates = a_a(recorded(), launches, PLANS)
    assert at_most(rates["false_regressions"], PLANS, 0.05), rates
    assert at_most(rates["false_improvements"], PLANS, 0.05), rates
    assert at_most(rates["any_sequence"], PLANS, 0.05), rates
    assert at_most(rates["any_secondary"], PLANS, 0.05), rates
    generator = np.random.default_rng(0)
    left, right = (medians(generator, PLANS, 5, 0.01) for _ in range(2))
    hits = sum(found(a, b) == "regression" for a, b in zip(left, right * 1.2, strict=True))
    assert hits > 0.95 * PLANS, "the same machinery finds what is there"


@pytest.mark.parametrize(
    ("launches", "correlation"),
    [pytest.param(4, 0.9, marks=pytest.mark.thorough), (5, 0.0), pytest.param(8, 0.5, marks=pytest.mark.thorough)],
)
def test_metrics_tested_together_are_rarely_wrong_and_never_contradict_themselves(
    launches: int, correlation: float
) -> None:
    rows = [setting(launches, correlation, truth, 60) for truth in TRUTHS]
    assert all(targets_of(rows).values()), rows
