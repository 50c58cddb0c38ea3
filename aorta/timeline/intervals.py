"""Algebra of half-open intervals `[start_ns, end_ns)` in integer nanoseconds.

`merge` and `clip` take any iterable of `(start, end)` pairs; the other operations take merged lists: sorted, disjoint,
non-empty, non-abutting.

    merge([(5, 9), (0, 5), (20, 30)])       # [(0, 9), (20, 30)]
    subtract([(0, 9), (20, 30)], [(4, 25)]) # [(0, 4), (25, 30)]

Must not know what an interval stands for, or touch floating point (docs/dev/measuring.md, W14).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from aorta.errors import IntervalError

Interval: TypeAlias = tuple[int, int]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge any intervals: sorted, disjoint, abutting ones joined, empty ones dropped.

    Raises:
        IntervalError: an interval ends before it starts.
    """
    merged: list[Interval] = []
    last_start, last_end = 0, None
    for start, end in sorted(intervals):
        if end < start:
            raise inverted(start, end)
        if end == start:
            continue
        if last_end is not None and start <= last_end:
            if end > last_end:
                last_end = end
                merged[-1] = (last_start, last_end)
        else:
            last_start, last_end = start, end
            merged.append((start, end))
    return merged


def intersect(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """Return the time that is in both of two merged lists. Linear in their lengths."""
    common: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start = max(left[i][0], right[j][0])
        end = min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


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
            raise inverted(start, end)
        start, end = max(start, low), min(end, high)
        if start < end:
            inside.append((start, end))
    return inside


def measure(merged: Iterable[Interval]) -> int:
    """Return the length of a merged list in ns. Summing intervals that may overlap is wrong (W10): merge first."""
    return sum(end - start for start, end in merged)


def offset(inner: Iterable[Interval], outer: Iterable[Interval], slack: int = 0) -> int | None:
    """Return how much later `inner` lie by their clock than by that of `outer`, each of which has one of them inside:
    as little as puts them there, within `slack`, on the median. So 0 where they are inside. None where no two lie to
    more than half in each other: what is shorter than the clocks are apart says nothing.
    """
    by_start = sorted(inner)
    starts, ends, first = [], [], 0
    for low, high in sorted(outer):
        while first < len(by_start) and by_start[first][1] <= low:
            first += 1
        for start, end in by_start[first:]:
            if start >= high:
                break
            if 2 * (min(end, high) - max(start, low)) > max(end - start, high - low):
                starts.append(start - low)
                ends.append(end - high)
    if not starts:
        return None
    least, most = sorted(ends)[len(ends) // 2] - slack, sorted(starts)[len(starts) // 2] + slack
    return min(max(0, least), most)


def inverted(start: int, end: int) -> IntervalError:
    """Return the error of every implementation of this algebra for an interval that ends before it starts."""
    return IntervalError(f"interval [{start}, {end}) ends before it starts; an end must be >= its start")
