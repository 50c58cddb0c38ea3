"""By how much something changes, and within which interval.

    step_gain_ms(before, after)                    # of each step: how much shorter it is
    value_of(gains_ms, steps, wrong_by=0.1)        # their median, between what it may be

A change is a paired difference: each step as replayed unchanged against the same step as replayed with the change, the
median over the steps. Whoever states a gain states this one (`gains`, `marginals`, `prediction`). An interval has two
parts: how the median varies when the record's own steps are drawn again (bootstrap), and by how much the model may be
wrong: what the replay of the unchanged program misses, plus a share of the predicted change (`STATED_ERROR`). What
another launch would have measured is in neither. Must not predict anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from aorta.analysis.compare.bootstrap import step_medians
from aorta.analysis.tables import Floats, Ints
from aorta.analysis.whatif.changes import (
    BucketCap,
    Change,
    CommSpeed,
    ComputeSpeed,
    NetworkChange,
    NoStragglers,
    OverlapSwitch,
    PrefetchDepth,
    RankLateness,
    WorldSize,
)
from aorta.analysis.whatif.replay import Times
from aorta.timeline.overlap import NS_PER_MS

STATED_ERROR: Final[dict[type[Change], float]] = {
    **dict.fromkeys((ComputeSpeed, RankLateness, NoStragglers, WorldSize, NetworkChange, CommSpeed), 0.10),
    **dict.fromkeys((BucketCap, PrefetchDepth, OverlapSwitch), 0.20),
}
"""Kind of change -> the part of the predicted change that may be wrong: assumed, then measured
(docs/dev/what-if-model.md)."""
LEVEL: Final = 0.95
_SEED: Final = 20_240_229


@dataclass(frozen=True)
class Value:
    """A predicted median with its interval."""

    value: float
    low: float
    high: float

    def taken_from(self, base: float, bounds: tuple[float, float] = (-np.inf, np.inf)) -> Self:
        """What is left of `base`, which is not uncertain, when this is taken away; within `bounds`."""
        ends = (base - self.value, base - self.high, base - self.low)
        return type(self)(*(min(max(end, bounds[0]), bounds[1]) for end in ends))

    def reaching(self, other: float) -> Self:
        """The same with an interval that reaches as far as `other`."""
        return type(self)(self.value, min(self.low, other), max(self.high, other))


def step_gain_ms(before: Times, after: Times) -> Floats:
    """By how much each step is shorter in another replay, in ms."""
    return (before.job_step_ns() - after.job_step_ns()) / NS_PER_MS


def gain_of(gains_ms: Floats, wrong_by: float) -> Value:
    """The median gain of steps, and its interval."""
    return value_of(gains_ms, np.arange(len(gains_ms)), wrong_by)


def value_of(values: Floats, steps: Ints, wrong_by: float, bounds: tuple[float, float] = (-np.inf, np.inf)) -> Value:
    """The median of `values` and its interval.

    Args:
        values: at least one, none NaN.
        steps: of each value.
        wrong_by: by how much the model may be wrong, in the unit of the values.
        bounds: what the metric can be.
    """
    value = float(np.median(values))
    drawn = step_medians(values, steps, np.random.default_rng(_SEED))
    low, high = np.percentile(drawn, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return Value(
        value, max(min(float(low), value) - wrong_by, bounds[0]), min(max(float(high), value) + wrong_by, bounds[1])
    )
