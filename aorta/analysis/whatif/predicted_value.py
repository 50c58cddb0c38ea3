"""A predicted number and how sure it is.

    value_of(changed_ms, steps, wrong_by=0.1)      # a median, between what it may be

An interval has two parts: how the median varies when the record's own steps are drawn again (bootstrap), and by how
much the model may be wrong: what the replay of the unchanged program misses, plus a share of the predicted change
(`STATED_ERROR`). What another launch would have measured is in neither. Must not predict anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

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

STATED_ERROR: Final[dict[type[Change], float]] = {
    **dict.fromkeys((ComputeSpeed, RankLateness, NoStragglers, WorldSize, NetworkChange, CommSpeed), 0.10),
    **dict.fromkeys((BucketCap, PrefetchDepth, OverlapSwitch), 0.20),
}
"""Kind of change -> the part of the predicted change that may be wrong: assumed, then measured (docs/what-if.md)."""
LEVEL: Final = 0.95
_SEED: Final = 20_240_229


@dataclass(frozen=True)
class Value:
    """A predicted median with its interval."""

    value: float
    low: float
    high: float


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
