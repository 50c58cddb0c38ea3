"""The algebra of intervals on sorted lists of pairs: what `aorta.timeline.arrays` does on columns, in another way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aorta.errors import IntervalError
from aorta.timeline.arrays import Interval


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge any intervals: sorted, disjoint, abutting ones joined, empty ones dropped."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if start == end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def measure(merged: Iterable[Interval]) -> int:
    """Return the length of a merged list in ns."""
    return sum(end - start for start, end in merged)


def intersect(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """Return the time that is in both of two merged lists."""
    return subtract(left, subtract(left, right))


def subtract(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """Return the time that is in the merged list `left` but not in the merged list `right`. Linear in their lengths."""
    rest: list[Interval] = []
    j = 0
    for start, end in left:
        while j < len(right) and right[j][1] <= start:
            j += 1
        k = j
        while k < len(right) and right[k][0] < end:
            if start < right[k][0]:
                rest.append((start, right[k][0]))
            start = max(start, right[k][1])
            k += 1
        if start < end:
            rest.append((start, end))
    return rest


def clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """Return the parts of any intervals that lie inside `window`; order kept, nothing merged, empty parts dropped.

    Raises:
        IntervalError: an interval ends before it starts (dropped silently, it would read as "nothing ran").
    """
    low, high = window
    inside: list[Interval] = []
    for start, end in intervals:
        if end < start:
            raise IntervalError(f"[{start}, {end})")
        start, end = max(start, low), min(end, high)
        if start < end:
            inside.append((start, end))
    return inside
