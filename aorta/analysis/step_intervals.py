"""Defines what ran when inside one step of one rank, and how a rank gives it: read or computed on request, as it is too
large to hold for all steps.

Must not: know how a source writes it, invent a value, or load pandas.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from aorta.records.schema import (
    ActiveSegment,
    AuxRange,
    BucketReady,
    ComputeRange,
    DeviceSample,
    Stall,
    UserRange,
    Wait,
)
from aorta.timeline.classes import COMPUTE, NOT_COMMUNICATION
from aorta.timeline.intervals import Interval, merge

HAND_OVER: Final = "hand_over"
"""Cause of a stall, and lane of a span: a call of the backend that took long, in which nothing computed."""


@dataclass(frozen=True)
class StepIntervals:
    """What ran when inside one step of one rank, in ns from the step's start. `compute`, `stalls` and `aux` are None
    where the source only says which lanes were active (`segments`). `ranges` are those that the caller named. `waits`
    is None where the source does not tell who waited for what; `ready` has the buckets that were held back.
    """

    length_ns: int
    lanes: tuple[str, ...]
    segments: Sequence[ActiveSegment]
    compute: Sequence[ComputeRange] | None = None
    stalls: Sequence[Stall] | None = None
    aux: Sequence[AuxRange] | None = None
    ranges: Sequence[UserRange] = ()
    waits: Sequence[Wait] | None = None
    ready: Sequence[BucketReady] = ()

    def lane(self, name: str) -> list[Interval]:
        """Return the merged spans in which one lane was active."""
        if name not in self.lanes:
            return []
        bit = 1 << self.lanes.index(name)
        return merge((part.start_ns, part.end_ns) for part in self.segments if part.lanes & bit)

    def active(self) -> dict[str, list[Interval]]:
        """Return lane -> merged spans in which it was active; lanes that never were are left out."""
        spans = {
            name: merge((part.start_ns, part.end_ns) for part in self.segments if part.lanes >> bit & 1)
            for bit, name in enumerate(self.lanes)
        }
        return {name: merged for name, merged in spans.items() if merged}

    def computing(self) -> list[Interval]:
        """Return when it computed, stalls included: compute ranges, or the compute lane if the source has none."""
        if self.compute is None:
            return self.active().get(COMPUTE, [])
        return [(part.start_ns, part.end_ns) for part in self.compute]

    def exposed(self) -> list[Interval]:
        """Return the exposed communication: the segments in which some collective ran and the rank did not compute."""
        compute = sum(1 << bit for bit, name in enumerate(self.lanes) if name == COMPUTE)
        comm = sum(1 << bit for bit, name in enumerate(self.lanes) if name not in NOT_COMMUNICATION)
        return merge(
            (part.start_ns, part.end_ns) for part in self.segments if part.lanes & comm and not part.lanes & compute
        )


class SpanName(NamedTuple):
    """What a span of a rank's time is: `lane` is "compute", "aux" or "hand_over", `name` the block or the work."""

    lane: str
    name: str
    phase: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.phase}".strip()


class WaitRow(NamedTuple):
    """A wait for the collective `seq` of `group`."""

    group: str
    seq: int
    enter_ns: int
    leave_ns: int


class StepContents(NamedTuple):
    """What a replay takes of one step, in ns from its start. `waits` is None where the source does not tell of them."""

    spans: list[tuple[SpanName, int, int]]
    waits: list[WaitRow] | None
    ready_ns: list[int]


def contents_of(
    compute: Iterable[ComputeRange],
    aux: Iterable[AuxRange],
    stalls: Iterable[Stall],
    waits: Iterable[Wait] | None,
    ready: Iterable[BucketReady],
) -> StepContents:
    """Return the contents of a step from the rows of its record."""
    spans = [(SpanName("compute", row.block, row.phase), row.start_ns, row.end_ns) for row in compute]
    spans += [(SpanName("aux", row.name), row.start_ns, row.end_ns) for row in aux]
    spans += [(SpanName(HAND_OVER, "hand-over"), row.start_ns, row.end_ns) for row in stalls if row.cause == HAND_OVER]
    known = None if waits is None else [WaitRow(row.group, row.seq, row.enter_ns, row.leave_ns) for row in waits]
    return StepContents(spans, known, [row.ready_ns for row in ready])


