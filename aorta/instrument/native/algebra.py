"""Compiled interval arithmetic for measuring the window of a live step.

It gives what `overlap.PAIRS` gives, for nanoseconds that fit in int64 (tests/instrument/test_native_algebra.py). Must
not define a metric.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aorta.timeline.intervals import Interval
from aorta.timeline.overlap import Algebra


def compiled_algebra(module: Any) -> Algebra[Iterable[Interval], Any]:
    """The operations of `module`; their results are opaque, except those of `pairs`."""
    return Algebra(
        module.lane,
        module.unite,
        module.intersect,
        module.subtract,
        module.measure,
        module.tile,
        module.pairs,
    )
