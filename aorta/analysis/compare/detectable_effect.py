"""Computes the effect that these launches could have detected, and how many launches would detect the one observed.

Takes one value per launch on each side. Must not: quote the power of another design, or of a rule that the verdict does
not use.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from math import exp, lgamma, sqrt
from typing import Final

import numpy as np

from aorta.analysis.compare.mann_whitney import critical_u
from aorta.analysis.compare.verdict_rules import LEAST_LAUNCHES
from aorta.analysis.tables import Floats

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
    """The standard deviation of launches around the mean of their own side, corrected for its small-sample bias:
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
    """The smallest shift that the rule (p <= alpha and medians further apart than `margin`) finds in 80 % of
    experiments with this many launches; None where no shift can. `sd`, `margin` and the shift are in the same unit.
    """
    found = _shifts(reference, candidate, alpha)
    if found is None:
        return None
    by_test, by_median = found
    return float(np.quantile(np.maximum(sd * by_test, margin + sd * by_median), POWER))


def launches_needed(shift: float, sd: float, alpha: float) -> int | None:
    """The smallest number of launches per side with which the test finds `shift` in 80 % of experiments; None above
    `CAP`.
    """
    sizes = range(LEAST_LAUNCHES, CAP + 1)
    place = bisect_left(sizes, True, key=lambda size: sd * _least_shift(size, alpha) <= abs(shift))
    return sizes[place] if place < len(sizes) else None


@lru_cache(maxsize=256)
def _least_shift(size: int, alpha: float) -> float:
    """The shift, in standard deviations, that `size` against `size` launches find in 80 % of experiments; inf if none
    is.
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