class _Rows:
    """Rows of numbers, any number of them to a step."""

    def __init__(self, width: int) -> None:
        self._width, self._numbers, self._ends = width, array("q"), array("q")

    def add(self, rows: Iterable[Sequence[int]]) -> None:
        """Add the rows of one more step."""
        for row in rows:
            self._numbers.extend(row)
        self._ends.append(len(self._numbers))

    def of(self, place: int) -> list[list[int]]:
        """Return the rows of a step."""
        first, last = self._ends[place - 1] if place else 0, self._ends[place]
        return np.array(self._numbers[first:last], np.int64).reshape(-1, self._width).tolist()


class StepColumns:
    """The contents of every step of one rank, as columns: 8 bytes a number, and each name once."""

    def __init__(self) -> None:
        self._names: dict[SpanName, int] = {}
        self._groups: dict[str, int] = {}
        self._spans, self._waits, self._ready = _Rows(3), _Rows(4), _Rows(1)
        self._waits_known: list[bool] = []
        self._order: list[int] = []

    def add(self, step: StepContents) -> None:
        """Add one more step."""
        spans = [(self._names.setdefault(name, len(self._names)), *ends) for name, *ends in step.spans]
        waits = [(self._groups.setdefault(each.group, len(self._groups)), *each[1:]) for each in step.waits or ()]
        self._spans.add(spans)
        self._waits.add(waits)
        self._ready.add((number,) for number in step.ready_ns)
        self._order.append(len(self._waits_known))
        self._waits_known.append(step.waits is not None)

    def of(self, place: int) -> StepContents:
        """Return the contents of the step with this index."""
        place, names, groups = self._order[place], list(self._names), list(self._groups)
        waits = [WaitRow(groups[group], *row) for group, *row in self._waits.of(place)]
        return StepContents(
            [(names[name], begin, end) for name, begin, end in self._spans.of(place)],
            waits if self._waits_known[place] else None,
            [number for (number,) in self._ready.of(place)],
        )

    def take(self, places: npt.NDArray[np.intp]) -> None:
        """Keep these steps, in this order. The numbers of the others stay in memory."""
        self._order = [self._order[place] for place in places.tolist()]


class StepPart(NamedTuple):
    """Intervals of many steps as columns: which of the steps, and ns from its start."""

    step: npt.NDArray[np.int64]
    start_ns: npt.NDArray[np.int64]
    end_ns: npt.NDArray[np.int64]


class StepLanes(NamedTuple):
    """What ran when in many steps of one rank.

    Attributes:
        compute: when it computed, stalls included.
        bubbles: of a pipeline.
        ranges: passes of blocks and work outside them, in the order of the source; empty where it names none.
        region: of each of `ranges`, index into `regions`: pass and block, or work outside the blocks and None.
    """

    compute: StepPart
    stalls: StepPart
    bubbles: StepPart
    ranges: StepPart
    region: npt.NDArray[np.int64]
    regions: tuple[tuple[str, str | None], ...]


class StepPartRows:
    """Collects the intervals of one step after another."""

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._ends: list[int] = []

    def add(self, intervals: Collection[Interval]) -> None:
        """Add those of the next step."""
        self._counts.append(len(intervals))
        self._ends += chain.from_iterable(intervals)

    def part(self) -> StepPart:
        """Return them as columns."""
        ends = np.array(self._ends, np.int64)
        return StepPart(np.repeat(np.arange(len(self._counts)), self._counts), ends[::2], ends[1::2])


class UserRangesOfStep(NamedTuple):
    """Ranges that the caller named in one step; their times count from `start_mono_ns`."""

    global_step: int
    start_mono_ns: int
    ranges: Sequence[UserRange]


class Details(ABC):
    """The part of a rank that is too large to hold for all steps, and is read or computed on request. It can be
    pickled. What a source does not have is empty.
    """

    @abstractmethod
    def step(self, place: int) -> StepIntervals:
        """Return the step with this index in `Steps`.

        Raises:
            InputError: it can no longer be read.
        """

    @abstractmethod
    def lanes_of(self, places: npt.NDArray[np.intp]) -> StepLanes:
        """Return what ran when in the steps with these indices in `Steps`; the columns count steps from 0.

        Raises:
            InputError: they can no longer be read.
        """

    def device_samples(self) -> Iterator[tuple[DeviceSample, str | None]]:
        """Yield samples of the device, each with the reason if it failed.

        Raises:
            InputError: they can no longer be read.
        """
        return iter(())

    def user_ranges(self) -> Iterator[UserRangesOfStep]:
        """Yield what the caller named in each step that has any.

        Raises:
            InputError: it can no longer be read.
        """
        return iter(())

    def size_bytes(self) -> int:
        """Return roughly how much `lanes_of` reads from disk."""
        return 0

    def absolute(self) -> Self:
        """Return the same with absolute paths, for workers with another working directory."""
        return self
