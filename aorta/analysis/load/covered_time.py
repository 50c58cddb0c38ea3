"""Computes how much of each interval is covered by other intervals, for example how much of a kernel by communication.

Intervals that cover are merged first, per rank and device (W15: devices are never merged with each other). Must not:
sum lengths of intervals that may overlap (W10).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from aorta.analysis.load.interval_table import Intervals
from aorta.timeline.arrays import Int64, Spans


def places(table: Intervals) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
    """Yield each rank and device of a table with the indices of its rows."""
    if not len(table):
        return
    packed = (table.rank.astype(np.int64) << 32) + (table.device.astype(np.int64) + 1)
    order = np.argsort(packed, kind="stable")
    found, first = np.unique(packed[order], return_index=True)
    for each, rows in zip(found.tolist(), np.split(order, first[1:]), strict=True):
        yield each >> 32, (each & 0xFFFFFFFF) - 1, rows


def covered_ns(rows: Spans, merged: Spans) -> Int64:
    """Nanoseconds of each row that lie inside a merged set of spans."""
    before = np.concatenate((np.zeros(1, np.int64), np.cumsum(merged.end - merged.start)))

    def until(instant: Int64) -> Int64:
        """Merged time before each instant."""
        at = np.searchsorted(merged.start, instant, side="right")
        reached = np.minimum(merged.end[at - 1], instant) - merged.start[at - 1] if len(merged.start) else instant
        return np.where(at > 0, before[at - 1] + reached, 0)

    if not len(merged.start):
        return np.zeros(len(rows.start), np.int64)
    return until(rows.end) - until(rows.start)
