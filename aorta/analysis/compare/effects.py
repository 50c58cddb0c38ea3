"""Effects of the candidate against the reference: their size and interval, and the effect that these launches could
have detected; and medians of resampled steps, from which a prediction has its interval.

Interval and test are one: where p is above the level, the interval holds 0 (`estimated` sees to that with ties, too),
and the other way round without ties. Must not: resample single rank-steps (all ranks of a step are drawn together,
because they waited for each other), hold more than a bounded block of a large run, give an interval that the test could
not have bounded, or quote the power of another design, or of a rule that the verdict does not use.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from math import exp, lgamma, sqrt
from typing import Final

import numpy as np

from aorta.analysis.compare.rank_tests import LEAST_LAUNCHES, critical_u, p_values
from aorta.analysis.documents.comparison import Effect, EffectKind
from aorta.analysis.frames import Floats, Ints

POOL: Final = 200
"""Resamples of the steps of one run."""
LEAST_POOL: Final = 48
_WORK: Final = 1 << 22
"""Bounds the values touched: a run of 64 ranks x 1,000 steps gets 65 resamples."""
_BLOCK: Final = 1 << 20


def step_medians(values: Floats, steps: Ints, generator: np.random.Generator) -> Floats:
    """Return medians of `values` over resamples of their global steps, drawn with replacement; shape (resamples,).

    Args:
        values: one per rank-step, none NaN, at least one.
        steps: the global step of each value.
    """
    if values.min() == values.max():
        return values[:1].copy()  # the median is the same for every draw
    order = np.argsort(values, kind="stable")
    _, cluster = np.unique(steps, return_inverse=True)
    ordered, cluster = values[order], cluster[order]
    count = int(cluster.max()) + 1
    size = int(np.clip(_WORK // len(values), LEAST_POOL, POOL))
    each = max(1, _BLOCK // len(values))
    found = [
        _weighted_medians(ordered, _times_drawn(count, min(each, size - at), generator), cluster)
        for at in range(0, size, each)
    ]
    return np.concatenate(found)


def _times_drawn(count: int, resamples: int, generator: np.random.Generator) -> Ints:
    """Return how often each of `count` items is drawn in `count` draws with replacement; shape (resamples, count)."""
    drawn = generator.integers(count, size=(resamples, count)) + count * np.arange(resamples)[:, None]
    return np.bincount(drawn.ravel(), minlength=resamples * count).reshape(resamples, count)


def _weighted_medians(ordered: Floats, drawn: Ints, cluster: Ints) -> Floats:
    """Return median of `ordered` for each row of `drawn`, where a value counts as often as its cluster was drawn."""
    places = np.cumsum(drawn[:, cluster], axis=1, dtype=np.int32)
    total = places[:, -1:]
    # The k-th smallest (from 0) is at the first position whose cumulative count exceeds k.
    lower = np.argmax(places > (total - 1) // 2, axis=1)
    upper = np.argmax(places > total // 2, axis=1)
    return np.asarray((ordered[lower] + ordered[upper]) / 2)


def effect_of(kind: EffectKind, reference: float, candidate: float) -> float | None:
    """Return candidate minus reference, or candidate / reference - 1; None when dividing by 0."""
    if kind == "difference":
        return candidate - reference
    return candidate / reference - 1 if reference else None


def estimated(kind: EffectKind, reference: Floats, candidate: Floats, p: float, level: float) -> Effect:
    """Return the effect between medians over launches, with the interval that the test at `level` does not reject.

    Where values are tied the test counts them half, and pairs alone do not tell what it does: the interval is widened
    to hold 0 where `p` is above the level, and always holds the effect itself.

    Args:
        reference, candidate: one value per launch, at least one each, no NaN.
        p: of the Mann-Whitney test of these values.
        level: an effect is rejected where p of what is left without it is at most this.
    """
    value = effect_of(kind, float(np.median(reference)), float(np.median(candidate)))
    ends = None if value is None else accepted(reference, candidate, level, kind)
    if value is None or ends is None:
        return Effect(kind, value, None, None)
    held = [*ends, value, *([0.0] if p > level else [])]
    return Effect(kind, value, min(held), max(held))


def accepted(reference: Floats, candidate: Floats, level: float, kind: EffectKind) -> tuple[float, float] | None:
    """Return the smallest and the largest effect that the test does not reject: of shifts of the candidate
    (`difference`), or of its factors less 1 (`quotient`; Hodges and Lehmann 1963, Bauer 1972). None where no effect of
    any size could be rejected, or a quotient has a value that is not above 0 below it.

    Args:
        level: an effect is rejected where p of what is left without it is at most this.
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
_SEED: Final = 80
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
    found = _shifts(reference, candidate, alpha)
    if found is None:
        return None
    by_test, by_median = found
    return float(np.quantile(np.maximum(sd * by_test, margin + sd * by_median), POWER))


def launches_needed(shift: float, sd: float, alpha: float) -> int | None:
    """Return the smallest number of launches per side with which the test finds `shift` in 80 % of experiments; None
    above `CAP`.
    """
    sizes = range(LEAST_LAUNCHES, CAP + 1)
    place = bisect_left(sizes, True, key=lambda size: sd * _least_shift(size, alpha) <= abs(shift))
    return sizes[place] if place < len(sizes) else None


@lru_cache(maxsize=256)
def _least_shift(size: int, alpha: float) -> float:
    """Return the shift, in standard deviations, that `size` against `size` launches find in 80 % of experiments; inf if
    none is.
    """
    found = _shifts(size, size, alpha)
    return float("inf") if found is None else float(np.quantile(found[0], POWER))


@lru_cache(maxsize=256)
def _shifts(reference: int, candidate: int, alpha: float) -> tuple[Floats, Floats] | None:
    """Simulate experiments with normally distributed launches. For each, the smallest shift that the test finds, and
    the difference of the medians that the shift must make up for; both from the same experiments.

    Normal launches are used and not the residuals of the observed ones, because six degrees of freedom make a lumpy
    distribution with ties.
    """
    needed = critical_u(reference, candidate, alpha)
    if needed is None:
        return None
    plans = max(_LEAST_PLANS, min(_PLANS, _PAIRS // (reference * candidate)))
    generator = np.random.default_rng([_SEED, reference, candidate])
    left, right = (generator.standard_normal((plans, size)) for size in (reference, candidate))
    # A shift d of the candidate makes U the number of pairs with left - right < d: `needed` of them or more from the
    # `needed`-th smallest on.
    pairs = (left[:, :, None] - right[:, None, :]).reshape(plans, -1)
    pairs.partition(needed - 1, axis=1)
    return pairs[:, needed - 1].copy(), np.median(left, axis=1) - np.median(right, axis=1)
