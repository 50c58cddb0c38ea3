"""The own time of a rank as one axis: what it would have taken without waiting.

Every operation and every end of a span has a place on it. Changes that stretch, shrink or move a rank's own work are
made here, and written back as time before operations; `restructured` takes operations out and puts them elsewhere,
while the work stays as it was recorded. Which operations go where is said for one rank and step at a time
(`ddp_buckets`, `changes`). Must not replay anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from aorta.analysis.tables import Bools, Ints
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


@dataclass(frozen=True)
class OwnTime:
    """A step in own time since its BEGIN, nanoseconds.

    Attributes:
        at_ns: of each operation, shape (operations, ranks); 0 at BEGIN.
        begin_ns, end_ns: of each span.
    """

    at_ns: Ints
    begin_ns: Ints
    end_ns: Ints


def own_time(step: StepProgram) -> OwnTime:
    """Return the step on the axis of own time."""
    host = step.host_ns.astype(np.int64)
    host[0] = 0
    at_ns = np.cumsum(host, axis=0)
    spans = step.spans
    last = len(at_ns) - 1

    def place(after: Column, offset: Column) -> Ints:
        # No further than the operation behind it: the span ended there when it was recorded, too.
        found: Ints = at_ns[after, spans.rank] + offset
        behind: Ints = at_ns[np.minimum(after + 1, last), spans.rank]
        return np.where(after < last, np.minimum(found, behind), found)

    return OwnTime(
        at_ns,
        place(spans.begin_after, spans.begin_ns),
        place(spans.end_after, spans.end_ns),
    )


def with_own_time(step: StepProgram, own: OwnTime) -> StepProgram:
    """Return the same operations at other own times, which keep their order."""
    host = np.diff(own.at_ns, axis=0, prepend=0)
    host[0] = step.host_ns[0]
    spans = step.spans

    def offset(at_ns: Ints, after: Column) -> Ints:
        since: Ints = at_ns - own.at_ns[after, spans.rank]
        return np.maximum(since, 0)

    moved = ProgramSpans(
        spans.rank,
        spans.name,
        spans.begin_after,
        compact(offset(own.begin_ns, spans.begin_after)),
        spans.end_after,
        compact(offset(own.end_ns, spans.end_after)),
    )
    return replace(step, host_ns=compact(host), spans=moved)


def stretched(step: StepProgram, chosen: Bools, factor: float) -> StepProgram:
    """Return the step with the own time inside some spans made `factor` times as long.

    Args:
        chosen: which spans, one element each.
    """
    own = own_time(step)
    ranks = step.host_ns.shape[1]
    starts, stops = _by_rank(step.spans.rank[chosen], own.begin_ns[chosen], own.end_ns[chosen], ranks)
    moved = _moved_by(starts, stops, factor)
    everyone = np.arange(ranks)
    return with_own_time(
        step,
        OwnTime(
            own.at_ns + moved(everyone[None, :], own.at_ns),
            own.begin_ns + moved(step.spans.rank, own.begin_ns),
            own.end_ns + moved(step.spans.rank, own.end_ns),
        ),
    )


def _by_rank(rank: Column, begin: Ints, end: Ints, ranks: int) -> tuple[Ints, Ints]:
    """Return spans of each rank as a row, shape (ranks, most spans of one), without overlap; empty ones last."""
    order = np.lexsort((begin, rank))
    rank, begin, end = rank[order], begin[order], end[order]
    counts = np.bincount(rank, minlength=ranks)
    place = np.arange(len(rank)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts, stops = (np.zeros((ranks, int(counts.max(initial=0))), np.int64) for _ in range(2))
    starts[rank, place], stops[rank, place] = begin, end
    reach = np.maximum.accumulate(stops, axis=1)
    if starts.shape[1] > 1:
        starts[:, 1:] = np.maximum(starts[:, 1:], reach[:, :-1])
    return starts, np.maximum(stops, starts)


def _moved_by(starts: Ints, stops: Ints, factor: float) -> Callable[[Column, Ints], Ints]:
    """Return by how much a moment of a rank moves when its spans become `factor` times as long."""

    def moved(rank: Column, at_ns: Ints) -> Ints:
        inside = np.zeros(at_ns.shape, np.int64)
        for number in range(starts.shape[1]):
            begin, end = starts[rank, number], stops[rank, number]
            inside += np.clip(at_ns - begin, 0, end - begin)
        further: Ints = np.rint(inside * (factor - 1)).astype(np.int64)
        return further

    return moved


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
    """One step of one rank: its operations on the axis of own time, and its collectives by place."""

    step: StepProgram
    column: int
    own: OwnTime
    layout: RankLayout
    placed: tuple[OwnOperation, ...]
    costs: tuple[CollectiveCost, ...]

    def spans(self, program: RunProgram, phase: str) -> list[tuple[str, int, int]]:
        """Return the block, begin and end on the axis of own time of each computing span of a phase."""
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


Rearrange = Callable[[RankView], tuple[list[OwnOperation], list[CollectiveCost]]]


def restructured(program: RunProgram, rearrange: Rearrange) -> RunProgram:
    """Return a program in which every rank's operations are placed anew, step by step."""
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
        OwnOperation(int(own.at_ns[index, column]), index, *operation, int(step.wake_ns[index, column]))
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


def _made(placed: list[OwnOperation], costs: list[CollectiveCost]) -> _Made:
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
    """Return the same spans, behind the operations that now come before them: a span that ends where an operation
    stands ends before it, one that begins there begins behind it.
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
