"""Asks whether the steps of a launch are at one level, and which steps draw their mean away from their median.

    level_change(times_ms)                  # LevelChange(first=9, steps=15, before_ms=180.0, after_ms=100.0), or None
    slow_steps(times_ms, global_steps)      # "the mean job step is 131 ms, the median 100 ms: 2 slow steps of 30 ..."

Must not: leave a step out of a metric, or call launches unsettled that changed in different directions, as those of a
machine do that others use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from aorta.documents.formatting import TEXT
from aorta.read.frames import Floats, Ints

CHANGE: Final = 0.1
"""Relative to the level before: a smaller change of level is not named."""
_ALPHA: Final = 0.05
"""Highest p of a change. 15 steps reach it where 5 to 10 of them come before the change, 8 where half do, 5 never."""
_FEW_STEPS: Final = 14
_ORDERS: Final = 5_000
"""Drawn, for the p of up to `_FEW_STEPS`, of which the formula for many says too much."""
_MOST: Final = 0.75
"""Share of launches. Where steps only wander, they change either way: 4 of 4 the same way are at most one in eight."""
APART: Final = 0.1
"""Of the median: where the mean step differs by more, it is said which steps do that."""
_EXPLAINS: Final = 0.8
"""Share of the difference of mean and median that the steps named for it make up at least."""
_FEW: Final = 5


class LevelChange(NamedTuple):
    """The median of the `first` steps after the warm-up, and that of all others."""

    first: int
    steps: int
    before_ms: float
    after_ms: float

    def __str__(self) -> str:
        before, after = (TEXT.quantity(level, "ms") for level in (self.before_ms, self.after_ms))
        return f"the first {self.first} of {self.steps} steps after the warm-up take {before}, the others {after}"


def level_change(times_ms: Floats) -> LevelChange | None:
    """Return where the level of a launch's steps changes; None where it does not by `CHANGE`.

    Whether there is a change is for Pettitt's test (Applied Statistics 28, 1979): of the largest Mann-Whitney statistic
    of any cut K, p = 2 exp(-6 K^2 / (n^3 + n^2)), of few steps its share of drawn orders. It is where two levels fit
    best by least squares, times beyond the 10th and 90th percentile taken as these.

    Args:
        times_ms: of the steps after the warm-up, in their order.
    """
    count = len(times_ms)
    if count < 2:
        return None
    _, value, alike = np.unique(times_ms, return_inverse=True, return_counts=True)
    rank = (np.cumsum(alike) - (alike - 1) / 2)[value]
    before = np.arange(1, count)
    if _chance(rank) > _ALPHA:
        return None
    clipped = np.clip(times_ms, *np.percentile(times_ms, [10, 90]))
    apart = (np.cumsum(clipped)[:-1] - before * clipped.mean()) ** 2 / (before * (count - before))
    first = int(np.argmax(apart)) + 1
    before_ms, after_ms = float(np.median(times_ms[:first])), float(np.median(times_ms[first:]))
    if abs(after_ms - before_ms) <= CHANGE * before_ms:
        return None
    return LevelChange(first, count, before_ms, after_ms)


def _chance(rank: Floats) -> float:
    """Return the p of a change: of the largest Mann-Whitney statistic of any cut, in all orders of so many steps."""
    count = len(rank)
    before = np.arange(1, count)

    def largest(ranks: Floats) -> Floats:
        return np.asarray(np.abs(2 * np.cumsum(ranks, -1)[..., :-1] - before * (count + 1)).max(-1))

    seen = largest(rank)
    if count > _FEW_STEPS:
        return float(2 * np.exp(-6 * seen**2 / (count**3 + count**2)))
    orders = np.random.default_rng(0).permuted(np.tile(rank, (_ORDERS, 1)), axis=1)
    return float((largest(orders) >= seen).mean())


def unsettled(changes: Sequence[LevelChange | None]) -> str | None:
    """Return why the launches of a side have not settled: the steps of more than `_MOST` of them change their level in
    the same direction; None where they do not.
    """
    for faster in (True, False):
        same = [change for change in changes if change and (change.after_ms < change.before_ms) == faster]
        if len(same) > _MOST * len(changes):
            typical = sorted(same, key=lambda change: change.first)[len(same) // 2]
            return f"in {len(same)} of {len(changes)} launches steps get {'faster' if faster else 'slower'}: {typical}"
    return None


def slow_steps(times_ms: Floats, global_steps: Ints) -> tuple[str, Ints, float] | None:
    """Return which steps make the mean step differ from the median: in words, their numbers, and by how much they are
    longer together, in ms; None where it does not by `APART`.

    Args:
        times_ms: of the job steps; `global_steps`: the number of each.
    """
    if not len(times_ms):
        return None
    mean_ms, median_ms = float(times_ms.mean()), float(np.median(times_ms))
    if abs(mean_ms - median_ms) <= APART * median_ms:
        return None
    beyond_ms = (times_ms - median_ms) * np.sign(mean_ms - median_ms)
    order = np.argsort(-beyond_ms, kind="stable")
    enough = int(np.searchsorted(np.cumsum(beyond_ms[order]), _EXPLAINS * beyond_ms.sum()))
    count = int((beyond_ms >= beyond_ms[order[enough]] / 2).sum())  # with those that are like them
    named = [
        f"{global_steps[index]} ({TEXT.quantity(float(times_ms[index]), 'ms')})" for index in order[: min(count, _FEW)]
    ]
    more = f" and {count - _FEW} more" if count > _FEW else ""
    mean, median = (TEXT.quantity(value, "ms") for value in (mean_ms, median_ms))
    kind = "slow" if mean_ms > median_ms else "fast"
    steps = f"{TEXT.count(count, f'{kind} step')} of {len(times_ms)}"
    makes = "makes" if count == 1 else "make"
    sentence = (
        f"the mean job step is {mean}, the median {median}: {steps} {makes} the difference: {', '.join(named)}{more}"
    )
    return sentence, global_steps[order[:count]], float((times_ms[order[:count]] - median_ms).sum())
