"""Defines the typed tables into which every source is loaded before anything is computed: one set of tables per rank.

A loader (`aorta.analysis.load`) reads a source, whatever recorded it, and returns a `RankTables` for each rank: who
recorded it (`Source`), its steps (`Steps`), its collectives (`Collectives`), and access to what ran when inside one
step (`step_intervals.Details`). All metrics, comparisons and pictures read these tables and never ask what the source
was.

    run = load_run("artifacts/cuda")
    tables = run.ranks[0]
    tables.steps.metrics["exposed_comm_ms"]      # float64, one element per step, NaN where it is null
    tables.collectives.end_ns - tables.collectives.start_ns

What a source does not state is None (or `NO_TIME`, `UNKNOWN`, NaN inside a column). Must not: hold a Python object per
row, invent a value, or load pandas (processes that only read load this).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from aorta.analysis.documents.traces import TraceEntries
from aorta.analysis.health import Health
from aorta.analysis.step_intervals import Details, StepColumns, StepIntervals
from aorta.records.clocks import RankClock
from aorta.records.schema import (
    Calibration,
    CalibrationPlan,
    Coverage,
    DeviceTelemetry,
    Gradient,
    Phase,
    StallCutoff,
)
from aorta.timeline.classes import KINDS

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Members: TypeAlias = tuple[int, ...]
"""The global ranks of a process group, ascending."""

NO_TIME: Final = -(2**63)
"""In a column of times: not observed."""
UNKNOWN: Final = -1
"""In a column of codes, identifiers or sizes: the source does not say."""
UNNUMBERED: Final = -2
"""Sequence numbers from here down are of collectives that a source does not number: they match no other rank's."""
HOST_TIMER: Final = "perf_counter"
"""`Source.timer` of runs whose collectives the host times: there a call on the host can stall what computes."""
COMPLETED: Final = "completed"
"""`Source.ending` of a process that ran to its end."""
LOSSES: Final = ("loss", "lr", "grad_norm")
KIND_METRICS: Final = frozenset(
    name for kind in KINDS for name in (f"{kind}_ms", f"compute_{kind}_ms", f"exposed_{kind}_ms")
)
KINDS_KNOWN: Final = ("comm_ms", "allreduce_ms")
"""Where one of these is null, so is a kind that a step does not mention; the second is present in every step."""


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
    emulated_ranks: int | None = None
    ending: str | None = None

    @property
    def identity(self) -> str:
        """What the sources of one run share: its id, or the path where there is none."""
        return self.run_id if self.run_id is not None else self.path


