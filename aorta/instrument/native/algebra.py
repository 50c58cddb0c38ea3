"""The compiled operations on intervals, for the window of a live step.

Enters: `build.load`'s module. Leaves: an `Algebra` that gives what `overlap.PAIRS` gives, for nanoseconds that fit in
int64 (tests/instrument/test_native_algebra.py). Must not: define a metric.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aorta.timeline.intervals import Interval
from aorta.timeline.overlap import Algebra


def compiled_algebra(module: Any) -> Algebra[Iterable[Interval], Any]:
    """The operations of `module`; what they give is opaque, but for `pairs`."""
    return Algebra(
        module.lane,
        module.unite,
        module.intersect,
        module.subtract,
        module.measure,
        module.tile,
        module.pairs,
    )
