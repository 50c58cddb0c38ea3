"""Computes the self time of the nested rows of host threads: when each of them was the innermost one.

`self_times([0, 2, 3), ...)` of an operator from 0 to 9 with another from 2 to 5 inside gives it 0 to 2 and 5 to 9. Must
not: know what a row stands for.
"""

from __future__ import annotations

import numpy as np

from aorta.timeline.arrays import Int64, Spans


def self_times(rows: Spans, thread: Int64) -> tuple[Int64, Spans]:
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
    for mine in np.split(order, np.flatnonzero(np.diff(thread[order])) + 1):
        owner, pieces = _of_thread(rows.start[mine], np.sort(rows.end[mine]))
        owners.append(mine[owner])
        starts.append(pieces.start)
        ends.append(pieces.end)
    return np.concatenate(owners), Spans(np.concatenate(starts), np.concatenate(ends))


def _of_thread(start: Int64, end: Int64) -> tuple[Int64, Spans]:
    """The same for one thread, from sorted starts (of rows that begin together the outermost first) and sorted ends:
    like brackets, an end belongs to the last start that is still open.
    """
    count = len(start)
    ends_before = np.searchsorted(end, start, side="right")  # what ends at a start has ended
    starts_before = np.searchsorted(start, end, side="left")
    # Behind an end that leaves n rows open, the innermost is the last row that began with n - 1 others open.
    begun_beside = np.arange(count) - ends_before
    left = starts_before - np.arange(count) - 1
    by_depth = np.sort(begun_beside * count + np.arange(count))
    at = np.searchsorted(by_depth, (left - 1) * count + starts_before, side="left") - 1
    outer = np.where(left > 0, by_depth[at] % count if count else 0, -1)

    times, owner = np.empty(2 * count, np.int64), np.empty(2 * count, np.int64)
    of_start, of_end = np.arange(count) + ends_before, np.arange(count) + starts_before
    times[of_start], times[of_end] = start, end
    owner[of_start], owner[of_end] = np.arange(count), outer
    kept = np.flatnonzero((owner[:-1] >= 0) & (times[1:] > times[:-1]))
    return owner[kept], Spans(times[kept], times[kept + 1])
