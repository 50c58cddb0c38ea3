"""The algebra of intervals on columns (half-open intervals `[start_ns, end_ns)` as two int64 arrays), and the one
definition of what is hidden in a window.

`merge` takes intervals in any order and gives merged ones (sorted, disjoint, non-empty, non-abutting), as
`aorta.timeline.intervals` does (tests/timeline/test_arrays.py). `measure_windows` measures all
steps of a rank at once:

    lane = lambda *pairs: merge(interval_array(pairs))
    (overlap,) = measure_windows(lane((0, 100)), compute=lane((0, 60)), comm={"allreduce": lane((40, 80))})
    overlap.exposed_ns  # 20: of the 40 ns of communication, 20 ran during compute

Must not name a metric, or touch floating point (docs/dev/measuring.md, W14).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aorta.timeline.classes import AUX, BUBBLE, COMPUTE, COPY, KINDS, LANES
from aorta.timeline.intervals import Interval, inverted
from aorta.timeline.overlap import Bounds, KindOverlap, Overlap, Tile, bounds_of

Int64: TypeAlias = NDArray[np.int64]


_BIT = {lane: bit for bit, lane in enumerate(LANES)}
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
        raise inverted(int(start[index]), int(end[index]))


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


class CertainLanes(NamedTuple):
    """What certainly ran, inside what may have, in the windows that are `bounded`; in the others what may have run
    certainly did. The stream that a stall blocks computes nothing between the marks round it, whenever it was blocked.
    """

    bounded: Sequence[bool]
    compute: IntervalArray
    comm: Mapping[str, IntervalArray]
    stalls: IntervalArray
    bubbles: IntervalArray


def measure_windows(
    windows: IntervalArray,
    *,
    compute: IntervalArray,
    comm: Mapping[str, IntervalArray],
    of_unknown_kind: IntervalArray | None = None,
    stalls: IntervalArray | None = None,
    aux: IntervalArray | None = None,
    copy: IntervalArray | None = None,
    pipeline: IntervalArray | None = None,
    bubbles: IntervalArray | None = None,
    certain: CertainLanes | None = None,
    tiled: bool = False,
) -> list[Overlap]:
    """Measure windows of one device: the definition. All lanes are merged; what is outside of a window is cut off.

    Args:
        windows: in any order; they may overlap, but for those in which something is not certain.
        compute: ranges in which compute ran; stalls inside them are subtracted (R5).
        comm: kind of collective (`classes.KINDS`) -> its intervals.
        of_unknown_kind: communication whose kind the source does not report: counted in `comm_ns` and in no kind; where
            there is any, the milliseconds of kinds are null.
        stalls: when the compute stream (on a CPU the training thread) was blocked on a collective.
        aux: optimizer, clipping, reading the loss, data; one that waits for a collective (gradient clipping on shards)
            is stalled, not working.
        copy: memory copies; of a trace that has them, fills too. Each of these three is None where it is not observed.
        pipeline: when micro-batches ran through the stages of a pipeline; a window without any of it has none.
        bubbles: when the rank waited there for another stage; what was computed meanwhile is no bubble.
        certain: the parts of these in which they certainly ran; None: all of them.
        tiled: include the tiles of each window, which cost as much as everything else.

    Raises:
        IntervalError: a window ends before it starts.
        ValueError: a kind that is not in `classes.KINDS`.
    """
    if unknown := comm.keys() - set(KINDS):
        raise ValueError(f"unknown kinds of collective {sorted(unknown)}; the kinds are {', '.join(KINDS)}")
    refuse_inverted(*windows)
    nothing = interval_array()
    lanes = {COMPUTE: compute if stalls is None else subtract(compute, stalls), **comm}
    lanes[COPY] = nothing if copy is None else copy
    lanes[AUX] = nothing if aux is None else aux if stalls is None else subtract(aux, stalls)
    working = lanes[COMPUTE]
    if pipeline is not None and bubbles is not None:
        lanes[BUBBLE] = subtract(intersect(bubbles, pipeline), working)
    unnamed = nothing if of_unknown_kind is None else of_unknown_kind
    communication = union([*comm.values(), unnamed])

    def total(merged: IntervalArray | None) -> list[Any]:
        return [None] * len(windows.start) if merged is None else covered_ns(windows, merged).tolist()

    lengths: dict[str, list[Any]] = {
        "window_ns": (windows.end - windows.start).tolist(),
        "compute_ns": total(working),
        "comm_ns": total(communication),
        "copy_ns": total(copy),
        "aux_ns": total(None if aux is None else lanes[AUX]),
        "hidden_ns": total(intersect(communication, working)),
        "stall_ns": total(stalls),
        "unknown_kind_ns": total(unnamed),
    }
    active = total(union([unnamed, *lanes.values()]))
    lengths["idle_ns"] = [whole - busy for whole, busy in zip(lengths["window_ns"], active, strict=True)]
    if BUBBLE in lanes:
        lengths["pipeline_ns"] = [length or None for length in total(pipeline)]
        lengths["bubble_ns"] = [
            None if stages is None else waited
            for stages, waited in zip(lengths["pipeline_ns"], total(lanes[BUBBLE]), strict=True)
        ]
    kinds = {kind: (total(lane), total(intersect(lane, working))) for kind, lane in comm.items()}
    bounds: list[dict[str, Bounds]] = [{} for _ in windows.start]
    if certain is not None and any(certain.bounded):
        waited = nothing if pipeline is None or bubbles is None else intersect(bubbles, pipeline)
        blocked = nothing if stalls is None else stalls
        pipeline_ns = lengths.get("pipeline_ns")
        sides = _bounds(windows, lanes, comm, communication, unnamed, aux, blocked, waited, certain, pipeline_ns)
        bounds = [of_one if bounded else {} for of_one, bounded in zip(sides, certain.bounded, strict=True)]
    tiles: list[Tile] = []
    cut = [0] * (len(windows.start) + 1)
    if tiled:
        window_of, spans, masks = tile_windows(windows, {_BIT[name]: lanes[name] for name in lanes})
        offsets = (spans.start - windows.start[window_of]).tolist(), (spans.end - windows.start[window_of]).tolist()
        tiles = list(zip(*offsets, masks.tolist(), strict=True))
        cut = np.searchsorted(window_of, np.arange(len(cut))).tolist()
    return [
        Overlap(
            **{name: values[at] for name, values in lengths.items()},
            kinds={kind: KindOverlap(lasted[at], inside[at]) for kind, (lasted, inside) in kinds.items()},
            tiles=tiles[cut[at] : cut[at + 1]],
            bounds=bounds[at],
        )
        for at in range(len(windows.start))
    ]


def _bounds(
    windows: IntervalArray,
    lanes: Mapping[str, IntervalArray],
    comm: Mapping[str, IntervalArray],
    communication: IntervalArray,
    unnamed: IntervalArray,
    aux: IntervalArray | None,
    blocked: IntervalArray,
    waited: IntervalArray,
    certain: CertainLanes,
    pipeline_ns: list[Any] | None,
) -> list[dict[str, Bounds]]:
    """Return of each window what `overlap.bounds_of` gives: the least and the greatest value of each metric, for
    any computation, communication and stalls between what is certain and what is possible.

    Args:
        lanes, comm, communication, blocked: all that is possible; `unnamed` communication certainly ran.
        waited: possible waits for another stage of a pipeline, in it.
    """
    nothing, may_work, less = interval_array(), lanes[COMPUTE], subtract
    works = less(certain.compute, blocked)
    kinds = {kind: certain.comm.get(kind, nothing) for kind in KINDS if kind in comm}
    sends = union([*kinds.values(), unnamed])
    bubbles = less(intersect(certain.bubbles, waited), may_work), less(waited, works)
    other = less(nothing if aux is None else aux, certain.stalls)
    spans = {"compute_ms": (works, may_work), "compute_stall_ms": (certain.stalls, blocked)}
    runs = {"comm": (sends, communication)} | {kind: (ran, comm[kind]) for kind, ran in kinds.items()}
    for name, (runs_surely, may_run) in runs.items():
        spans[f"{name}_ms"] = runs_surely, may_run
        spans[f"compute_{name}_ms"] = intersect(runs_surely, works), intersect(may_run, may_work)
        spans[f"exposed_{name}_ms"] = less(runs_surely, may_work), less(may_run, works)
    spans["bubble_ms"] = bubbles
    if aux is not None:
        spans["aux_ms"] = lanes[AUX], other
    spans["idle_ms"] = (
        union([communication, may_work, lanes[COPY], other, bubbles[1]]),
        union([sends, works, lanes[COPY], lanes[AUX], bubbles[0]]),
    )
    spans["alone"] = less(works, communication), less(may_work, sends)

    lengths = {name: [covered_ns(windows, side).tolist() for side in both] for name, both in spans.items()}
    window_ns = (windows.end - windows.start).tolist()
    lengths["idle_ms"] = [
        [length - index for length, index in zip(window_ns, side, strict=True)] for side in lengths["idle_ms"]
    ]
    return [
        bounds_of(
            {name: (sides[0][index], sides[1][index]) for name, sides in lengths.items()},
            window_ns[index],
            None if pipeline_ns is None else pipeline_ns[index],
        )
        for index in range(len(windows.start))
    ]


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
