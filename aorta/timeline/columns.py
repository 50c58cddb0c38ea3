"""Measures windows on columns: the same definition as for a live step, fast enough for traces of millions of rows.

For intervals given as `Spans` it yields the `Overlap` that `overlap.measure_window` gives for the same intervals
(tests/timeline/test_arrays.py). Must not define a metric.
"""

from __future__ import annotations

from collections.abc import Mapping

from aorta.timeline import arrays
from aorta.timeline.arrays import Spans
from aorta.timeline.intervals import Interval, Tile
from aorta.timeline.overlap import Algebra


def _lane(raw: Spans, window: Interval) -> Spans:
    return arrays.merge(arrays.clip(raw, window))


def _tile(window: Interval, lanes: Mapping[int, Spans]) -> list[Tile]:
    stretches, masks = arrays.tile(window, lanes)
    return list(zip(stretches.start.tolist(), stretches.end.tolist(), masks.tolist(), strict=True))


COLUMNS: Algebra[Spans, Spans] = Algebra(
    _lane, arrays.union, arrays.intersect, arrays.subtract, arrays.measure, _tile, arrays.pairs
)
"""Raw intervals as columns."""

MERGED_COLUMNS: Algebra[Spans, Spans] = Algebra(
    arrays.cut, arrays.union, arrays.intersect, arrays.subtract, arrays.measure, _tile, arrays.pairs
)
"""For lanes merged once and used for many windows of a trace: clipping a merged lane leaves it merged."""
