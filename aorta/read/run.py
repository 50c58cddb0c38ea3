"""Defines a run: what recorded each rank, the frames of all ranks together, and what ran when inside one step.

A reader gives a `RankTables` for each rank; `join` puts their frames under one another as they come. After that a
rank's frames are views of the run's. What ran inside steps is too large to hold for all of them: `Details` reads or
computes it on request.

    run = load_run("artifacts/cuda")
    run.steps.metrics["exposed_comm_ms"]            # of all ranks, by rank, then global step
    run.ranks[3].steps.metrics["exposed_comm_ms"]   # of one

Must not: know what a source was or how it writes, invent a value, or load pandas.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from aorta.documents.dataset import GapEntry, Health
from aorta.documents.formatting import group_title
from aorta.documents.kernels import TraceEntries
from aorta.read.frames import Collectives, Exposed, Ints, Region, Spans, Steps, declared
from aorta.read.ledger import Gap, entries
from aorta.records.clocks import RankClock
from aorta.records.schema import (
    ActiveSegment,
    AuxRange,
    Calibration,
    CalibrationPlan,
    ComputeRange,
    DeviceSample,
    DeviceTelemetry,
    Stall,
    StallCutoff,
    UserRange,
)
from aorta.timeline.arrays import Interval, interval_array, merge, pairs
from aorta.timeline.classes import COMPUTE, NOT_COMMUNICATION

Members: TypeAlias = tuple[int, ...]
"""The global ranks of a process group, ascending; empty where they are not known."""

HOST_TIMER: Final = "perf_counter"
"""`Source.timer` of runs whose collectives the host times: there a call on the host can stall what computes."""
COMPLETED: Final = "completed"
"""`Source.ending` of a process that ran to its end."""


@dataclass(frozen=True)
class StepIntervals:
    """What ran when inside one step of one rank, in ns from the step's start. `compute`, `stalls` and `aux` are None
    where the source only says which lanes were active (`segments`). `ranges` are those that the caller named.
    """

    length_ns: int
    lanes: tuple[str, ...]
    segments: Sequence[ActiveSegment]
    compute: Sequence[ComputeRange] | None = None
    stalls: Sequence[Stall] | None = None
    aux: Sequence[AuxRange] | None = None
    ranges: Sequence[UserRange] = ()

    def active(self) -> dict[str, list[Interval]]:
        """Return lane -> merged spans in which it was active; lanes that never were are left out."""
        return {name: spans for bit, name in enumerate(self.lanes) if (spans := self._where(1 << bit))}

    def exposed(self) -> list[Interval]:
        """Return the exposed communication: the segments in which some collective ran and the rank did not compute."""
        compute = sum(1 << bit for bit, name in enumerate(self.lanes) if name == COMPUTE)
        comm = sum(1 << bit for bit, name in enumerate(self.lanes) if name not in NOT_COMMUNICATION)
        return self._where(comm, but_not=compute)

    def _where(self, lanes: int, but_not: int = 0) -> list[Interval]:
        parts = (part for part in self.segments if part.lanes & lanes and not part.lanes & but_not)
        return pairs(merge(interval_array((part.start_ns, part.end_ns) for part in parts)))


class Details(ABC):
    """The part of a rank that is too large to hold for all steps, and is read or computed on request. It can be
    pickled. What a source does not have is empty; what can no longer be read is an `InputError`.
    """

    @abstractmethod
    def step(self, index: int) -> StepIntervals:
        """Return the step with this index in `Steps`."""

    @abstractmethod
    def spans(self, indices: npt.NDArray[np.intp]) -> Spans:
        """Return what ran when in the steps with these indices in `Steps`; the frame counts steps from 0."""

    def device_samples(self) -> Iterator[tuple[DeviceSample, str | None]]:
        """Yield samples of the device, each with the reason if it failed."""
        return iter(())

    def user_ranges(self) -> Iterator[tuple[int, int, Sequence[UserRange]]]:
        """Yield the global step, its start and what the caller named there, of each step that has any; times of ranges
        count from that start.
        """
        return iter(())


@dataclass(frozen=True, kw_only=True)
class Source:
    """Who recorded a rank, as far as the source says. A fact that it does not state is None.

    Attributes:
        path: the file, as it was given.
        format: "aorta" for AORTA's own records, else the reader's name ("kineto", "rocprofv3-json", ...).
        rank: a negative number stands for a trace of unknown rank.
        lanes: names of the lanes of this source's timeline; bit `i` of a segment's mask is `lanes[i]`.
        groups: process group -> its global ranks, as this rank uses the name; groups of unknown ranks are left out.
        timer: what measured the times.
        instrument_mode: how collectives were instrumented; for a trace, the tool.
        stall_cutoff: up to which length a CPU backend's call only handed a collective over; None where no call on the
            host stalls what computes, or nothing is said (records without it used `records.schema.STALL_CUTOFF_NS`).
        every: of how many steps one was observed, as `instrument.every` was given.
        world_size: 0 where the source does not say it and no rank is known.
        emulated_ranks: how many ranks the only process stands for; None where every rank is a process.
        ending: how the process ended; None where the source has no end (a trace).
    """

    path: str
    format: str
    rank: int
    world_size: int
    lanes: tuple[str, ...]
    timer: str
    instrument_mode: str
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)
    host: str | None = None
    platform: str | None = None
    device: str | None = None
    backend: str | None = None
    parallel: str | None = None
    run_id: str | None = None
    label: str | None = None
    attempt: int | None = None
    local_rank: int | None = None
    node_rank: int | None = None
    start_step: int | None = None
    warmup_steps: int | None = None
    manifest_hash: str | None = None
    device_telemetry: DeviceTelemetry | None = None
    stall_cutoff: StallCutoff | None = None
    every: str | None = None
    emulated_ranks: int | None = None
    ending: str | None = None

    @property
    def identity(self) -> str:
        """What the sources of one run share: its id, or the path where there is none."""
        return self.run_id if self.run_id is not None else self.path


_OPTIONAL: Final = ("epoch", "step", "used")
NO_STEPS: Final = Steps(
    **{name: np.empty(0, dtype) for name, dtype in declared(Steps).items() if name not in _OPTIONAL}  # type: ignore[arg-type]
)


class Leaf(NamedTuple):
    """What a stretch of a step is that is not exposed communication.

    Attributes:
        part: `computation`, `outside blocks` (optimizer, data, ...), `copies`, `bubble`, `range` or `idle`.
        name: of computation the phase of its block; outside blocks the work; of idle time the range that the loop named
            there, or what came before and after.
        hides: computation beside communication.
    """

    part: str
    name: str = ""
    hides: bool = False


@dataclass(kw_only=True)
class ExposedSums:
    """Sums over the steps that aggregates use and whose exposed communication is known, in ns.

    Attributes:
        left_out: steps that aggregates use whose exposed communication is null.
        unexplained_ns: exposed communication that the record counts and none of its rows covers.
        computing: time it computed in each pass of each block, stalls excluded.
        leaves: what is not exposed communication, by what it is: every nanosecond of the windows is in it, or exposed.
    """

    rank_steps: int = 0
    left_out: int = 0
    window_ns: int = 0
    exposed_ns: int = 0
    compute_ns: int = 0
    unexplained_ns: int = 0
    computing: Counter[Region] = field(default_factory=Counter)
    leaves: Counter[Leaf] = field(default_factory=Counter)

    def add(self, other: ExposedSums) -> None:
        """Add another rank or launch."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True)
