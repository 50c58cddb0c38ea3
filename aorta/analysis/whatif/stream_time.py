"""When a stream came to collectives, and when it waited for them: as the trace recorded it, or as idle time shows it.

Recorded waits (`kineto.stream_waits`) are taken as they are. Without them, a rank came to a collective when its kernel
started, and waited for it where the stream that computes stood idle until its end and went on at once. Must not know
about steps or other ranks.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from aorta.analysis.load.interval_table import NULL, Intervals
from aorta.analysis.load.kineto.stream_waits import RecordedStreams
from aorta.analysis.tables import Bools, Ints
from aorta.timeline import arrays
from aorta.timeline.arrays import Spans

GOES_ON_NS: Final = 20_000
"""A stream goes on within this time of the end that it waited for: assumed (docs/dev/what-if-model.md)."""
LEAST_WAIT_NS: Final = 10_000
"""A shorter idle time is one that kernels have between them anyway, and is taken for no wait: assumed."""
QUEUED_NS: Final = 10_000
"""A kernel that starts within this time of the end of the one before on its stream may have been queued behind it:
assumed."""


class Waits(NamedTuple):
    """Waits of the computing stream, in order; `row` is the index of the collective."""

    enter_ns: Ints
    leave_ns: Ints
    row: Ints


def computing_stream(compute: Intervals) -> tuple[int, float]:
    """The stream that computes most, and which part of the computation runs on others."""
    streams, of = np.unique(compute.stream, return_inverse=True)
    busy = np.bincount(of.reshape(-1), compute.end_ns - compute.start_ns)
    if not len(streams) or not busy.sum():
        return NULL, 0.0
    most = int(busy.argmax())
    return int(streams[most]), float(1 - busy[most] / busy.sum())


def idle_times(on_stream: Intervals) -> Spans:
    """When nothing ran on a stream, between what did."""
    busy = arrays.merge(on_stream.spans)
    return Spans(busy.end[:-1], busy.start[1:])


def arrivals(collectives: Intervals, stream: int, order: RecordedStreams | None) -> tuple[Ints, Bools]:
    """When a rank came to each collective, and whether that is known.

    It came when the kernel started; unless this was queued behind another, when all had ended that its stream had to
    wait for. Where the trace does not hold that, it is taken that it came when it came to the one before: the earliest
    that is possible. The computing stream queues nothing behind a collective of its own.
    """
    arrival, known = collectives.start_ns.copy(), np.ones(len(collectives), bool)
    for number in np.setdiff1d(collectives.stream, [stream]).tolist():
        rows = np.flatnonzero(collectives.stream == number).tolist()
        place_of = {} if order is None else {row.start_ns: at for at, row in enumerate(order.rows.get(number, ()))}
        for before, row in pairwise(rows):
            start = int(collectives.start_ns[row])
            if start > collectives.end_ns[before] + QUEUED_NS:
                continue
            place = place_of.get(start)
            held = (
                [] if order is None or place is None else [order.waited_for(it) for it in order.before(number, place)]
            )
            ends = [cause.end_ns for cause in held if cause is not None]
            known[row] = bool(ends)
            arrival[row] = max(int(arrival[before]), min(max(ends, default=start), start) if ends else 0)
    return arrival, known


def recorded_waits(order: RecordedStreams, stream: int, collectives: Intervals) -> Waits | None:
    """Waits of a stream for collectives of others, as recorded; None: the trace holds none."""
    of_kernel = {
        pair: row
        for row, pair in enumerate(zip(collectives.stream.tolist(), collectives.start_ns.tolist(), strict=True))
    }
    rows = order.rows.get(stream, ())
    until: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for wait in order.waits.get(stream, ()):
        cause, place = order.waited_for(wait), order.behind(stream, wait)
        row = None if cause is None else of_kernel.get((wait.on, cause.start_ns))
        if row is not None and cause is not None and 0 < place < len(rows):
            until[place][row] = cause.end_ns
    found: list[tuple[int, int, int]] = []
    for place, ends in sorted(until.items()):
        now, goes_on = rows[place - 1].end_ns, rows[place].start_ns
        last = max(ends.values())
        for row, end in sorted(ends.items(), key=lambda pair: pair[1]):
            leave = min(max(now, end) + (GOES_ON_NS if end == last else 0), max(goes_on, now))
            found.append((now, leave, row))
            now = leave
    if not found:
        return None
    return Waits(*np.array(found, np.int64).T)


def inferred_waits(idle: Spans, collectives: Intervals, stream: int) -> Waits:
    """Idle times of a stream that ended with a collective of another."""
    others = np.flatnonzero(collectives.stream != stream)
    others = others[np.argsort(collectives.end_ns[others], kind="stable")]
    if not len(others):
        return Waits(*(np.zeros(0, np.int64) for _ in range(3)))
    ends = collectives.end_ns[others]
    last = np.searchsorted(ends, idle.end, side="right") - 1
    until = np.where(last >= 0, ends[last], idle.start)
    chosen = (until - idle.start >= LEAST_WAIT_NS) & (idle.end - until <= GOES_ON_NS)
    return Waits(idle.start[chosen], idle.end[chosen], others[last[chosen]].astype(np.int64))


def issued_first(waits: Waits, collectives: Intervals, arrival_ns: Ints) -> Waits:
    """Waits that begin when their collectives had been come to. One that began before is cut there: until then the
    stream waited for the collective that this one was held back by, where one ended just then, or for its host.
    """
    by_end = np.argsort(collectives.end_ns, kind="stable")
    ends = collectives.end_ns[by_end]
    found: list[tuple[int, int, int]] = []
    for enter, leave, row in zip(*(column.tolist() for column in waits), strict=True):
        while True:
            came = int(arrival_ns[row])
            found.append((max(enter, came), leave, row))
            at = int(np.searchsorted(ends, came, side="right")) - 1
            if came <= enter or at < 0 or ends[at] <= enter or came - ends[at] > GOES_ON_NS:
                break
            if int(arrival_ns[by_end[at]]) >= came:  # it took no time: nobody waited for it
                break
            leave, row = came, int(by_end[at])
    return Waits(*np.array(sorted(found), np.int64).reshape(-1, 3).T)


def with_own(waits: Waits, collectives: Intervals, stream: int) -> Waits:
    """And those for collectives on the stream itself, which cannot go on before they have ended."""
    own = np.flatnonzero(collectives.stream == stream)
    enter = np.concatenate([waits.enter_ns, collectives.start_ns[own]])
    leave = np.concatenate([waits.leave_ns, collectives.end_ns[own]])
    order = np.lexsort((leave, enter))
    return Waits(enter[order], leave[order], np.concatenate([waits.row, own])[order])
