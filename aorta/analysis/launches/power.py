"""What these launches and this noise could have found, and how many launches would find what was seen.

Enters: one value a launch on two sides. Leaves: effects in the unit of the values, and numbers of launches. Must not:
quote the power of another plan, or of a rule that the verdict does not use.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from math import exp, lgamma, sqrt
from typing import Final

import numpy as np

from aorta.analysis.launches.ranks import critical_u
from aorta.analysis.launches.rules import LEAST_LAUNCHES
from aorta.analysis.tables import Floats

POWER: Final = 0.8
CAP: Final = 64
"""Launches a side above which no number is given: nobody runs them, and the estimate of the noise carries none."""
_SEED: Final = 80
_PLANS: Final = 4_000
_LEAST_PLANS: Final = 500
_PAIRS: Final = 1 << 21


def pooled_sd(reference: Floats, candidate: Floats) -> float | None:
    """The standard deviation of launches round their own side's mean, free of its small-sample bias (divided by c4 for
    its degrees of freedom: a root of a mean square is too small on average; Montgomery, Introduction to Statistical
    Quality Control, appendix VI). None without two launches on a side.
    """
    freedom = len(reference) + len(candidate) - 2
    if freedom < 1:
        return None
    squares = sum(float(((side - side.mean()) ** 2).sum()) for side in (reference, candidate))
    c4 = sqrt(2 / freedom) * exp(lgamma((freedom + 1) / 2) - lgamma(freedom / 2))
    return sqrt(squares / freedom) / c4


def detectable(reference: int, candidate: int, sd: float, margin: float, alpha: float) -> float | None:
    """The smallest shift that the rule (p <= alpha and medians further apart than `margin`) finds in 80 % of plans with
    so many launches; None where no shift can. `sd`, `margin` and the shift are in one unit.
    """
    found = _shifts(reference, candidate, alpha)
    if found is None:
        return None
    by_test, by_median = found
    return float(np.quantile(np.maximum(sd * by_test, margin + sd * by_median), POWER))


def launches_needed(shift: float, sd: float, alpha: float) -> int | None:
    """The smallest number of launches a side with which the test finds `shift` in 80 % of plans; None above `CAP`."""
    sizes = range(LEAST_LAUNCHES, CAP + 1)
    place = bisect_left(sizes, True, key=lambda size: sd * _least_shift(size, alpha) <= abs(shift))
    return sizes[place] if place < len(sizes) else None


@lru_cache(maxsize=256)
def _least_shift(size: int, alpha: float) -> float:
    """In standard deviations, what `size` against `size` launches find in 80 % of plans; infinite where nothing is."""
    found = _shifts(size, size, alpha)
    return float("inf") if found is None else float(np.quantile(found[0], POWER))


@lru_cache(maxsize=256)
def _shifts(reference: int, candidate: int, alpha: float) -> tuple[Floats, Floats] | None:
    """For simulated plans of standard normal launches: the shift from which on the test finds it, and the difference of
    the medians that must still be made good. Both are of the same plans.

    Normal launches, not the residuals of the few there are: six degrees of freedom make a lumpy distribution with ties.
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