class RankTables:
    """One rank. `problems` are sentences about what could not be read, each with `file:line`.
    `isolated`: steps of the baselines (R10). `spans`, `exposed` and its sums: what ran inside each step, and what of it
    was exposed, where they were asked for; otherwise they are made of `details`. `gaps`: what its books lack.
    """

    source: Source
    steps: Steps
    collectives: Collectives
    details: Details
    isolated: Steps = field(default=NO_STEPS)
    spans: Spans | None = None
    exposed: Exposed | None = None
    exposed_sums: ExposedSums | None = None
    gaps: tuple[Gap, ...] = ()
    problems: tuple[str, ...] = ()
    calibrations: tuple[Calibration, ...] = ()
    calibration_plan: CalibrationPlan | None = None

    def step_intervals(self, global_step: int) -> StepIntervals | None:
        """Return what ran when inside one step; None where the rank does not have it.

        Raises:
            InputError: it can no longer be read.
        """
        index = int(np.searchsorted(self.steps.global_step, global_step))
        exists = index < len(self.steps) and self.steps.global_step[index] == global_step
        return self.details.step(index) if exists else None


@dataclass(frozen=True)
class Frames:
    """The frames of all ranks.

    Attributes:
        ranks: by rank; their frames are views of those here, but for `Collectives.step`, which counts the rank's steps.
        first_step, first_row: of each rank, in the order of `ranks`, and one more.
        members: the ranks of the group of each of `collectives.names`.
        exposed: None where not every rank has it.
    """

    ranks: Mapping[int, RankTables]
    steps: Steps
    collectives: Collectives
    first_step: Ints
    first_row: Ints
    members: tuple[Members, ...]
    exposed: Exposed | None = None


