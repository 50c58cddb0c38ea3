"""What one rank did on its device, from its trace, as the lines of a record would say it.

The stream that computes most takes the place of the host (`stream_time`): what lies between two of its operations is
own time. Must not look at another rank, or guess what a collective is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from aorta.analysis.load.interval_table import NULL, IntervalClass, Intervals, Trace
from aorta.analysis.load.kineto.stream_waits import RecordedStreams
from aorta.analysis.tables import Bools, Ints
from aorta.analysis.whatif.program_reader import LEAST_STEPS
from aorta.analysis.whatif.rank_program import StepLine
from aorta.analysis.whatif.stream_time import (
    Waits,
    arrivals,
    computing_stream,
    idle_times,
    inferred_waits,
    issued_first,
    recorded_waits,
    with_own,
)
from aorta.errors import InputError
from aorta.records.schema import AuxRange, Collective, ComputeRange, Wait
from aorta.timeline import arrays
from aorta.timeline.arrays import Spans
from aorta.timeline.classes import KINDS

COPIES: Final = "copies"
KERNELS: Final = "kernels"


@dataclass(frozen=True)
class TracedRank:
    """One rank; times are those of its trace, or moved to a common clock.

    Attributes:
        steps: numbers of its steps; `begin_ns` and `end_ns` are when the host marked them.
        collectives: by arrival.
        arrival_ns: when the rank had come to each.
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

    def moved(self, by_ns: int) -> TracedRank:
        """The same on another clock."""
        rows, waits = self.collectives, self.waits
        return replace(
            self,
            begin_ns=self.begin_ns + by_ns,
            end_ns=self.end_ns + by_ns,
            collectives=replace(rows, start_ns=rows.start_ns + by_ns, end_ns=rows.end_ns + by_ns),
            arrival_ns=self.arrival_ns + by_ns,
            waits=Waits(waits.enter_ns + by_ns, waits.leave_ns + by_ns, waits.row),
            compute=Spans(self.compute.start + by_ns, self.compute.end + by_ns),
            copies=Spans(self.copies.start + by_ns, self.copies.end + by_ns),
            idle=Spans(self.idle.start + by_ns, self.idle.end + by_ns),
        )

    def since(self, step: int) -> TracedRank:
        """The same without the steps before one."""
        kept = self.steps >= step
        return replace(self, steps=self.steps[kept], begin_ns=self.begin_ns[kept], end_ns=self.end_ns[kept])

    @property
    def idle_part(self) -> float:
        """Which part of its steps the computing stream stood idle for another reason than a wait."""
        window = int(self.begin_ns[0]), int(self.end_ns[-1])
        return arrays.measure(arrays.clip(self.idle, window)) / max(window[1] - window[0], 1)

    def queued(self, edges_ns: Ints) -> int:
        """How many collectives between edges of steps were queued, with an arrival that is not known."""
        first, last = np.searchsorted(self.arrival_ns, edges_ns[[0, -1]])
        return int((~self.arrival_known[first:last]).sum())

    def outside_waits(self, at_ns: int) -> int:
        """An instant, or when the wait began that it lies in."""
        place = int(np.searchsorted(self.waits.enter_ns, at_ns)) - 1
        inside = place >= 0 and at_ns < self.waits.leave_ns[place]
        return int(self.waits.enter_ns[place]) if inside else at_ns

    def lines(self, edges_ns: Ints) -> Iterator[StepLine]:
        """Each step as a record would have it.

        Args:
            edges_ns: when each step begins, and when the last one ends.
        """
        rows, waits = self.collectives, self.waits
        kinds, groups = rows.kind.tolist(), rows.group.tolist()
        first = np.searchsorted(self.arrival_ns, edges_ns).tolist()
        entered = np.searchsorted(waits.enter_ns, edges_ns).tolist()
        between = np.append(self.begin_ns[1:] - self.end_ns[:-1], 0)  # as marked
        ends = np.maximum(edges_ns[1:] - between, edges_ns[:-1]).tolist()
        for index, number in enumerate(self.steps.tolist()):
            begin, end = int(edges_ns[index]), int(ends[index])
            chosen = range(first[index], first[index + 1])
            yield StepLine(
                global_step=number,
                start_mono_ns=begin,
                end_mono_ns=end,
                t_start_ns=begin,
                collectives=[
                    Collective(
                        KINDS[kinds[row]],
                        rows.groups[groups[row]],
                        int(rows.seq[row]),
                        int(rows.bytes[row]),
                        None,
                        int(self.arrival_ns[row]) - begin,
                        int(rows.start_ns[row]) - begin,
                        int(rows.end_ns[row]) - begin,
                        None,
                    )
                    for row in chosen
                ],
                compute=[
                    ComputeRange(KERNELS, "", low - begin, high - begin)
                    for low, high in arrays.pairs(arrays.cut(self.compute, (begin, end)))
                ],
                stalls=[],
                aux=[
                    AuxRange(COPIES, low - begin, high - begin)
                    for low, high in arrays.pairs(arrays.cut(self.copies, (begin, end)))
                ],
                waits=[
                    Wait(
                        rows.groups[groups[row]],
                        int(rows.seq[row]),
                        int(waits.enter_ns[at]) - begin,
                        int(waits.leave_ns[at]) - begin,
                    )
                    for at in range(entered[index], entered[index + 1])
                    for row in (int(waits.row[at]),)
                ],
            )


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
    """From which step on all collectives are described.

    Raises:
        InputError: too few steps are left, or collectives are described in a way that cannot be.
    """

    def no(why: str) -> InputError:
        return InputError(f"{trace.path}: a replay is not possible: {why}")

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
        raise no(
            f"{int(lacking.sum())} of {int(inside.sum())} collectives of rank {rank} have no {words}. Their kernels "
            "must carry the parameters of record_param_comms ('Collective name', 'Process Group Name', 'Seq', "
            "'In msg nelems', 'dtype'): record with a torch whose profiler writes them, with record_shapes=True, and "
            "over more steps"
        )
    rows = comm.take(inside & (comm.start_ns >= begin_ns[first]))
    for group in np.unique(rows.group).tolist():
        if (np.diff(rows.seq[rows.group == group]) <= 0).any():
            raise no(
                f"on rank {rank} the kernels of process group {rows.groups[group]!r} do not have ascending sequence "
                "numbers, one each, by which a collective is found on other ranks"
            )
    return first
