"""What one rank did on its device, from its trace, as a record would say it.

The stream that computes most takes the place of the host: what lies between two of its operations is own time. Waits
that the trace recorded (`kineto.stream_waits`) are taken as they are. Without them, a rank reached a collective when
its kernel started, and waited for it where that stream stood idle until its end and continued at once. Must not look at
another rank, or guess what a collective is.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from aorta.analysis.load.interval_table import NULL, IntervalClass, Intervals, Trace
from aorta.analysis.load.kineto.stream_waits import RecordedStreams
from aorta.analysis.step_intervals import SpanName, StepContents, WaitRow
from aorta.analysis.tables import Bools, CollectiveName, Collectives, Ints
from aorta.analysis.whatif.program import not_replayable
from aorta.analysis.whatif.program_reader import LEAST_STEPS, RankSteps
from aorta.timeline import arrays
from aorta.timeline.arrays import Spans
from aorta.timeline.classes import KINDS

KERNELS: Final = SpanName("compute", "kernels")
COPIES: Final = SpanName("aux", "copies")
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


@dataclass(frozen=True)
class TracedRank:
    """One rank; times are those of its trace.

    Attributes:
        steps: numbers of its steps; `begin_ns` and `end_ns` are when the host marked them.
        collectives: by arrival.
        arrival_ns: when the rank had reached each.
        arrival_known: it was not queued, or the trace says whom it waited for.
        waits_recorded: the trace says who waited for what.
        compute, copies: when it computed and copied, on any stream.
        idle: when the computing stream stood idle for another reason than a wait.
        elsewhere: part of the computation that ran on other streams.
    """

    rank: int
    host: str | None
    steps: Ints
    begin_ns: Ints
    end_ns: Ints
    collectives: Intervals
    arrival_ns: Ints
    arrival_known: Bools
    waits: Waits
    waits_recorded: bool
    compute: Spans
    copies: Spans
    idle: Spans
    elsewhere: float

    def since(self, step: int) -> TracedRank:
        """Return the same without the steps before one."""
        kept = self.steps >= step
        return replace(self, steps=self.steps[kept], begin_ns=self.begin_ns[kept], end_ns=self.end_ns[kept])

    @property
    def idle_part(self) -> float:
        """Which part of its steps the computing stream stood idle for another reason than a wait."""
        window = int(self.begin_ns[0]), int(self.end_ns[-1])
        return arrays.measure(arrays.clip(self.idle, window)) / max(window[1] - window[0], 1)

    def queued(self, edges_ns: Ints) -> int:
        """Return how many collectives between edges of steps were queued, with an arrival that is not known."""
        first, last = np.searchsorted(self.arrival_ns, edges_ns[[0, -1]])
        return int((~self.arrival_known[first:last]).sum())

    def outside_waits(self, at_ns: int) -> int:
        """Return an instant, or when the wait began that it lies in."""
        place = int(np.searchsorted(self.waits.enter_ns, at_ns)) - 1
        inside = place >= 0 and at_ns < self.waits.leave_ns[place]
        return int(self.waits.enter_ns[place]) if inside else at_ns

    def between(self, edges_ns: Ints, offset_ns: int) -> RankSteps:
        """Return the rank's steps, cut at these edges.

        Args:
            edges_ns: when each step begins, and when the last one ends.
            offset_ns: what to add to its clock for that of all ranks.
        """
        rows = self.collectives
        first = np.searchsorted(self.arrival_ns, edges_ns).tolist()
        gaps = np.append(self.begin_ns[1:] - self.end_ns[:-1], 0)  # as marked
        ends = np.maximum(edges_ns[1:] - gaps, edges_ns[:-1])
        of_step = np.zeros(len(rows), np.int64)  # when the step of each collective began
        for begin, low, high in zip(edges_ns.tolist(), first, first[1:], strict=False):
            of_step[low:high] = begin
        names: dict[CollectiveName, int] = {}
        columns = (rows.kind.tolist(), rows.group.tolist(), rows.bytes.tolist())
        name = [
            names.setdefault(CollectiveName(KINDS[kind], rows.groups[group], size, None, None), len(names))
            for kind, group, size in zip(*columns, strict=True)
        ]
        return RankSteps(
            edges_ns[:-1] + offset_ns,
            ends - edges_ns[:-1],
            self._contents(edges_ns, ends),
            list(map(slice, first[:-1], first[1:])),
            Collectives(
                tuple(names),
                np.array(name, np.int32),
                rows.seq.astype(np.int64),
                self.arrival_ns - of_step,
                rows.start_ns - of_step,
                rows.end_ns - of_step,
            ),
        )

    def _contents(self, edges_ns: Ints, ends_ns: Ints) -> list[StepContents]:
        """Return what ran inside the steps that begin at these edges and end at `ends_ns`."""
        rows, waits = self.collectives, self.waits
        found = []
        entered = np.searchsorted(waits.enter_ns, edges_ns).tolist()
        for begin, end, low, high in zip(edges_ns.tolist(), ends_ns.tolist(), entered, entered[1:], strict=False):
            spans = [
                (name, at - begin, until - begin)
                for name, busy in ((KERNELS, self.compute), (COPIES, self.copies))
                for at, until in arrays.pairs(arrays.cut(busy, (begin, end)))
            ]
            waited = [
                WaitRow(rows.groups[int(rows.group[row])], int(rows.seq[row]), enter - begin, leave - begin)
                for enter, leave, row in zip(*(column[low:high].tolist() for column in waits), strict=True)
            ]
            found.append(StepContents(spans, waited, []))
        return found


def traced_rank(trace: Trace, rank: int, device: int, order: RecordedStreams | None, steps: Ints) -> TracedRank:
    """Read one rank.

    Args:
        trace: of one rank, without rows that no metric can use.
        rank: its number.
        device: which of its devices.
        order: what the trace says about streams that wait for each other; None: nothing.
        steps: those that are wanted. The first are left out as long as they hold collectives that were launched before
            the recording, which the trace does not describe.

    Raises:
        InputError: a collective is not described as a replay needs it.
    """
    marks = trace.windows
    mine = np.flatnonzero(np.isin(marks.step, steps))
    mine = mine[np.argsort(marks.step[mine], kind="stable")]
    table = trace.intervals
    table = table.take(table.device == device)
    table = table.take(np.argsort(table.start_ns, kind="stable"))
    comm = table.take(table.cls == IntervalClass.COMM)
    mine = mine[_described(comm, trace, rank, marks.start_ns[mine], int(marks.end_ns[mine[-1]])) :]
    collectives = comm.take((comm.group != NULL) & (comm.seq != NULL) & (comm.kind != NULL) & (comm.bytes != NULL))
    computes = table.cls == IntervalClass.COMPUTE
    stream, elsewhere = computing_stream(table.take(computes))
    idle = idle_times(table.take((table.stream == stream) & (table.cls != IntervalClass.AUX)))
    arrival, known = arrivals(collectives, stream, order)
    recorded = None if order is None else recorded_waits(order, stream, collectives)
    waits = inferred_waits(idle, collectives, stream) if recorded is None else recorded
    waits = with_own(issued_first(waits, collectives, arrival), collectives, stream)
    by_arrival = np.lexsort((collectives.start_ns, arrival))
    place = np.argsort(by_arrival)
    return TracedRank(
        rank=rank,
        host=trace.host,
        steps=marks.step[mine],
        begin_ns=marks.start_ns[mine],
        end_ns=marks.end_ns[mine],
        collectives=collectives.take(by_arrival),
        arrival_ns=arrival[by_arrival],
        arrival_known=known[by_arrival],
        waits=waits._replace(row=place[waits.row]),
        waits_recorded=recorded is not None,
        compute=arrays.merge(table.take(computes).spans),
        copies=arrays.merge(table.take(table.cls == IntervalClass.COPY).spans),
        idle=arrays.subtract(idle, arrays.merge(Spans(waits.enter_ns, waits.leave_ns))),
        elsewhere=elsewhere,
    )


def _described(comm: Intervals, trace: Trace, rank: int, begin_ns: Ints, end_ns: int) -> int:
    """Return from which step on all collectives are described.

    Raises:
        InputError: too few steps are left, or collectives are described in a way that cannot be.
    """
    missing = {
        "kind": comm.kind == NULL,
        "process group": comm.group == NULL,
        "sequence number": comm.seq == NULL,
        "size": comm.bytes == NULL,
    }
    inside = (comm.start_ns >= begin_ns[0]) & (comm.start_ns < end_ns)
    lacking = inside & np.any(list(missing.values()), axis=0)
    first = int(np.searchsorted(begin_ns, comm.start_ns[lacking].max(), side="right")) if lacking.any() else 0
    if len(begin_ns) - first < LEAST_STEPS:
        words = ", no ".join(what for what, absent in missing.items() if (absent & inside).any())
        raise not_replayable(
            trace.path,
            f"{int(lacking.sum())} of {int(inside.sum())} collectives of rank {rank} have no {words}. Their kernels "
            "must carry the parameters of record_param_comms ('Collective name', 'Process Group Name', 'Seq', "
            "'In msg nelems', 'dtype'): record with a torch whose profiler writes them, with record_shapes=True, and "
            "over more steps",
        )
    rows = comm.take(inside & (comm.start_ns >= begin_ns[first]))
    for group in np.unique(rows.group).tolist():
        if (np.diff(rows.seq[rows.group == group]) <= 0).any():
            raise not_replayable(
                trace.path,
                f"on rank {rank} the kernels of process group {rows.groups[group]!r} do not have ascending sequence "
                "numbers, one each, by which a collective is found on other ranks",
            )
    return first


def computing_stream(compute: Intervals) -> tuple[int, float]:
    """Return the stream that computes most, and which part of the computation runs on others."""
    streams, of = np.unique(compute.stream, return_inverse=True)
    busy = np.bincount(of.reshape(-1), compute.end_ns - compute.start_ns)
    if not len(streams) or not busy.sum():
        return NULL, 0.0
    most = int(busy.argmax())
    return int(streams[most]), float(1 - busy[most] / busy.sum())


def idle_times(on_stream: Intervals) -> Spans:
    """Return when nothing ran on a stream, between what did."""
    busy = arrays.merge(on_stream.spans)
    return Spans(busy.end[:-1], busy.start[1:])


def arrivals(collectives: Intervals, stream: int, order: RecordedStreams | None) -> tuple[Ints, Bools]:
    """Return when a rank reached each collective, and whether that is known.

    It came when the kernel started; unless this was queued behind another, when all had ended that its stream had to
    wait for. Where the trace does not hold that, it is taken that it came when it reached the one before: the earliest
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
    """Return the waits of a stream for collectives of others, as recorded; None: the trace holds none."""
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
    """Return the idle times of a stream that ended with a collective of another."""
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
    """Begin waits when their collectives had been reached. One that began before is cut there: until then the stream
    waited for the collective that this one was held back by, where one ended just then, or for its host.
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
    """Add waits for collectives on the stream itself, which cannot continue before they have ended."""
    own = np.flatnonzero(collectives.stream == stream)
    enter = np.concatenate([waits.enter_ns, collectives.start_ns[own]])
    leave = np.concatenate([waits.leave_ns, collectives.end_ns[own]])
    order = np.lexsort((leave, enter))
    return Waits(enter[order], leave[order], np.concatenate([waits.row, own])[order])
