"""Defines the program of a run: the operations and own time of every rank, without waiting for other ranks.

A rank is a list of operations with its own time between them (`Operation`): a step begins, collectives are issued and
waited for, the step ends. What it computed between two operations is a span of that time (`ProgramSpans`), positioned
by the operation before it. A collective is known by its costs (`StepProgram`). All times are integer nanoseconds;
arrays of a step have one column per rank. A change makes another program of it (`changes`).

Must not: read a file, decide when anything happens (`replay` does), or predict anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from aorta.config.fabric import EmulatedFabric, network_cost_ns
from aorta.read.frames import Bools, Floats, Ints
from aorta.read.run import Members
from aorta.timeline.overlap import NS_PER_MS

Column: TypeAlias = npt.NDArray[np.int64] | npt.NDArray[np.int32]
"""Nanoseconds; 32 bits wide where all of them fit, since a large run has a hundred million."""


class What(IntEnum):
    BEGIN = 0
    ISSUE = 1
    WAIT = 2
    END = 3


class Operation(NamedTuple):
    """One operation of a rank. `position` is the index of the collective among those that the rank issues in a step;
    `back`: how many steps before this one it was issued.
    """

    what: What
    position: int = -1
    back: int = 0


class Issued(NamedTuple):
    """One collective as a rank issues it. Collectives on the same `link` of a rank run one after another; with None
    they wait for no other.
    """

    kind: str
    group: str
    bytes: int
    ranks: Members
    link: int | None

    def charge_ns(self, world_size: int, network: EmulatedFabric) -> float:
        """Return the time that an emulated network charges for it, without jitter."""
        return network_cost_ns(self.kind, self.bytes, self.ranks, world_size, network)


class RankLayout(NamedTuple):
    operations: tuple[Operation, ...]
    issued: tuple[Issued, ...]


@dataclass(frozen=True)
class ProgramSpans:
    """Spans of one step on all ranks, sorted by rank; every column has one element per span.

    Attributes:
        computes: a block computes; otherwise a call of the backend takes long, in which nothing does.
        begin_after, end_after: index of the last operation of its rank before it begins, and before it ends.
        begin_ns, end_ns: after the end of that operation.
    """

    rank: Column
    computes: Bools
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
        layouts: for each rank, its index in `RunProgram.layouts`.
        host_ns: own time of each rank before each operation, shape (operations, ranks); before BEGIN it is the time
            since the step before.
        wake_ns: from the end of a wait's collective, or the arrival if that is later, until the rank resumed; shape
            (operations, ranks), 0 except for waits.
        cost_ns: time of each collective on its link, once all ranks have arrived and the link is free; shape
            (collectives, ranks), or (collectives, 1) where it is the same on all ranks.
        network_ns: the part of `cost_ns` that the network's formula explains, shape (collectives, 1); None: unknown.
        backend_ns: time from the last arrival until the backend itself was done, which the end is never before; None
            where the backend never decided the end.
    """

    global_step: int
    layouts: tuple[int, ...]
    host_ns: Column
    wake_ns: Column
    cost_ns: Column
    network_ns: Column | None
    backend_ns: Column | None
    spans: ProgramSpans


@dataclass(frozen=True)
class RunProgram:
    """One run, ready to be replayed.

    Attributes:
        ranks: global ranks, ascending; columns of all arrays follow them.
        layouts: distinct layouts of a rank's step.
        steps: in order.
        start_ns: when each rank began its first step, on the common clock.
        busy_ns: for each link of each rank, until when it was busy with what came before the first step; shape
            (links, ranks).
        recorded_ns: recorded durations of the steps, shape (steps, ranks); `recorded_ratio` and `recorded_exposed_ms`:
            their overlap ratio and exposed communication, NaN where they are null.
        network: the emulated network of the run; None: a real one, of which only the recorded costs are known.
        law: recorded ends follow that network's formula exactly; otherwise its charge is a part of what was recorded.
        collectives: number of them, of all steps and ranks.
        backend_was_limit: how many of them ended when the backend was done, not the network.
        arrival_unknown: how many of them were queued, so that their arrival on a device is known within bounds only.
        queued_share: the part of all costs in which collectives without a link were queued behind others.
    """

    ranks: tuple[int, ...]
    world_size: int
    layouts: tuple[RankLayout, ...]
    steps: Sequence[StepProgram]
    start_ns: Ints
    busy_ns: Ints
    recorded_ns: Ints
    recorded_ratio: Floats
    recorded_exposed_ms: Floats
    backend: str | None
    network: EmulatedFabric | None
    law: bool
    collectives: int
    backend_was_limit: int
    arrival_unknown: int
    queued_share: float = 0.0

    def recorded_step_ms(self) -> Floats:
        return np.asarray(self.recorded_ns.max(axis=1) / NS_PER_MS)


def compact(values: npt.NDArray[np.int64]) -> Column:
    if values.size and (values.max() >= 2**31 or values.min() < -(2**31)):
        return values
    return values.astype(np.int32)
