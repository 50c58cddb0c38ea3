"""What one rank did in one step, as operations with own time between them.

The order of operations follows from their times. At the same instant (virtual clocks know many) an issue comes before a
wait where the wait blocked, or was for that collective; otherwise the wait was over before the issue. Must not look at
another rank.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from aorta.analysis.step_intervals import SpanName, StepContents, WaitRow
from aorta.analysis.whatif.program import Operation, What

Key: TypeAlias = tuple[str, int]
"""A collective: its group and its number in it."""
Anchor: TypeAlias = tuple[int, int]
"""A moment: the index of the last operation before it, and nanoseconds since that operation ended."""


class Ended(NamedTuple):
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


@dataclass(frozen=True)
class RankStep:
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
    known: Mapping[Key, Ended],
) -> RankStep:
    """The operations of one step.

    Args:
        index: of the step.
        start_ns: its start on the common clock.
        length_ns: its duration.
        before_ns: when the step before it was over on this rank, on the common clock.
        issue_ns: of each of its collectives, when it reached its link, from the start of the step.
        known: collectives of this rank that were issued in this step or before, ends on the common clock.
    """
    host, wake, placed = list[int](), list[int](), list[_Moment]()
    now = before_ns - start_ns
    for moment in _in_order(contents.waits or (), index, start_ns, length_ns, issue_ns, known):
        enter = max(moment.enter_ns, now)
        leave = max(moment.leave_ns, enter)
        host.append(enter - now)
        waits = moment.operation.what is What.WAIT
        wake.append(leave - max(enter, moment.until_ns) if waits else 0)
        placed.append(moment._replace(enter_ns=enter, leave_ns=leave))
        now = leave
    operations = tuple(moment.operation for moment in placed)
    ready = [_before(placed, at_ns) for at_ns in contents.ready_ns]
    ready_ns = [sum(host[1 : after + 1]) + since for after, since in ready]
    return RankStep(operations, host, wake, _spans(contents.spans, placed), start_ns + now, ready_ns)


def _in_order(
    recorded: Sequence[WaitRow],
    index: int,
    start_ns: int,
    length_ns: int,
    issue_ns: Sequence[int],
    known: Mapping[Key, Ended],
) -> list[_Moment]:
    """The operations of a step in the order in which the rank came to them. A wait for a collective that was issued
    before the first step of the program is own time.
    """
    waits = []
    for row in recorded:
        ended = known.get((row.group, row.seq))
        if ended is not None:
            operation = Operation(What.WAIT, ended.place, index - ended.step)
            waits.append(_Moment(row.enter_ns, row.leave_ns, operation, ended.end_ns - start_ns))
    found = [_Moment(0, 0, Operation(What.BEGIN))]
    at = 0
    for place, came_ns in enumerate(issue_ns):
        tied = at
        while at < len(waits) and waits[at].enter_ns < came_ns:
            at += 1
        found += waits[tied:at]
        tied = at
        while tied < len(waits) and waits[tied].enter_ns == came_ns:
            tied += 1
        same = waits[at:tied]
        if not any(wait.leave_ns > came_ns or wait.operation[1:] == (place, 0) for wait in same):
            found += same  # all of these waits were over before the issue
            at = tied
        found.append(_Moment(came_ns, came_ns, Operation(What.ISSUE, place)))
    found += waits[at:]
    return [*found, _Moment(length_ns, length_ns, Operation(What.END))]


def _spans(
    spans: Sequence[tuple[SpanName, int, int]], placed: Sequence[_Moment]
) -> list[tuple[SpanName, Anchor, Anchor]]:
    """What the rank's own time was spent on, each end placed behind an operation."""
    return [(name, _after(placed, begin), _before(placed, end)) for name, begin, end in spans if begin < end]


def _after(placed: Sequence[_Moment], at_ns: int) -> Anchor:
    """Where a span begins: behind every operation that was over by then, and behind a wait that it began in."""

    def behind(moment: _Moment) -> bool:
        return moment.leave_ns > at_ns and not (moment.enter_ns < at_ns and moment.operation.what is What.WAIT)

    index = max(bisect_left(placed, True, key=behind) - 1, 0)
    return index, max(at_ns - placed[index].leave_ns, 0)


def _before(placed: Sequence[_Moment], at_ns: int) -> Anchor:
    """Where a span ends: before an operation that the rank came to at that very moment, and before a wait that it ended
    in.
    """
    index = max(
        bisect_left(placed, True, key=lambda moment: moment.enter_ns >= at_ns or moment.leave_ns > at_ns) - 1, 0
    )
    return index, max(at_ns - placed[index].leave_ns, 0)
