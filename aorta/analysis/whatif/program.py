"""Defines the program of a run (what each rank did in its own time, without waiting for other ranks), and its changes.

A rank is a list of operations with its own time between them (`Operation`): a step begins, collectives are issued and
waited for, the step ends. What it computed between two operations is a span of that time (`ProgramSpans`), positioned
by the operation before it. A collective is known by its costs (`StepProgram`). All times are integer nanoseconds;
arrays of a step have one column per rank. A `Change` is another network, a straggler or other buckets; `changes` and
`strategy_changes` define them.

The own time of a rank is also an axis: what it would have taken without waiting. `restructured` takes operations out
and puts them elsewhere on it, while the work stays as it was recorded.

Must not: read a file, decide when anything happens (`replay` does), or predict anything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import ClassVar, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from aorta.analysis.frames import Floats, Ints, SpanName
from aorta.analysis.run import Members
from aorta.config.groups.fabric import network_cost_ns
from aorta.config.schema import EmulatedFabric
from aorta.errors import InputError
from aorta.records.schema import Gradient
from aorta.timeline.overlap import NS_PER_MS

Column: TypeAlias = npt.NDArray[np.int64] | npt.NDArray[np.int32]
"""Nanoseconds; 32 bits wide where all of them fit, since a large run has a hundred million."""


class What(IntEnum):
    BEGIN = 0
    ISSUE = 1
    WAIT = 2
    END = 3


class Operation(NamedTuple):
    """One operation of a rank. `place` is the collective's, counted over what this rank issues in a step; it was issued
    `back` steps before this one.
    """

    what: What
    place: int = -1
    back: int = 0


class Issued(NamedTuple):
    """One collective as a rank issues it. `link` is what carries it: collectives of one link of a rank run one after
    another; None: it waits for no other.
    """

    kind: str
    group: str
    bytes: int
    ranks: Members
    link: int | None

    def charge_ns(self, world_size: int, network: EmulatedFabric) -> float:
        """Return what an emulated network charges for it by its law; jitter left out."""
        return network_cost_ns(self.kind, self.bytes, self.ranks, world_size, network)


class RankLayout(NamedTuple):
    operations: tuple[Operation, ...]
    issued: tuple[Issued, ...]


@dataclass(frozen=True)
class ProgramSpans:
    """Spans of one step on all ranks, sorted by rank; every column has one element per span.

    Attributes:
        name: index into `RunProgram.names`.
        begin_after, end_after: index of the last operation of its rank before it begins, and before it ends.
        begin_ns, end_ns: after the end of that operation.
    """

    rank: Column
    name: Column
    begin_after: Column
    begin_ns: Column
    end_after: Column
    end_ns: Column

    def of_rank(self, rank: int) -> slice:
        first, last = np.searchsorted(self.rank, [rank, rank + 1])
        return slice(int(first), int(last))


@dataclass(frozen=True)
class StepProgram:
    """One step of all ranks.

    Attributes:
        global_step: its number in the run.
        layouts: for each rank, its index in `RunProgram.layouts`.
        host_ns: own time of each rank before each operation, shape (operations, ranks); before BEGIN it is the time
            since the step before.
        wake_ns: from the end of a wait's collective, or the arrival if that is later, until the rank resumed; shape
            (operations, ranks), 0 but at waits.
        cost_ns: time of each collective on its link, once all ranks have arrived and the link is free; shape
            (collectives, ranks), or (collectives, 1) where it is the same on all ranks.
        network_ns: the part of `cost_ns` that the network's law explains, shape (collectives, 1); None: unknown.
        backend_ns: time from the last arrival until the backend itself was done, which the end is never before; None
            where it was never the limit.
        ready_ns: when the gradients of each bucket were ready, in own time since BEGIN, where DDP held them back; shape
            (buckets, ranks).
        recorded_ns: the recorded duration of the step on each rank; `recorded_ratio` and `recorded_exposed_ms`: its
            overlap ratio and exposed communication, NaN where they are null.
    """

    global_step: int
    layouts: tuple[int, ...]
    host_ns: Column
    wake_ns: Column
    cost_ns: Column
    network_ns: Column | None
    backend_ns: Column | None
    spans: ProgramSpans
    ready_ns: Ints | None
    recorded_ns: Ints
    recorded_ratio: Floats
    recorded_exposed_ms: Floats


@dataclass(frozen=True)
class Facts:
    """What a prediction rests on, and what is in its way.

    Attributes:
        network: the emulated network of the run; None: a real one, of which only the recorded costs are known.
        law: recorded ends follow that network's law exactly; otherwise its charge is a part of what was recorded.
        collectives: of all steps and ranks.
        backend_was_limit: of them, how many ended when the backend was done and not when the network was.
        arrival_unknown: of them, how many were queued, so that their arrival on a device is known within bounds only.
        gradient_order: every parameter of a DDP model as its gradient became ready; empty: unknown.
    """

    parallel: str | None
    device: str | None
    network: EmulatedFabric | None
    law: bool
    collectives: int
    backend_was_limit: int
    arrival_unknown: int = 0
    gradient_order: tuple[Gradient, ...] = ()


@dataclass(frozen=True)
class RunProgram:
    """One run, ready to be replayed.

    Attributes:
        ranks: global ranks, ascending; columns of all arrays follow them.
        world_size: of the run.
        layouts: distinct layouts of a rank's step.
        names: what spans can be.
        steps: in order.
        start_ns: when each rank began its first step, on the common clock.
        busy_ns: for each link of each rank, until when it was busy with what came before the first step; shape
            (links, ranks).
        shared_links: whether collectives of several groups take turns on a link of all their ranks.
    """

    ranks: tuple[int, ...]
    world_size: int
    layouts: tuple[RankLayout, ...]
    names: tuple[SpanName, ...]
    steps: Sequence[StepProgram]
    start_ns: Ints
    busy_ns: Ints
    facts: Facts
    shared_links: bool = False

    def recorded_step_ms(self) -> Floats:
        return np.array([step.recorded_ns.max() for step in self.steps]) / NS_PER_MS


def not_replayable(where: object, why: object) -> InputError:
    """Return the error for a run whose program would have to be guessed."""
    return InputError(f"{where}: a replay is not possible: {why}")


def compact(values: npt.NDArray[np.int64]) -> Column:
    if values.size and (values.max() >= 2**31 or values.min() < -(2**31)):
        return values
    return values.astype(np.int32)


@dataclass(frozen=True)
class Changed:
    """A program with changes made, and sentences about what was assumed for them."""

    program: RunProgram
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Change(ABC):
    """One change, as a value. `text` is how it was written.

    Attributes:
        STATED_ERROR: the part of the predicted change that may be wrong: assumed, then measured
            (docs/dev/what-if-model.md).
    """

    STATED_ERROR: ClassVar[float] = 0.10

    text: str

    @abstractmethod
    def make(self, program: RunProgram) -> Changed:
        """Give the program with the change made; the one it was given stays as it is.

        Raises:
            InputError: it cannot be made in this program; the message says why.
        """


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
