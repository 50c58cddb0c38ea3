"""The algebra of intervals on columns: half-open intervals `[start_ns, end_ns)` as two int64 arrays.

`merge` takes intervals in any order and gives merged ones (sorted, disjoint, non-empty, non-abutting):

    pairs(merge(interval_array([(5, 9), (0, 5)])))  # [(0, 9)]

Must not know what an interval stands for, or touch floating point (docs/dev/measuring.md, W14).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aorta.errors import IntervalError

Int64: TypeAlias = NDArray[np.int64]
Interval: TypeAlias = tuple[int, int]
_EVER = np.iinfo(np.int64)


class IntervalArray(NamedTuple):
    """Intervals by column: `start[i]` and `end[i]`, nanoseconds, int64, of equal length."""

    start: Int64
    end: Int64


def interval_array(intervals: Iterable[Interval] = ()) -> IntervalArray:
    """Return `(start, end)` pairs as columns.

    Raises:
        OverflowError: a time in nanoseconds does not fit in int64.
    """
    pairs = np.array(list(intervals), dtype=np.int64).reshape(-1, 2)
    return IntervalArray(pairs[:, 0], pairs[:, 1])


def pairs(columns: IntervalArray) -> list[Interval]:
    """Return columns as `(start, end)` pairs."""
    return list(zip(columns.start.tolist(), columns.end.tolist(), strict=True))


def merge(columns: IntervalArray) -> IntervalArray:
    """Merge any intervals: sorted, disjoint, abutting ones joined, empty ones dropped. n log n; linear when sorted.

    Raises:
        IntervalError: an interval ends before it starts.
    """
    start, end = columns
    refuse_inverted(start, end)
    filled = end > start
    if not filled.all():
        start, end = start[filled], end[filled]
    if len(start) < 2:
        return IntervalArray(start, end)
    if not (start[1:] >= start[:-1]).all():
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    apart = start[1:] > reach[:-1]
    first = np.concatenate(([True], apart))
    last = np.concatenate((apart, [True]))
    return IntervalArray(start[first], reach[last])


def union(parts: Sequence[IntervalArray]) -> IntervalArray:
    """Union of several sets of intervals, merged or not."""
    if not parts:
        return interval_array()
    return merge(
        IntervalArray(np.concatenate([part.start for part in parts]), np.concatenate([part.end for part in parts]))
    )


def intersect(left: IntervalArray, right: IntervalArray) -> IntervalArray:
    """Return the time that is in both of two merged sets."""
    of_left, of_right = _meeting(left, right)
    return IntervalArray(
        np.maximum(left.start[of_left], right.start[of_right]), np.minimum(left.end[of_left], right.end[of_right])
    )


def subtract(left: IntervalArray, right: IntervalArray) -> IntervalArray:
    """Return the time that is in the first of two merged sets, and not in the second."""
    if not len(right.start) or not len(left.start):
        return left
    least, most = np.array([_EVER.min]), np.array([_EVER.max])
    between = IntervalArray(np.concatenate((least, right.end)), np.concatenate((right.start, most)))
    return intersect(left, between)


def _meeting(any_order: IntervalArray, merged: IntervalArray) -> tuple[Int64, Int64]:
    """Return the indices of both in every pair of intervals that have time in common."""
    low = np.searchsorted(merged.end, any_order.start, side="right")
    return ranges(low, np.searchsorted(merged.start, any_order.end, side="left"))


def ranges(first: Int64, last: Int64) -> tuple[Int64, Int64]:
    """Return the indices from `first` to `last` (exclusive) of all ranges: the number of the range, and the index."""
    count = np.maximum(last - first, 0)
    number = np.repeat(np.arange(len(count)), count)
    before = np.cumsum(count) - count
    return number, np.arange(len(number)) - np.repeat(before - first, count)


def covered_ns(rows: IntervalArray, merged: IntervalArray) -> Int64:
    """Return the nanoseconds of each row that lie inside a merged set of spans. Rows may overlap."""
    if not len(merged.start):
        return np.zeros(len(rows.start), np.int64)
    before = np.concatenate((np.zeros(1, np.int64), np.cumsum(merged.end - merged.start)))

    def until(instant: Int64) -> Int64:
        """Return merged time before each instant."""
        index = np.searchsorted(merged.start, instant, side="right")
        return np.where(
            index > 0, before[index - 1] + np.minimum(merged.end[index - 1], instant) - merged.start[index - 1], 0
        )

    return until(rows.end) - until(rows.start)


def containing(instants: Int64, spans: IntervalArray) -> Int64:
    """Return which of some spans, sorted by their start, contains each instant; of several the one that began last, -1
    where it contains it no more.
    """
    if not len(spans.start):
        return np.full(len(instants), -1)
    index = np.searchsorted(spans.start, instants, side="right") - 1
    return np.where((index >= 0) & (instants < spans.end[index]), index, -1)


def measure(merged: IntervalArray) -> int:
    """Return the length of a merged set in ns. Summing intervals that may overlap is wrong (W10): merge first."""
    return int((merged.end - merged.start).sum())


def offset(inner: IntervalArray, outer: IntervalArray, slack: int = 0) -> int | None:
    """Return how much later `inner` lie by their clock than by that of `outer`, each of which has one of them inside:
    as little as puts them there, within `slack`, on the median. So 0 where they are inside. None where no two lie to
    more than half in each other: what is shorter than the clocks are apart says nothing. Both in any order.
    """
    order = np.argsort(inner.start, kind="stable")
    low, high = inner.start[order], inner.end[order]
    first = np.searchsorted(np.maximum.accumulate(high), outer.start, side="right")
    of_outer, index = ranges(first, np.searchsorted(low, outer.end, side="left"))
    begins, ends = outer.start[of_outer], outer.end[of_outer]
    shared = np.minimum(high[index], ends) - np.maximum(low[index], begins)
    close = 2 * shared > np.maximum(high[index] - low[index], ends - begins)
    if not close.any():
        return None
    middle = int(close.sum()) // 2
    least = int(np.sort((high[index] - ends)[close])[middle]) - slack
    most = int(np.sort((low[index] - begins)[close])[middle]) + slack
    return min(max(0, least), most)


def refuse_inverted(start: Int64, end: Int64) -> None:
    """Check that no interval ends before it starts.

    Raises:
        IntervalError: one does.
    """
    wrong = end < start
    if wrong.any():
        index = int(np.argmax(wrong))
        interval = f"[{start[index]}, {end[index]})"
        raise IntervalError(f"interval {interval} ends before it starts; an end must be >= its start")


def tile_windows(windows: IntervalArray, lanes: Mapping[int, IntervalArray]) -> tuple[Int64, IntervalArray, Int64]:
    """Divide every window into intervals with a constant set of active lanes, idle intervals included.

    Args:
        windows: in any order; they may overlap.
        lanes: bit -> merged intervals.

    Returns:
        The window of each interval, the intervals by window and time, and their lanes as masks.
    """
    times, flips = [*windows], [np.zeros(2 * len(windows.start), np.int64)]
    for bit, lane in lanes.items():
        times += lane
        flips.append(np.full(2 * len(lane.start), 1 << bit, np.int64))
    edges, where = np.unique(np.concatenate(times), return_inverse=True)
    toggled = np.zeros(len(edges), np.int64)
    np.bitwise_xor.at(toggled, where, np.concatenate(flips))
    masks = np.bitwise_xor.accumulate(toggled)[:-1]
    changed = np.diff(masks, prepend=-1) != 0
    starts = edges[:-1][changed]
    tiles, masks = IntervalArray(starts, np.append(starts[1:], edges[-1:])), masks[changed]
    window, index = _meeting(windows, tiles)
    start, end = (
        np.maximum(windows.start[window], tiles.start[index]),
        np.minimum(windows.end[window], tiles.end[index]),
    )
    filled = start < end
    return window[filled], IntervalArray(start[filled], end[filled]), masks[index[filled]]


def self_times(rows: IntervalArray, thread: Int64) -> tuple[Int64, IntervalArray]:
    """Divide the time of every thread among its rows: each moment belongs to the innermost row.

    Rows that overlap without nesting (times rounded to whole microseconds) are taken as if the one that began last
    ended first: what all of them cover together stays the same.

    Args:
        rows: in any order; of rows that begin together the longest is the outermost, of equal ones the first.
        thread: the thread of each row.

    Returns:
        Pieces that are disjoint within a thread and not empty, by thread and time, and the index of the row that each
        of them belongs to. A row that is covered by those nested in it has no piece.
    """
    filled = np.flatnonzero(rows.end > rows.start)
    order = filled[np.lexsort((-rows.end[filled], rows.start[filled], thread[filled]))]
    owners, starts, ends = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for of_thread in np.split(order, np.flatnonzero(np.diff(thread[order])) + 1):
        owner, pieces = _of_thread(rows.start[of_thread], np.sort(rows.end[of_thread]))
        owners.append(of_thread[owner])
        starts.append(pieces.start)
        ends.append(pieces.end)
    return np.concatenate(owners), IntervalArray(np.concatenate(starts), np.concatenate(ends))


def _of_thread(start: Int64, end: Int64) -> tuple[Int64, IntervalArray]:
    """Return the same for one thread, from sorted starts (of rows that begin together the outermost first) and sorted
    ends: like brackets, an end belongs to the last start that is still open.
    """
    count = len(start)
    ends_before = np.searchsorted(end, start, side="right")  # what ends at a start has ended
    starts_before = np.searchsorted(start, end, side="left")
    # Behind an end that leaves n rows open, the innermost is the last row that began with n - 1 others open.
    begun_beside = np.arange(count) - ends_before
    left = starts_before - np.arange(count) - 1
    by_depth = np.sort(begun_beside * count + np.arange(count))
    index = np.searchsorted(by_depth, (left - 1) * count + starts_before, side="left") - 1
    outer = np.where(left > 0, by_depth[index] % count if count else 0, -1)

    times, owner = np.empty(2 * count, np.int64), np.empty(2 * count, np.int64)
    of_start, of_end = np.arange(count) + ends_before, np.arange(count) + starts_before
    times[of_start], times[of_end] = start, end
    owner[of_start], owner[of_end] = np.arange(count), outer
    kept = np.flatnonzero((owner[:-1] >= 0) & (times[1:] > times[:-1]))
    return owner[kept], IntervalArray(times[kept], times[kept + 1])
