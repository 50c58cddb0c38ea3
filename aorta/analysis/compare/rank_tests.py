"""Statistics of launches, from one value per launch and side: exact Mann-Whitney U, step-down minP over labellings
(which launches are the candidate's), the effect with the interval of its test, and the effect that could be detected.

Must not: see steps (they are correlated), use the normal approximation where launches are few, let a metric be tested
after one that was not significant, give an interval that the test could not have bounded, or quote the power of another
design.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from functools import lru_cache
from itertools import combinations
from math import comb, exp, lgamma, sqrt
from typing import Final

import numpy as np

from aorta.analysis.pace import doubled_ranks
from aorta.documents.comparison import Effect, EffectKind
from aorta.read.frames import Bools, Floats

LEAST_LAUNCHES: Final = 4
"""Launches per side. With three against three the smallest two-sided Mann-Whitney p is 2 / C(6, 3) = 0.10."""


def mann_whitney(reference: Floats, candidate: Floats) -> float:
    """Return the two-sided p-value of "neither side tends to larger values" (Mann and Whitney 1947), from all
    assignments of the observed values to the sides. Takes no NaN.
    """
    doubled = doubled_ranks(np.concatenate([reference, candidate]))
    table = rank_sum_p_values(tuple(sorted(doubled.tolist())), len(candidate))
    return float(table[int(doubled[len(reference) :].sum())])


def p_values(reference: int, candidate: int) -> Floats:
    """Return the two-sided p-value of every U from 0 to `reference * candidate` (numbers of launches), without ties: of
    pairs of launches in which the candidate's value is larger.
    """
    least = candidate * (candidate + 1)  # twice the smallest sum of ranks, where U is 0
    table = rank_sum_p_values(tuple(range(2, 2 * (reference + candidate) + 1, 2)), candidate)
    return table[least : least + 2 * reference * candidate + 1 : 2]


@lru_cache(maxsize=256)
def rank_sum_p_values(doubled: tuple[int, ...], chosen: int) -> Floats:
    """Return the two-sided p-value of every sum of `chosen` of these doubled ranks: the share of all choices whose sum
    lies at least as far out on its side, twice. Indexed by the sum.
    """
    ways = np.zeros((chosen + 1, sum(doubled) + 1))
    ways[0, 0] = 1
    for rank in doubled:
        ways[1:, rank:] += ways[:-1, : ways.shape[1] - rank].copy()
    at_most = np.cumsum(ways[-1])
    at_least = at_most[-1] - at_most + ways[-1]
    p: Floats = np.minimum(1.0, 2 * np.minimum(at_most, at_least) / at_most[-1])
    p.setflags(write=False)
    return p


EXACT_LABELLINGS: Final = 200_000
"""Labellings up to which all are enumerated: C(20, 10) = 184,756, ten launches against ten."""
DRAWN: Final = 20_000
"""Labellings drawn where there are more, the observed one among them; a p of 0.05 is then known to 0.0015."""
_SEED: Final = 1993
_BELOW: Final = 1 - 1e-9
"""Turns "below" into "at most" for p-values that were computed in two ways."""


def step_down(values: Mapping[str, tuple[Floats, Floats]], alpha: float) -> dict[str, tuple[float, float | None]]:
    """Test all metrics by step-down minP (Westfall and Young, *Resampling-Based Multiple Testing*, 1993, algorithm 2.8)
    with the exact two-sided Mann-Whitney p of each metric.

    At each step the smallest remaining raw p is held against the distribution of the smallest p of all remaining
    metrics over the labellings: all of them up to `EXACT_LABELLINGS`, else `DRAWN` with a fixed seed.

    Args:
        values: per metric one value for each launch of the reference and of the candidate, the same launches for every
            metric; NaN where a launch has none, which counts as one of middle rank.
        alpha: the level of all metrics together.

    Returns:
        Per metric the adjusted p (the chance of even one false finding among all metrics is at most alpha where those
        with p <= alpha are taken for findings), and the raw p up to which the metric is a finding, at the step at which
        it was judged; None where these launches could not decide, whatever they had measured.
    """
    if not values:
        return {}
    (size,) = {(len(reference), len(candidate)) for reference, candidate in values.values()}
    labels = labellings(*size)
    p = np.empty((len(values), len(labels)))
    for row, (reference, candidate) in zip(p, values.values(), strict=True):
        doubled = doubled_ranks(np.concatenate([reference, candidate]))
        table = rank_sum_p_values(tuple(sorted(doubled.tolist())), len(candidate))
        row[:] = table[(labels @ doubled).astype(np.int64)]
    order = np.argsort(p[:, 0], kind="stable")
    smallest = np.minimum.accumulate(p[order[::-1]], axis=0)[::-1]
    index = int(alpha * len(labels) * (1 + 1e-12))
    names, adjusted, tested = list(values), 0.0, {}
    level, least = alpha, float(smallest[0].min())
    for step, metric in enumerate(order):
        observed = float(p[metric, 0])
        if adjusted <= alpha:  # the step-down stops at the first that is no finding, and so does the level
            # More than alpha of all labellings reach this p, and no smaller one has so many.
            critical = float(np.partition(smallest[step], index)[index])
            level = min(critical * _BELOW, alpha)
        # Where ties make the test lopsided, twice one side may be more than both: no p falls below the raw one.
        adjusted = max(adjusted, observed, float((smallest[step] <= observed).mean()))
        tested[names[metric]] = adjusted, None if level < least else level
    return {name: tested[name] for name in values}


@lru_cache(maxsize=8)
def labellings(reference: int, candidate: int) -> Floats:
    """Return which launches are the candidate's, one labelling a row, as 0 and 1; the first row is the observed one.

    Shape (labellings, reference + candidate).
    """
    launches, count = reference + candidate, comb(reference + candidate, candidate)
    if count <= EXACT_LABELLINGS:
        # In order of `combinations` the last one holds the last launches, which are the candidate's.
        chosen = np.array(list(combinations(range(launches), candidate)), np.int64)[::-1]
        labels: Bools = np.zeros((count, launches), bool)
        np.put_along_axis(labels, chosen, values=True, axis=1)
    else:
        generator = np.random.default_rng([_SEED, reference, candidate])
        labels = np.tile(np.arange(launches) >= reference, (DRAWN, 1))
        labels[1:] = generator.permuted(labels[1:], axis=1)
    as_floats = labels.astype(np.float64)
    as_floats.setflags(write=False)
    return as_floats


def least_launches(alpha: float, metrics: int = 1) -> int:
    """Return the launches per side, at least four, from which one of so many metrics tested together can be a finding
    whatever the others are: the smallest n with metrics * 2 / C(2n, n) <= alpha.

    Each metric has two extreme labellings of C(2n, n) if its values differ, and in the worst case no two metrics share
    them.
    """
    size = LEAST_LAUNCHES
    while metrics * 2 / comb(2 * size, size) > alpha:
        size += 1
    return size


def estimated(kind: EffectKind, reference: Floats, candidate: Floats, p: float, level: float) -> Effect:
    """Return the effect between medians over launches (candidate minus reference, or candidate / reference - 1) with
    the interval that the test at `level` does not reject; without a value where the reference is 0.

    Interval and test are one: where p is above the level the interval holds 0, and without ties the other way round.
    The test counts tied values half, and pairs alone do not tell what it does with them: then the interval is widened
    to hold 0 where `p` is above the level, and always holds the effect itself.

    Args:
        reference, candidate: one value per launch, at least one each, no NaN.
        p: of the Mann-Whitney test of these values.
        level: an effect is rejected where p of what is left without it is at most this.
    """
    before, after = float(np.median(reference)), float(np.median(candidate))
    if kind == "quotient" and not before:
        return Effect(kind, None, None, None)
    value = after - before if kind == "difference" else after / before - 1
    ends = accepted(reference, candidate, level, kind)
    if ends is None:
        return Effect(kind, value, None, None)
    held = [*ends, value, *([0.0] if p > level else [])]
    return Effect(kind, value, min(held), max(held))


def accepted(reference: Floats, candidate: Floats, level: float, kind: EffectKind) -> tuple[float, float] | None:
    """Return the smallest and the largest effect that the test does not reject: of shifts of the candidate
    (`difference`), or of its factors less 1 (`quotient`; Hodges and Lehmann 1963, Bauer 1972). None where no effect of
    any size could be rejected, or a quotient has a value that is not above 0 below it.
    """
    if kind == "quotient" and (reference.min() <= 0 or candidate.min() < 0):
        return None
    pairs = candidate[:, None] - reference if kind == "difference" else candidate[:, None] / reference - 1
    ordered = np.sort(pairs, axis=None)
    p = p_values(len(reference), len(candidate))
    # U is the number of pairs above the effect: this many of its smallest values, and as many of its largest, reject.
    rejected = int((p[: len(ordered) // 2 + 1] <= level).sum())
    return (float(ordered[rejected - 1]), float(ordered[-rejected])) if rejected else None


POWER: Final = 0.8
CAP: Final = 64
"""Launches per side above which no number is given: nobody runs that many, and the noise estimate
would not support it.
"""
_PLANS_SEED: Final = 80
_PLANS: Final = 4_000
_LEAST_PLANS: Final = 500
_PAIRS: Final = 1 << 21


def pooled_sd(reference: Floats, candidate: Floats) -> float | None:
    """Return the standard deviation of launches around the mean of their own side, corrected for its small-sample bias:
    divided by c4 for its degrees of freedom, because the root of a mean square is too small on average (Montgomery,
    Introduction to Statistical Quality Control, appendix VI). None unless a side has two launches.
    """
    freedom = len(reference) + len(candidate) - 2
    if freedom < 1:
        return None
    squares = sum(float(((side - side.mean()) ** 2).sum()) for side in (reference, candidate))
    c4 = sqrt(2 / freedom) * exp(lgamma((freedom + 1) / 2) - lgamma(freedom / 2))
    return sqrt(squares / freedom) / c4


def detectable(reference: int, candidate: int, sd: float, margin: float, alpha: float) -> float | None:
    """Return the smallest shift that the rule (p <= alpha and medians further apart than `margin`) finds in 80 % of
    experiments with this many launches; None where no shift can. `sd`, `margin` and the shift are in the same unit.
    """
    shifts = _least_shifts(reference, candidate, alpha)
    if shifts is None:
        return None
    by_test, by_median = shifts
    return float(np.quantile(np.maximum(sd * by_test, margin + sd * by_median), POWER))


def launches_needed(shift: float, sd: float, alpha: float) -> int | None:
    """Return the smallest number of launches per side with which the test finds `shift` in 80 % of experiments; None
    above `CAP`.
    """

    def finds(size: int) -> bool:
        shifts = _least_shifts(size, size, alpha)
        return shifts is not None and sd * float(np.quantile(shifts[0], POWER)) <= abs(shift)

    sizes = range(LEAST_LAUNCHES, CAP + 1)
    index = bisect_left(sizes, True, key=finds)
    return sizes[index] if index < len(sizes) else None


@lru_cache(maxsize=256)
def _least_shifts(reference: int, candidate: int, alpha: float) -> tuple[Floats, Floats] | None:
    """Simulate experiments with normally distributed launches. For each, the smallest shift that the test finds, and
    the difference of the medians that the shift must make up for; None where the test finds none.

    Normal launches are used and not the residuals of the observed ones, because six degrees of freedom make a lumpy
    distribution with ties.
    """
    p = p_values(reference, candidate)
    half = len(p) // 2
    enough = np.flatnonzero(p[half:] <= alpha)
    if not len(enough):
        return None
    needed = half + int(enough[0])
    plans = max(_LEAST_PLANS, min(_PLANS, _PAIRS // (reference * candidate)))
    generator = np.random.default_rng([_PLANS_SEED, reference, candidate])
    left, right = (generator.standard_normal((plans, size)) for size in (reference, candidate))
    # A shift d of the candidate makes U the number of pairs with left - right < d: `needed` of them or more from the
    # `needed`-th smallest on.
    pairs = (left[:, :, None] - right[:, None, :]).reshape(plans, -1)
    pairs.partition(needed - 1, axis=1)
    return pairs[:, needed - 1].copy(), np.median(left, axis=1) - np.median(right, axis=1)
