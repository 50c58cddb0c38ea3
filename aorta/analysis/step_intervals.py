"""Defines what ran when inside one step of one rank, and how a rank gives it: read or computed on request, as it is too
large to hold for all steps.

Must not: know how a source writes it, invent a value, or load pandas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from aorta.records.schema import (
    AuxRange,
    BucketReady,
    ComputeRange,
    CounterValue,
    DeviceSample,
    Stall,
    UserRange,
    Wait,
)
from aorta.timeline.classes import COMPUTE, NOT_COMMUNICATION
from aorta.timeline.intervals import Interval, merge


class LaneSegment(NamedTuple):
    """A stretch of a step in which the set of active lanes does not change; bits of `lanes` follow `Source.lanes`."""

    start_ns: int
    end_ns: int
    lanes: int


@dataclass(frozen=True)
class StepIntervals:
    """What ran when inside one step of one rank, in ns from the step's start. `compute`, `stalls` and `aux` are None
    where the source only says which lanes were active (`segments`). `ranges` are those that the caller named. `waits`
    is None where the source does not tell who waited for what; `ready` has the buckets that were held back.
    """

    length_ns: int
    lanes: tuple[str, ...]
    segments: Sequence[LaneSegment]
    compute: Sequence[ComputeRange] | None = None
    stalls: Sequence[Stall] | None = None
    aux: Sequence[AuxRange] | None = None
    ranges: Sequence[UserRange] = ()
    waits: Sequence[Wait] | None = None
    ready: Sequence[BucketReady] = ()

    def lane(self, name: str) -> list[Interval]:
        """Merged spans in which one lane was active."""
        if name not in self.lanes:
            return []
        bit = 1 << self.lanes.index(name)
        return merge((part.start_ns, part.end_ns) for part in self.segments if part.lanes & bit)

    def active(self) -> dict[str, list[Interval]]:
        """Lane -> merged spans in which it was active; lanes that never were are left out."""
        spans = {
            name: merge((part.start_ns, part.end_ns) for part in self.segments if part.lanes >> bit & 1)
            for bit, name in enumerate(self.lanes)
        }
        return {name: merged for name, merged in spans.items() if merged}

    def computing(self) -> list[Interval]:
        """When it computed, stalls included: its compute ranges, or its compute lane if the source has no ranges."""
        if self.compute is None:
            return self.active().get(COMPUTE, [])
        return [(part.start_ns, part.end_ns) for part in self.compute]

    def exposed(self) -> list[Interval]:
        """Exposed communication: the segments in which some collective ran and the rank did not compute."""
        compute = sum(1 << bit for bit, name in enumerate(self.lanes) if name == COMPUTE)
        comm = sum(1 << bit for bit, name in enumerate(self.lanes) if name not in NOT_COMMUNICATION)
        return merge(
            (part.start_ns, part.end_ns) for part in self.segments if part.lanes & comm and not part.lanes & compute
        )


class UserMarksOfStep(NamedTuple):
    """Ranges and counters that the caller named in one step; their times count from `start_mono_ns`."""

    global_step: int
    start_mono_ns: int
    ranges: Sequence[UserRange]
    counters: Sequence[CounterValue]


class Details(Protocol):
    """The part of a rank that is too large to hold for all steps, and is read or computed on request. It can be
    pickled.
    """

    def step(self, place: int) -> StepIntervals:
        """The step with this index in `Steps`.

        Raises:
            InputError: it can no longer be read.
        """

    def steps(self) -> Iterator[StepIntervals]:
        """Yield all steps in order, one in memory at a time.

        Raises:
            InputError: they can no longer be read.
        """

    def device_samples(self) -> Iterator[tuple[DeviceSample, str | None]]:
        """Yield samples of the device, each with the reason if it failed.

        Raises:
            InputError: they can no longer be read.
        """

    def user_marks(self) -> Iterator[UserMarksOfStep]:
        """Yield what the caller named in each step that has any.

        Raises:
            InputError: it can no longer be read.
        """

    def size_bytes(self) -> int:
        """Roughly how much `steps` reads from disk."""

    def absolute(self) -> Details:
        """The same with absolute paths, for workers with another working directory."""