@dataclass(frozen=True, kw_only=True)
class Run(Frames):
    """One launch: every rank that could be read, by rank, never empty.

    Attributes:
        location: folder, file, glob or URL.
        manifest: `run.json`; None where none belongs to the run.
        clocks: what was measured of each rank's clock against the others'; empty where `clocks_missing` says why.
        traces: what a loader of traces knows in addition to the frames, as in `summary.json`; None for records.
    """

    location: str
    manifest: Mapping[str, object] | None
    health: Health
    traces: TraceEntries | None = None
    clocks: Mapping[int, RankClock] = field(default_factory=dict)
    clocks_missing: str | None = "traces do not compare the ranks' clocks"

    @property
    def source(self) -> Source:
        """The source of the lowest rank, for facts that all ranks share."""
        return next(iter(self.ranks.values())).source

    @cached_property
    def group_titles(self) -> dict[str, str]:
        """Process group -> what a person calls it, by the mesh of the manifest's plan where it has one."""
        plan = (self.manifest or {}).get("plan")
        mesh = plan.get("mesh") if isinstance(plan, dict) else None
        named = isinstance(mesh, dict) and all(isinstance(size, int) and size > 0 for size in mesh.values())
        members: dict[str, set[tuple[int, ...]]] = {}
        for what, ranks in zip(self.collectives.names, self.members, strict=True):
            members.setdefault(what.group, set()).update({tuple(ranks)} if ranks else ())
        known, world = mesh if named else None, self.health.world_size
        return {name: group_title(name, of_name, known, world) for name, of_name in members.items()}

    @cached_property
    def rank_of_step(self) -> npt.NDArray[np.int32]:
        """The rank of each row of `steps`."""
        return np.repeat(np.array(list(self.ranks), np.int32), np.diff(self.first_step))


def partial_steps(ranks: Collection[RankTables]) -> list[int]:
    """Return the global steps that some of the ranks lack."""
    numbers = np.concatenate([np.empty(0, np.int64), *(tables.steps.global_step for tables in ranks)])
    steps, counts = np.unique(numbers, return_counts=True)
    partial: list[int] = steps[counts < len(ranks)].tolist()
    return partial


def gaps_of(ranks: Mapping[int, RankTables]) -> list[GapEntry]:
    """Return what the books of all ranks lack. A negative number stands for an unknown rank."""
    return [entry for rank, tables in ranks.items() for entry in entries(tables.gaps, rank if rank >= 0 else None)]