def of_unused_kind(witnesses: Sequence[Floats]) -> Floats:
    """Return milliseconds of a kind that steps do not mention: 0, because it was not used; NaN where one of
    `witnesses`, the columns of `KINDS_KNOWN` that there are, is null.
    """
    return np.where(np.isnan(witnesses).any(axis=0), np.nan, 0.0)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps of one rank in order of `global_step`, each once; every column has one element per step.

    Attributes:
        start_mono_ns, end_mono_ns: on the rank's own clock.
        t_start_ns, t_end_ns: on the clock that ranks share; for a trace the same as the two above.
        epoch, step, losses: None, or without an entry, where the source does not have them.
        metrics: name -> milliseconds or a ratio, NaN where it is null. A kind of collective that a step does not
            mention was not used in it and is 0, unless kinds are null (`column`).
        bounds: name -> at least and at most, of the steps in which the host set the pace and the metric is null; NaN in
            the others. Without an entry where it never is.
        by_kernels: whether a step was measured by the profiler's kernels; None where none was.
        reason: index into `reasons`, each of which says why metrics of a step are null.
        coverage: index into `coverages`; None where the source does not count what was issued.
        rows_end: number of collectives of this step and all before it.
    """

    global_step: Ints
    warmup: Bools
    start_mono_ns: Ints
    end_mono_ns: Ints
    t_start_ns: Ints
    t_end_ns: Ints
    rows_end: Ints
    reason: Ints
    reasons: tuple[Mapping[str, str], ...]
    metrics: Mapping[str, Floats]
    losses: Mapping[str, Floats] = field(default_factory=dict)
    epoch: Ints | None = None
    step: Ints | None = None
    coverage: Ints | None = None
    coverages: tuple[Coverage, ...] = ()
    bounds: Mapping[str, tuple[Floats, Floats]] = field(default_factory=dict)
    by_kernels: Bools | None = None

    def __len__(self) -> int:
        return len(self.global_step)

    @property
    def used(self) -> Bools:
        """The steps that aggregates are made of: those after warm-up that the profiler of a calibration did not slow;
        where a run has no other, those of the calibration.
        """
        after = ~self.warmup
        own = after & ~self.of_kernels
        return own if own.any() else after

    @property
    def of_kernels(self) -> Bools:
        """`by_kernels`, also where no step was."""
        return np.zeros(len(self), bool) if self.by_kernels is None else self.by_kernels

    @property
    def length_ns(self) -> Ints:
        """Duration of each step."""
        return self.end_mono_ns - self.start_mono_ns

    @property
    def row_counts(self) -> Ints:
        """Number of collectives of each step."""
        return np.diff(self.rows_end, prepend=0)

    def rows_of(self, first: int, last: int) -> slice:
        """Return the collectives of the steps with indices `first` to `last` (exclusive)."""
        return slice(int(self.rows_end[first - 1]) if first else 0, int(self.rows_end[last - 1]) if last else 0)

    def column(self, name: str) -> Floats:
        """Return a metric or a loss; all NaN where no step has it. A kind that this rank never used is 0 where kinds
        are known.
        """
        known = self.metrics.get(name)
        if known is None:
            known = self.losses.get(name)
        if known is not None:
            return known
        if name in KIND_METRICS and "comm_ms" in self.metrics:
            return of_unused_kind([self._seen(witness) for witness in KINDS_KNOWN if witness in self.metrics])
        return np.full(len(self), np.nan)

    def _seen(self, name: str) -> Floats:
        """Return a metric, and at least what it is where marks leave it open: all collectives were seen there, too."""
        values = self.metrics[name]
        return np.where(np.isnan(values), self.bounds[name][0], values) if name in self.bounds else values


class CollectiveName(NamedTuple):
    """Facts that many collectives share: what it is, and how its end was observed. Few of them differ in a run, so rows
    hold an index. `bytes` is `UNKNOWN` where the source does not say.
    """

    kind: str
    group: str
    bytes: int
    dtype: str | None
    end_source: str | None


@dataclass(frozen=True)
class Collectives:
    """The collectives of one rank, by step, then order of issue; every column has one element per collective.

    Attributes:
        name: int32, index into `names`.
        seq: sequence number in its group, the same on all ranks; `UNNUMBERED` and below where the source does not
            number it.
        issue_ns, start_ns, end_ns: from the start of the row's step on this rank; `NO_TIME` where it was not observed.
        backend_end_ns: the backend's own end of those that the emulated fabric ended, otherwise `NO_TIME`; None where
            the source never has it.
    """

    names: tuple[CollectiveName, ...]
    name: npt.NDArray[np.int32]
    seq: Ints
    issue_ns: Ints
    start_ns: Ints
    end_ns: Ints
    backend_end_ns: Ints | None = None

    def __len__(self) -> int:
        return len(self.seq)

    def take(self, rows: slice) -> Collectives:
        """Select rows; the names stay."""
        return Collectives(
            self.names,
            self.name[rows],
            self.seq[rows],
            self.issue_ns[rows],
            self.start_ns[rows],
            self.end_ns[rows],
            None if self.backend_end_ns is None else self.backend_end_ns[rows],
        )

    @property
    def duration_ns(self) -> Ints:
        """Start to end; `NO_TIME` where either was not observed."""
        return _difference(self.start_ns, self.end_ns)

    @property
    def queued_ns(self) -> Ints:
        """Issue to start; `NO_TIME` where either was not observed."""
        return _difference(self.issue_ns, self.start_ns)


def _difference(first: Ints, second: Ints) -> Ints:
    return np.where((first == NO_TIME) | (second == NO_TIME), NO_TIME, second - first)


@dataclass(frozen=True)
class IsolatedSteps:
    """Steps of the isolated baselines (R10), in the order in which they ran, with the columns that two metrics need.
    `phase` is an index into `PHASES`; `reason` and `coverage` are as in `Steps`.
    """

    phase: Ints
    warmup: Bools
    wall_ns: Ints
    reason: Ints
    coverage: Ints
    compute_ms: Floats

    def __len__(self) -> int:
        return len(self.phase)


PHASES: Final[tuple[Phase, ...]] = ("train", "compute_only", "comm_only")
"""Phases of a run; a test holds them to `records.schema.Phase`."""


@dataclass(frozen=True)
class CoverageFacts:
    """How completely a rank's collectives were observed.

    Attributes:
        end_sources: how ends were observed -> number of collectives whose end was observed, warm-up left out.
        uncovered: number of steps in which not every collective is known to have been seen (R8).
        reasons: why -> in how many of them.
        first_missed: the first global step in which fewer or more were seen than issued.
        outside: number of collectives that are part of no step.
        unwatched: share of the collectives seen that were issued by a model that is not recorded (`Coverage`).
    """

    end_sources: Mapping[str | None, int] = field(default_factory=dict)
    uncovered: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)
    first_missed: int | None = None
    outside: int = 0
    unwatched: float = 0.0


@dataclass(frozen=True)
class RankTables:
    """One rank. `problems` are sentences about what could not be read, each with `file:line`. `gradient_order`: the
    parameters of a DDP model in the order in which their gradients become ready; empty where it is not known.
    `contents`: what ran inside each step, where it was asked for; otherwise it is read from `details`.
    """

    source: Source
    steps: Steps
    collectives: Collectives
    details: Details
    contents: StepColumns | None = None
    isolated: IsolatedSteps | None = None
    covered: CoverageFacts = field(default_factory=CoverageFacts)
    problems: tuple[str, ...] = ()
    gradient_order: tuple[Gradient, ...] = ()
    calibrations: tuple[Calibration, ...] = ()
    calibration_plan: CalibrationPlan | None = None

    def step_intervals(self, global_step: int) -> StepIntervals | None:
        """Return what ran when inside one step; None where the rank does not have it.

        Raises:
            InputError: it can no longer be read.
        """
        place = int(np.searchsorted(self.steps.global_step, global_step))
        exists = place < len(self.steps) and self.steps.global_step[place] == global_step
        return self.details.step(place) if exists else None

    def isolated_counts(self) -> dict[str, int]:
        """Return phase other than `train` -> number of its steps, warm-up included."""
        codes = [] if self.isolated is None else self.isolated.phase.tolist()
        return {PHASES[code]: count for code, count in Counter(codes).items()}


@dataclass(frozen=True)
class Run:
    """One launch: the tables of every rank that could be read, by rank, never empty.

    Attributes:
        location: folder, file, glob or URL.
        manifest: `run.json`; None where none belongs to the run.
        clocks: what was measured of each rank's clock against the others'; empty where `clocks_missing` says why.
        traces: what a loader of traces knows in addition to the tables, as in `summary.json`; None for records.
    """

    location: str
    ranks: Mapping[int, RankTables]
    manifest: Mapping[str, object] | None
    health: Health
    traces: TraceEntries | None = None
    clocks: Mapping[int, RankClock] = field(default_factory=dict)
    clocks_missing: str | None = "traces say nothing of the ranks' clocks against each other"

    @property
    def source(self) -> Source:
        """The source of the lowest rank, for facts that all ranks share."""
        return next(iter(self.ranks.values())).source

    @property
    def row_count(self) -> int:
        """Number of collectives of all ranks."""
        return sum(len(tables.collectives) for tables in self.ranks.values())

    def over_ranks(self, column: Callable[[Steps], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Return a column of the steps over all ranks, by rank, then global step."""
        return np.concatenate([column(tables.steps) for tables in self.ranks.values()])

    def rank_of_steps(self) -> Ints:
        """Return the rank of each step, in the order of `over_ranks`."""
        return np.repeat(np.array(list(self.ranks), np.int64), [len(tables.steps) for tables in self.ranks.values()])


def global_steps(ranks: Iterable[RankTables]) -> Ints:
    """Return every global step that at least one rank has, in order."""
    found = np.empty(0, np.int64)
    for tables in ranks:
        if not np.array_equal(tables.steps.global_step, found):
            found = np.union1d(found, tables.steps.global_step)
    return found


def partial_steps(ranks: Collection[RankTables]) -> tuple[int, ...]:
    """Return the global steps that some of the ranks lack."""
    steps = global_steps(ranks)
    missing = np.zeros(len(steps), bool)
    for tables in ranks:
        if len(tables.steps) < len(steps):
            missing |= ~np.isin(steps, tables.steps.global_step)
    return tuple(steps[missing].tolist())
