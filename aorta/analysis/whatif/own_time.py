"""The own time of a rank as one axis: what it would have taken without waiting.

Every operation and every end of a span has a place on it. `restructured` takes operations out and puts them elsewhere,
while the work stays as it was recorded, and writes the result back as time before operations. Which operations go where
is said for one rank and step at a time (`strategy_changes`). Must not replay anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from aorta.analysis.tables import Ints
from aorta.analysis.whatif.program import (
    Column,
    Issued,
    Operation,
    ProgramSpans,
    RankLayout,
    RunProgram,
    StepProgram,
    What,
    compact,
)
from aorta.errors import InputError

TURN_GAP: Final = 1 << 20
"""Room between the turns of recorded operations for those that are put between them."""


class OwnOperation(NamedTuple):
    """An operation on the axis of own time. `collective` numbers those of a rank's step, in any order; `turn` orders
    what stands at the same moment.
    """

    at_ns: int
    turn: int
    what: What
    collective: int = -1
    back: int = 0
    wake_ns: int = 0


class CollectiveCost(NamedTuple):
    """A collective with its costs (`program.StepProgram`)."""

    issued: Issued
    cost_ns: int
    network_ns: int
    backend_ns: int


@dataclass(frozen=True)
class RankView:
    """One step of one rank: its operations on the axis of own time, its collectives by place, and its spans: index of
    the name, begin and end on that axis.
    """

    step: StepProgram
    column: int
    layout: RankLayout
    placed: tuple[OwnOperation, ...]
    costs: tuple[CollectiveCost, ...]
    spans: tuple[tuple[int, int, int], ...]

    def passes(self, program: RunProgram, phase: str) -> list[tuple[str, int, int]]:
        """Return the block, begin and end of each computing span of a phase, the earliest first."""
        names = program.names
        found = [
            (names[name].name, begin, end) for name, begin, end in self.spans if names[name][::2] == ("compute", phase)
        ]
        return sorted(found, key=lambda row: row[1])


Rearrange: TypeAlias = Callable[[RankView], tuple[list[OwnOperation], list[CollectiveCost]]]
_Placed: TypeAlias = tuple[RankLayout, list[OwnOperation], list[CollectiveCost]]
"""What a rank does in a step, its operations in order, and its collectives by place."""


def restructured(program: RunProgram, rearrange: Rearrange) -> RunProgram:
    """Return a program in which every rank's operations are placed anew, step by step."""
    layouts: dict[RankLayout, int] = {}
    steps = []
    for step in program.steps:
        host = step.host_ns.astype(np.int64)
        host[0] = 0
        at_ns = np.cumsum(host, axis=0)
        begin = _span_ends(at_ns, step.spans.rank, step.spans.begin_after, step.spans.begin_ns)
        end = _span_ends(at_ns, step.spans.rank, step.spans.end_after, step.spans.end_ns)
        made = [
            _in_order(*rearrange(_view(program, step, at_ns, begin, end, column)))
            for column in range(len(program.ranks))
        ]
        of_step = tuple(layouts.setdefault(layout, len(layouts)) for layout, _, _ in made)
        steps.append(replace(_written(step, made, begin, end), layouts=of_step))
    return replace(program, layouts=tuple(layouts), steps=steps)


def _span_ends(at_ns: Ints, rank: Column, after: Column, offset: Column) -> Ints:
    """Return ends of spans on the axis: no further than the operation behind, where the span ended when recorded."""
    last = len(at_ns) - 1
    found: Ints = at_ns[after, rank] + offset
    behind: Ints = at_ns[np.minimum(after + 1, last), rank]
    return np.where(after < last, np.minimum(found, behind), found)


def _view(program: RunProgram, step: StepProgram, at_ns: Ints, begin: Ints, end: Ints, column: int) -> RankView:
    layout, chosen = program.layouts[step.layouts[column]], step.spans.of_rank(column)
    placed = tuple(
        OwnOperation(int(at_ns[index, column]), index, *operation, int(step.wake_ns[index, column]))
        for index, operation in enumerate(layout.operations)
    )

    def value(table: Column | None, place: int) -> int:
        return 0 if table is None else int(table[place, min(column, table.shape[1] - 1)])

    costs = tuple(
        CollectiveCost(issued, value(step.cost_ns, at), value(step.network_ns, at), value(step.backend_ns, at))
        for at, issued in enumerate(layout.issued)
    )
    spans = zip(step.spans.name[chosen].tolist(), begin[chosen].tolist(), end[chosen].tolist(), strict=True)
    return RankView(step, column, layout, placed, costs, tuple(spans))


def _in_order(placed: list[OwnOperation], costs: list[CollectiveCost]) -> _Placed:
    placed = sorted(placed)
    issued = [each.collective for each in placed if each.what is What.ISSUE]
    place = {collective: number for number, collective in enumerate(issued)}
    if any(each.what is What.WAIT and each.back and each.collective not in place for each in placed):
        raise InputError("a wait is for a collective of an earlier step that this step does not issue")
    # A wait for a collective of an earlier step means its place there, which is the same in every step.
    operations = tuple(
        Operation(each.what, place.get(each.collective, -1), each.back if each.what is What.WAIT else 0)
        for each in placed
    )
    by_place = [costs[collective] for collective in issued]
    return RankLayout(operations, tuple(each.issued for each in by_place)), placed, by_place


def _written(step: StepProgram, made: Sequence[_Placed], begin: Ints, end: Ints) -> StepProgram:
    """Return the step with these operations, and the same spans behind those that now come before them: a span that
    ends where an operation stands ends before it, one that begins there begins behind it.
    """
    spans = step.spans
    operations = max(len(placed) for _, placed, _ in made)
    places = max(len(costs) for _, _, costs in made)
    host, wake = np.zeros((operations, len(made)), np.int64), np.zeros((operations, len(made)), np.int64)
    cost, network, backend = (np.zeros((places, len(made)), np.int64) for _ in range(3))
    begin_after, end_after = np.zeros(len(spans.rank), np.int64), np.zeros(len(spans.rank), np.int64)
    begin, end = begin.copy(), end.copy()
    for column, (_, placed, costs) in enumerate(made):
        at = np.array([each.at_ns for each in placed], np.int64)
        host[: len(at), column] = np.diff(at, prepend=0)
        wake[: len(at), column] = [each.wake_ns for each in placed]
        for place, each in enumerate(costs):
            cost[place, column], network[place, column], backend[place, column] = each[1:]
        chosen = spans.of_rank(column)
        begin_after[chosen] = np.maximum(np.searchsorted(at, begin[chosen], side="right") - 1, 0)
        end_after[chosen] = np.maximum(np.searchsorted(at, end[chosen], side="left") - 1, 0)
        begin[chosen] -= at[begin_after[chosen]]
        end[chosen] -= at[end_after[chosen]]
    host[0] = step.host_ns[0]
    return replace(
        step,
        host_ns=compact(host),
        wake_ns=compact(wake),
        cost_ns=compact(cost),
        network_ns=None if step.network_ns is None else compact(network),
        backend_ns=compact(backend) if backend.any() else None,
        spans=ProgramSpans(
            spans.rank, spans.name, compact(begin_after), compact(begin), compact(end_after), compact(end)
        ),
    )
