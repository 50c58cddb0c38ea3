"""Defines the program of a run (what each rank did in its own time, without waiting for other ranks), and its changes.

Two parts. *Program*: a rank is a list of operations with its own time between them (`Operation`): a step begins,
collectives are issued and waited for, the step ends. What it computed between two operations is a span of that time
(`ProgramSpans`), positioned by the operation before it. A collective is known by its costs (`StepProgram`). All times
are integer nanoseconds; arrays of a step have one column per rank. *Changes* of these numbers are another network, a
straggler or other buckets: how each is written, what it does to the program, and its stated error.
`network_changes`, `rank_changes` and `changes` define one class for each; `changes` lists all.

Must not: read a file, decide when anything happens (`replay` does), or predict anything.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Final, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from aorta.analysis.step_intervals import SpanName
from aorta.analysis.tables import Floats, Ints, Members
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
    """What a rank does in a step, without times; most steps of a run share one."""

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
        """Return the recorded job step times: of each step, that of the rank that took longest."""
        return np.array([step.recorded_ns.max() for step in self.steps]) / NS_PER_MS


def not_replayable(where: object, why: object) -> InputError:
    """Return the error for a run whose program would have to be guessed."""
    return InputError(f"{where}: a replay is not possible: {why}")


def compact(values: npt.NDArray[np.int64]) -> Column:
    """Return the same numbers in 32 bits where they fit."""
    if values.size and (values.max() >= 2**31 or values.min() < -(2**31)):
        return values
    return values.astype(np.int32)


FACTOR_LIMIT: Final = 1e6
"""A factor is at most this, and at least its inverse: beyond it 64 bits of nanoseconds could overflow."""


@dataclass(frozen=True)
class Changed:
    """A program with changes made, and sentences about what was assumed for them."""

    program: RunProgram
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Change(ABC):
    """One change, as a value. `text` is how it was written.

    Attributes:
        HEAD: the first word of its target.
        FORMS: what can be set -> how it is written, an example each.
        STATED_ERROR: the part of the predicted change that may be wrong: assumed, then measured
        (docs/dev/what-if-model.md).
    """

    HEAD: ClassVar[str]
    FORMS: ClassVar[Mapping[str, str]]
    STATED_ERROR: ClassVar[float] = 0.10

    text: str

    @classmethod
    @abstractmethod
    def read(cls, text: str, rest: Sequence[str], value: str) -> Self:
        """Read `HEAD.rest=value`; `text` is all of it.

        Raises:
            InputError: it is not understood; the message says what is allowed.
        """

    @abstractmethod
    def make(self, program: RunProgram) -> Changed:
        """Give the program with the change made; the one it was given stays as it is.

        Raises:
            InputError: it cannot be made in this program; the message says why.
        """

    @classmethod
    def refused(cls, text: str, why: str, *forms: str) -> InputError:
        """Return the error for what cannot be read: why, and how `forms` are written; without any, nothing more."""
        allowed = f". Allowed: {'; '.join(cls.FORMS[form] for form in forms)}" if forms else ""
        return InputError(f"--set {text}: {why}{allowed}")

    @classmethod
    def factor_of(cls, text: str, value: str, form: str, allowed: str = "a factor such as x2") -> float:
        """Read a factor, written as x2.

        Raises:
            InputError: it is none, or beyond `FACTOR_LIMIT`.
        """
        match = re.fullmatch(r"x([0-9.eE+-]+)", value)
        if match is None:
            raise cls.refused(text, f"{value!r} is not {allowed}", form)
        factor = cls.number_of(text, match[1], "a factor such as x2", form)
        if factor <= 0:
            raise cls.refused(text, f"a factor is greater than 0, not {factor:g}", form)
        if not 1 / FACTOR_LIMIT <= factor <= FACTOR_LIMIT:
            between = f"{1 / FACTOR_LIMIT:g} and {FACTOR_LIMIT:g}"
            raise cls.refused(text, f"a factor is between {between}, not {factor:g}", form)
        return factor

    @classmethod
    def number_of(cls, text: str, value: str, allowed: str, *forms: str) -> float:
        """Read a number; `allowed` says in words what would be read.

        Raises:
            InputError: it is none, or larger than anything that a machine has.
        """
        try:
            number = float(value)
        except ValueError:
            raise cls.refused(text, f"{value!r} is not {allowed}", *forms) from None
        if not math.isfinite(number) or abs(number) > 1e12:
            raise cls.refused(text, f"{value} is beyond any machine", *forms)
        return number


def is_count(text: str) -> bool:
    """Return whether a text is a plain number from 0; of `str.isdigit`, also what `int` refuses is."""
    return re.fullmatch(r"[0-9]{1,9}", text) is not None
