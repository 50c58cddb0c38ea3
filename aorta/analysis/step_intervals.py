"""Defines what ran when inside one step of one rank, and how a rank gives it: read or computed on request, as it is too
large to hold for all steps.

Must not: know how a source writes it, invent a value, or load pandas.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from aorta.analysis.frames import Lane, SpanName, Spans
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


def contents_of(spans: Spans, step: int) -> StepContents:
    """Return the contents of one step from the spans of its rank."""
    mine = spans.of_step(step)
    columns = (mine.lane, mine.name, mine.start_ns, mine.end_ns, mine.ref)
    found = StepContents([], [] if spans.waits_known is not None and spans.waits_known[step] else None, [])
    for lane, name, start_ns, end_ns, ref in zip(*(values.tolist() for values in columns), strict=True):
        match lane:
            case Lane.COMPUTE | Lane.AUX | Lane.HAND_OVER:
                found.spans.append((spans.names[name], start_ns, end_ns))
            case Lane.WAIT if found.waits is not None:
                found.waits.append(WaitRow(spans.names[name].name, ref, start_ns, end_ns))
            case Lane.READY:
                found.ready_ns.append(start_ns)
    return found


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
    def spans(self, places: npt.NDArray[np.intp]) -> Spans:
        """Return what ran when in the steps with these indices in `Steps`; the frame counts steps from 0.

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
