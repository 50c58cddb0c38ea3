"""What was recorded of a step, as a program has it: what each rank did, and what each collective cost.

The order of a rank's operations follows from their times. At the same instant (virtual clocks know many) an issue comes
before a wait where the wait blocked, or was for that collective; otherwise the wait was over before the issue.

The cost of a collective is its time once all its ranks had arrived and its link was free. On an emulated network on one
host the record shows it exactly: an end that the emulation set is that moment plus the network's charge; one that the
backend set says how long the backend took. Everywhere else the recorded time is the cost, and the network's charge a
part of it. Must not ask what another network would charge.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from aorta.analysis.frames import Bools, Ints, SpanName
from aorta.analysis.step_intervals import StepContents
from aorta.analysis.whatif.program import Column, Operation, What, compact
from aorta.analysis.whatif.schedule import CollectiveBatch, ReplayOrder

Key: TypeAlias = tuple[str, int]
"""A collective: its group and its number in it."""
Anchor: TypeAlias = tuple[int, int]
"""A moment: the index of the last operation before it, and nanoseconds since that operation ended."""
LONG_AGO: Final = -(2**60)
"""Until then a link was busy that nothing was queued on."""


class IssuedCollective(NamedTuple):
    """A collective that was issued: index of its step, its place in it, its end on the clock of the operations."""

    step: int
    place: int
    end_ns: int


class _Moment(NamedTuple):
    """One operation as it was recorded; `until_ns` is the end of the collective that a wait is for."""

    enter_ns: int
    leave_ns: int
    operation: Operation
    until_ns: int = 0


class RankStep(NamedTuple):
    """One step of one rank: `host_ns` and `wake_ns` of each operation (`program.StepProgram`), spans of its time,
    when the last operation was over, and when held-back buckets were ready (own time).
    """

    operations: tuple[Operation, ...]
    host_ns: list[int]
    wake_ns: list[int]
    spans: list[tuple[SpanName, Anchor, Anchor]]
    left_ns: int
    ready_ns: list[int]


def rank_step(
    contents: StepContents,
    index: int,
    start_ns: int,
    length_ns: int,
    before_ns: int,
    issue_ns: Sequence[int],
    known: Mapping[Key, IssuedCollective],
) -> RankStep:
    """Return the operations of one step. A wait for a collective that was issued before the first step of the program
    is own time.

    Args:
        index: of the step.
        start_ns: its start on the common clock.
        length_ns: its duration.
        before_ns: when the step before it was over on this rank, on the common clock.
        issue_ns: of each of its collectives, when it reached its link, from the start of the step.
        known: collectives of this rank that were issued in this step or before, ends on the common clock.
    """
    waits = []
    for row in contents.waits or ():
        ended = known.get((row.group, row.seq))
        if ended is not None:
            operation = Operation(What.WAIT, ended.place, index - ended.step)
            waits.append(_Moment(row.enter_ns, row.leave_ns, operation, ended.end_ns - start_ns))
    moments = [_Moment(0, 0, Operation(What.BEGIN))]
    at = 0
    for place, came_ns in enumerate(issue_ns):
        tied = at
        while at < len(waits) and waits[at].enter_ns < came_ns:
            at += 1
        moments += waits[tied:at]
        tied = at
        while tied < len(waits) and waits[tied].enter_ns == came_ns:
            tied += 1
        same = waits[at:tied]
        if not any(wait.leave_ns > came_ns or wait.operation[1:] == (place, 0) for wait in same):
            moments += same  # all of these waits were over before the issue
            at = tied
        moments.append(_Moment(came_ns, came_ns, Operation(What.ISSUE, place)))
    moments += [*waits[at:], _Moment(length_ns, length_ns, Operation(What.END))]
    host, wake, placed = list[int](), list[int](), list[_Moment]()
    now = before_ns - start_ns
    for moment in moments:
        enter = max(moment.enter_ns, now)
        leave = max(moment.leave_ns, enter)
        host.append(enter - now)
        wake.append(leave - max(enter, moment.until_ns) if moment.operation.what is What.WAIT else 0)
        placed.append(moment._replace(enter_ns=enter, leave_ns=leave))
        now = leave
    spans = [(name, _after(placed, begin), _before(placed, end)) for name, begin, end in contents.spans if begin < end]
    ready = [_before(placed, at_ns) for at_ns in contents.ready_ns]
    return RankStep(
        operations=tuple(moment.operation for moment in placed),
        host_ns=host,
        wake_ns=wake,
        spans=spans,
        left_ns=start_ns + now,
        ready_ns=[sum(host[1 : after + 1]) + since for after, since in ready],
    )


def _after(placed: Sequence[_Moment], at_ns: int) -> Anchor:
    """Return where a span begins: behind every operation that was over by then, and behind a wait that it began in."""

    def behind(moment: _Moment) -> bool:
        return moment.leave_ns > at_ns and not (moment.enter_ns < at_ns and moment.operation.what is What.WAIT)

    index = max(bisect_left(placed, True, key=behind) - 1, 0)
    return index, max(at_ns - placed[index].leave_ns, 0)


def _before(placed: Sequence[_Moment], at_ns: int) -> Anchor:
    """Return where a span ends: before an operation that the rank reached at that very moment, and before a wait that
    it ended in.
    """
    index = max(
        bisect_left(placed, True, key=lambda moment: moment.enter_ns >= at_ns or moment.leave_ns > at_ns) - 1, 0
    )
    return index, max(at_ns - placed[index].leave_ns, 0)


@dataclass(frozen=True)
class Recorded:
    """The collectives of one step, shape (places, ranks), on the common clock.

    Attributes:
        by_backend: its end is that of the backend, not one that an emulated network set.
        backend_known: `backend_end_ns` is known besides.
    """

    issue_ns: Ints
    start_ns: Ints
    end_ns: Ints
    backend_end_ns: Ints
    by_backend: Bools
    backend_known: Bools


class Costs:
    """Works the costs out, step by step: links stay busy from one to the next.

    Args:
        law: ends follow the law of an emulated network on one host.
        shared: groups of a rank share its links.

    Attributes:
        collectives, backend_was_limit: how many there were on all ranks, and for how many the backend set the end.
    """

    def __init__(self, law: bool, shared: bool) -> None:
        self._law, self._shared = law, shared
        self._free: dict[tuple[int, int], int] = {}
        self._first: dict[tuple[int, int], int] = {}
        self.collectives = self.backend_was_limit = 0

    def of(
        self, plan: ReplayOrder, recorded: Recorded, charged: Ints | None
    ) -> tuple[Column, Column | None, Column | None]:
        """Return `cost_ns`, `network_ns` and `backend_ns` of a step (`program.StepProgram`)."""
        cost, backend = np.zeros_like(recorded.end_ns), np.zeros_like(recorded.end_ns)
        for row in plan.rows:
            if isinstance(row, CollectiveBatch):
                self._meet(row, recorded, charged, cost, backend)
        if cost.size and (cost == cost[:, :1]).all():
            cost = cost[:, :1]
        limits = backend.any()
        return compact(cost), None if charged is None else compact(charged), compact(backend) if limits else None

    def busy_before(self, links: int, ranks: int) -> Ints:
        """Return until when each link was busy before the first step, shape (links, ranks)."""
        busy = np.full((links, ranks), LONG_AGO, np.int64)
        for (link, column), until_ns in self._first.items():
            busy[link, column] = until_ns
        return busy

    def _meet(self, row: CollectiveBatch, recorded: Recorded, charged: Ints | None, cost: Ints, backend: Ints) -> None:
        places, columns = row.places, row.columns
        issue, start, end = (
            column[places, columns] for column in (recorded.issue_ns, recorded.start_ns, recorded.end_ns)
        )
        last = np.maximum.reduceat(issue, row.starts)[row.which]
        free = self._free_before(row, issue, start)
        if self._shared:
            free = np.maximum.reduceat(free, row.starts)[row.which]
        took = end - np.maximum(last, free)
        self.collectives += len(columns)
        if not self._law:
            cost[places, columns] = took
        else:
            by_backend = recorded.by_backend[places, columns]
            self.backend_was_limit += int(by_backend.sum())
            assert charged is not None  # a law charges
            by_law = charged[places, np.minimum(columns, charged.shape[1] - 1)]
            # The same on every rank, jitter included: where the backend set the end here, another rank may know it.
            shown = np.maximum.reduceat(np.where(by_backend, LONG_AGO, took), row.starts)[row.which]
            cost[places, columns] = np.where(by_backend, np.where(shown > LONG_AGO, shown, by_law), took)
            known = recorded.backend_known[places, columns]
            until = np.where(known, recorded.backend_end_ns[places, columns], end)
            backend[places, columns] = np.where(by_backend | known, np.maximum(until - last, 0), 0)
        for link, column, until_ns in zip(row.links.tolist(), columns.tolist(), end.tolist(), strict=True):
            if link >= 0:
                self._free[link, column] = until_ns

    def _free_before(self, row: CollectiveBatch, issue: Ints, start: Ints) -> Ints:
        """Return when each rank's link was free. Before its first collective only that collective can tell."""
        free = []
        for link, column, came_ns, begun_ns in zip(
            row.links.tolist(), row.columns.tolist(), issue.tolist(), start.tolist(), strict=True
        ):
            if link >= 0 and (link, column) not in self._free:
                self._free[link, column] = self._first[link, column] = begun_ns if begun_ns > came_ns else LONG_AGO
            free.append(self._free[link, column] if link >= 0 else LONG_AGO)
        return np.array(free, np.int64)
