"""Places the operations of a program anew: issues and waits are taken out and put elsewhere on the axis of own time.

A rank's own work stays as it was recorded. Which operations go where is said for one rank and step at a time
(`ddp_buckets`, `fsdp_prefetch`); this module writes the program that follows. Must not replay, or move what a rank
computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from aorta.analysis.whatif.own_time import OwnTime, own_time
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

ROOM: Final = 1 << 20
"""Room between the turns of recorded operations for those that are put between them."""


class Placed(NamedTuple):
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
    """One step of one rank: its operations on the axis of own time, and its collectives by place."""

    step: StepProgram
    column: int
    own: OwnTime
    layout: RankLayout
    placed: tuple[Placed, ...]
    costs: tuple[CollectiveCost, ...]

    def spans(self, program: RunProgram, phase: str) -> list[tuple[str, int, int]]:
        """Block, begin and end on the axis of own time of each computing span of a phase."""
        chosen = self.step.spans.of_rank(self.column)
        rows = zip(
            self.step.spans.name[chosen].tolist(),
            self.own.begin_ns[chosen].tolist(),
            self.own.end_ns[chosen].tolist(),
            strict=True,
        )
        names = program.names
        return sorted(
            ((names[name].name, begin, end) for name, begin, end in rows if names[name][::2] == ("compute", phase)),
            key=lambda row: row[1],
        )


Rearrange = Callable[[RankView], tuple[list[Placed], list[CollectiveCost]]]


def restructured(program: RunProgram, rearrange: Rearrange) -> RunProgram:
    """A program in which every rank's operations are placed anew, step by step."""
    layouts: dict[RankLayout, int] = {}
    steps = []
    for step in program.steps:
        own = own_time(step)
        made = [
            _made(*rearrange(view))
            for view in (_view(program, step, own, column) for column in range(len(program.ranks)))
        ]
        of_step = tuple(layouts.setdefault(each.layout, len(layouts)) for each in made)
        steps.append(_step(step, own, made, of_step))
    return replace(program, layouts=tuple(layouts), steps=steps)


def _view(program: RunProgram, step: StepProgram, own: OwnTime, column: int) -> RankView:
    layout = program.layouts[step.layouts[column]]
    placed = tuple(
        Placed(int(own.at_ns[index, column]), index, *operation, int(step.wake_ns[index, column]))
        for index, operation in enumerate(layout.operations)
    )

    def value(table: Column | None, place: int) -> int:
        return 0 if table is None else int(table[place, min(column, table.shape[1] - 1)])

    costs = tuple(
        CollectiveCost(issued, value(step.cost_ns, at), value(step.network_ns, at), value(step.backend_ns, at))
        for at, issued in enumerate(layout.issued)
    )
    return RankView(step, column, own, layout, placed, costs)


@dataclass(frozen=True)
class _Made:
    layout: RankLayout
    at_ns: list[int]
    wake_ns: list[int]
    costs: list[CollectiveCost]


def _made(placed: list[Placed], costs: list[CollectiveCost]) -> _Made:
    placed = sorted(placed)
    place: dict[int, int] = {}
    for each in placed:
        if each.what is What.ISSUE:
            place[each.collective] = len(place)
    issued = sorted(place, key=place.__getitem__)
    if any(each.what is What.WAIT and each.back and each.collective not in place for each in placed):
        raise InputError(
            "a wait is for a collective of an earlier step that this step does not issue: its operations cannot "
            "be moved"
        )
    # A wait for a collective of an earlier step means its place there, which is the same in every step.
    operations = tuple(
        Operation(each.what, place.get(each.collective, -1), each.back if each.what is What.WAIT else 0)
        for each in placed
    )
    in_order = [costs[number] for number in issued]
    layout = RankLayout(operations, tuple(each.issued for each in in_order))
    return _Made(layout, [each.at_ns for each in placed], [each.wake_ns for each in placed], in_order)


def _step(step: StepProgram, own: OwnTime, made: Sequence[_Made], layouts: tuple[int, ...]) -> StepProgram:
    operations = max(len(each.at_ns) for each in made)
    places = max(len(each.costs) for each in made)
    at, wake = np.zeros((operations, len(made)), np.int64), np.zeros((operations, len(made)), np.int64)
    cost, network, backend = (np.zeros((places, len(made)), np.int64) for _ in range(3))
    for column, each in enumerate(made):
        at[: len(each.at_ns), column], wake[: len(each.wake_ns), column] = each.at_ns, each.wake_ns
        at[len(each.at_ns) :, column] = each.at_ns[-1]
        for place, of_place in enumerate(each.costs):
            cost[place, column], network[place, column], backend[place, column] = of_place[1:]
    host = np.diff(at, axis=0, prepend=0)
    host[0] = step.host_ns[0]
    return replace(
        step,
        layouts=layouts,
        host_ns=compact(host),
        wake_ns=compact(wake),
        cost_ns=compact(cost),
        network_ns=None if step.network_ns is None else compact(network),
        backend_ns=compact(backend) if backend.any() else None,
        spans=_spans(step.spans, own, made),
    )


def _spans(spans: ProgramSpans, own: OwnTime, made: Sequence[_Made]) -> ProgramSpans:
    """The same spans, behind the operations that now come before them: a span that ends where an operation stands ends
    before it, one that begins there begins behind it.
    """
    begin_after, end_after = np.zeros(len(spans.rank), np.int64), np.zeros(len(spans.rank), np.int64)
    begin, end = own.begin_ns.copy(), own.end_ns.copy()
    for column, each in enumerate(made):
        chosen = spans.of_rank(column)
        at = np.array(each.at_ns, np.int64)
        begin_after[chosen] = np.maximum(np.searchsorted(at, begin[chosen], side="right") - 1, 0)
        end_after[chosen] = np.maximum(np.searchsorted(at, end[chosen], side="left") - 1, 0)
        begin[chosen] -= at[begin_after[chosen]]
        end[chosen] -= at[end_after[chosen]]
    return ProgramSpans(spans.rank, spans.name, compact(begin_after), compact(begin), compact(end_after), compact(end))
