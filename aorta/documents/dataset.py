"""What `summary.json` holds of one dataset: metrics, collectives, devices, and what `explanations`
and `kernels` have.

Must not compute anything.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any, Final, Literal, TypeAlias

import msgspec

from aorta.autopsy.evidence import Verdict
from aorta.documents import ABSENT, known
from aorta.documents.explanations import Account, ExposedBreakdown, Finding, RankTimes, Stragglers, WhatIf
from aorta.documents.kernels import TraceEntries, TraceEntry
from aorta.documents.metrics import NOT_SHOWN, SHOWN_FIRST
from aorta.records.schema import InstrumentMode

MeasuredFrom: TypeAlias = Literal["marks", "kernels"]
MEDIAN_STEPS: Final = 6
"""Of fewer steps a median has no 95 % interval: the smallest and the largest of n values hold the true median between
them with probability 1 - 2^(1 - n), which is 0.938 of five and 0.969 of six (order statistics, no distribution)."""
MEANS: Final = "means, and the overlap as a ratio of sums,"


class Ends(msgspec.Struct):
    """What a value is between, where it is not known."""

    at_least: float
    at_most: float


class PhaseTimes(msgspec.Struct):
    """Wall times of whole steps by phase: of each the maximum over ranks of the median over a rank's steps."""

    train_ms: float
    compute_only_ms: float
    comm_only_ms: float


class Statistics(msgspec.Struct, kw_only=True):
    """A metric over steps of ranks, job steps, collectives, or (of a side of two launch sets) the medians of launches.

    `value` is what a report shows and a comparison compares: the median, or `over_all` where the steps are too few for
    it. Without values it is null for a `reason`, and `bounds` has what is known. `phase_times` are those from which
    `overlap_efficiency` is computed. `interval`: where steps are drawn, what holds the median over all steps at 95 %;
    null of fewer than `MEDIAN_STEPS` steps.
    """

    value: float | None
    count: int
    nulls: int
    median: float | None
    p5: float | None
    p95: float | None
    mean: float | None
    min: float | None
    max: float | None
    reason: str | None
    null_reasons: dict[str, int]
    per_rank_median: dict[str, float | None] = ABSENT
    rank_spread: float | None = ABSENT
    rank_spread_reason: str | None = ABSENT
    source: MeasuredFrom | None = ABSENT
    bounds: Ends | None = ABSENT
    interval: Ends | None = ABSENT
    ratio_of_sums: float | None = ABSENT
    ratio_of_sums_reason: str | None = ABSENT
    phase_times: PhaseTimes = ABSENT

    @property
    def ends(self) -> Ends | None:
        """The bounds, where they are all that is known."""
        return known(self.bounds) if self.value is None else None

    @property
    def over_all(self) -> float | None:
        """The mean, and of a ratio that of the sums: these fit together, as no median of few steps does."""
        return self.mean if known(self.ratio_of_sums) is None else self.ratio_of_sums


class CalibrationFacts(msgspec.Struct):
    """What the calibrations of all ranks found: medians over them. `agree`: kernels and marks of the same steps, within
    0.02 of the overlap ratio; null: no kernels were seen.
    """

    steps: int
    rank_steps: int
    problems: list[str]
    agree: bool | None
    ratio_by_kernels: float | None
    ratio_by_marks: float | None
    window_step_ms: float | None
    other_step_ms: float | None
    setup_ms: float | None


class PaceFacts(msgspec.Struct):
    """Whether the host sets the pace of the device (docs/metrics.md, "Where the host sets the pace")."""

    host_bound: bool | None
    host_lead_ms: float | None
    undecided_share: float | None
    calibration: CalibrationFacts | None
    no_calibration: str | None


class SourceFacts(msgspec.Struct):
    """What a dataset was read from; null: the source does not say."""

    path: str
    run_id: str | None
    label: str | None
    attempt: int | None
    platform: str | None
    backend: str | None
    parallel: str | None
    timer: str
    start_step: int | None
    instrument_mode: InstrumentMode | str
    manifest_hash: str | None
    world_size: int | None
    hosts: list[str]


class GapEntry(msgspec.Struct):
    """What the books of a rank lack, or what does not add up in them: what rests on these lanes is bounded or null.

    Attributes:
        rank: None where it is not known.
        lanes: `compute`, `comm`, `copy`; empty for what no metric rests on.
        observed: false where what was seen says nothing of the lanes; else it is a lower bound.
        steps: in how many steps; None: in the whole recording.
        most_ms: at most so much of the recording; None where nothing is known of it.
    """

    rank: int | None
    lanes: list[str]
    why: str
    observed: bool = True
    steps: int | None = None
    most_ms: float | None = None


class Health(msgspec.Struct, kw_only=True):
    """What is missing, damaged or unusual.

    Attributes:
        ranks_expected: null where no source says how many there were.
        endings: rank -> how its process ended; empty for traces, which have no end.
        attempt: null where the source does not number attempts.
        steps_not_on_all_ranks: global steps that some of the ranks read do not have.
        timed_from_python: why the collectives were timed from Python, and what that costs; null where they were not, or
            were to be.
        emulated_ranks: how many ranks the only process stands for; null where every rank is a process.
        emulated_fabric: the settings of an emulated network; null on a real one. Of how many collectives it determined
            the times, and in how many the backend was slower; null where that cannot be known: on a device the emulated
            time is added behind the backend's.
        gaps: what the books of each rank lack, and what in them does not add up.
        notes: what readers of results must know, the most serious first; empty for a clean, real, complete run.
    """

    ranks_expected: int | None
    ranks_read: list[int]
    ranks_missing: list[int]
    files_left_out: list[str]
    steps_not_on_all_ranks: list[int]
    instrument_modes: list[str]
    problems: list[str] = []
    endings: dict[str, str] = {}
    attempt: int | None = None
    emulated_ranks: int | None = None
    emulated_fabric: dict[str, Any] | None = None
    emulated_fabric_rows: int | None = None
    emulated_fabric_backend_slower_rows: int | None = None
    manifest_problem: str | None = None
    timed_from_python: str | None = None
    traces: list[TraceEntry] = ABSENT
    gaps: list[GapEntry] = []
    notes: list[str] = []

    @property
    def world_size(self) -> int:
        """The ranks that there were; 0 where that is not known."""
        return self.ranks_expected or 0

    @property
    def is_alone(self) -> bool:
        """Whether a recorded run has one rank that communicates with nobody, not even on an emulated network."""
        return self.ranks_expected == 1 and known(self.traces) is None and self.emulated_ranks is None

    @property
    def ranks(self) -> str:
        """The ranks read, and of how many."""
        if self.emulated_ranks is not None:
            return f"one rank of {self.emulated_ranks}, emulated"
        return f"{len(self.ranks_read)} of {self.world_size} ranks" if self.world_size else "ranks unknown"


class StepCounts(msgspec.Struct):
    """How many steps were read, and how many of them count.

    Attributes:
        rank_steps_not_drawn: passed over, or observed for another reason (`instrument.every`).
        ranks_used: known ranks with a step that counts.
        unclear_rank_steps: why it is not clear where a step begins or ends -> rank-steps used; the most first.
        first_loss_not_finite: the first global step with a loss of NaN or infinity.
    """

    rank_steps_read: int
    rank_steps_used: int
    rank_steps_left_out_as_warmup: int
    rank_steps_left_out_as_calibration: int
    rank_steps_not_drawn: int
    global_steps_used: int
    ranks_used: int
    isolated_rank_steps: dict[str, int]
    unclear_rank_steps: dict[str, int]
    first_loss_not_finite: int | None
    warmup_rule: str


class SamplingFacts(msgspec.Struct):
    """Which steps were observed, where not all of them were (`instrument.every`). Steps after warm-up.

    Attributes:
        asked: `instrument.every` as it was given.
        every: one of so many steps was drawn at random; null where none was.
        steps_drawn, steps: how many, of how many global steps.
        known_share: AORTA's own time, of medians of the steps that were observed and of those that were not, over the
            median step; null where it is not known.
    """

    asked: str
    every: int | None
    steps_drawn: int
    steps: int
    known_share: float | None


class DeviceValue(msgspec.Struct):
    """One sampled quantity of a device, in the unit of its name."""

    count: int
    median: float
    min: float
    max: float


Throttled: TypeAlias = Literal["yes", "no", "unknown"]


class RankDevice(msgspec.Struct, kw_only=True):
    """The device of one rank over the samples taken during the steps used; a quantity is null without a sample."""

    source: str | None
    interval_s: float | None
    problem: str | None
    samples: int
    samples_failed: int
    failure: str | None
    throttled: Throttled
    throttled_samples: int
    throttle_reasons: dict[str, int]
    temp_c: DeviceValue | None
    power_w: DeviceValue | None
    sclk_mhz: DeviceValue | None
    mclk_mhz: DeviceValue | None
    util_pct: DeviceValue | None
    mem_used_bytes: DeviceValue | None


class DeviceFacts(msgspec.Struct):
    """The devices of all ranks, by rank; `throttled_ranks` were in more than a passing sample."""

    throttled: Throttled
    throttled_ranks: list[int]
    ranks: dict[str, RankDevice]


class CollectiveEntry(msgspec.Struct, kw_only=True):
    """Collectives of one kind, group, group size and number of bytes; `group_title` is what a person calls it."""

    kind: str
    group: str
    group_title: str
    group_size: int | None
    bytes: int | None
    group_ranks: list[list[int]]
    collectives: int
    rows: int
    end_sources: dict[str, int]
    transfer_is_upper_bound: bool
    duration_ms: Statistics
    queued_ms: Statistics
    transfer_ms: Statistics
    wait_ms: Statistics
    arrival_skew_ms: Statistics
    arrival_skew_bound_ms: Statistics
    algbw_gb_per_s: Statistics
    busbw_gb_per_s: Statistics

    @property
    def starts_open(self) -> bool:
        """Whether marks leave open when these collectives began."""
        return self.transfer_is_upper_bound and "wait" not in self.end_sources


class CutoffFacts(msgspec.Struct):
    """The stall cut-offs of the ranks, and why one is not measured."""

    lowest_ns: int
    highest_ns: int
    sources: list[str]
    reason: str | None


class LaunchLeftOut(msgspec.Struct):
    """A launch of a set that does not count."""

    path: str
    reason: str


class DatasetEntry(msgspec.Struct, kw_only=True):
    """One run, or the representative launch of a launch set. With `count` 0 there is a `reason`, and no metrics."""

    count: int
    reason: str = ABSENT
    mean_loss: float | None = ABSENT
    mean_overlap_ms: float | None = ABSENT
    mean_compute_ms: float | None = ABSENT
    mean_allreduce_overlap_ms: float | None = ABSENT
    mean_reducescatter_overlap_ms: float | None = ABSENT
    overlap_ratio: float | None = ABSENT
    null_reasons: dict[str, str] = ABSENT
    source: SourceFacts
    health: Health
    steps: StepCounts
    sampling: SamplingFacts = ABSENT
    devices: DeviceFacts
    stall_cutoff: CutoffFacts | None = ABSENT
    pace: PaceFacts | None = ABSENT
    metrics: dict[str, Statistics] = ABSENT
    collectives: list[CollectiveEntry] = ABSENT
    account: Account = ABSENT
    exposed: ExposedBreakdown = ABSENT
    stragglers: Stragglers = ABSENT
    rank_times: list[RankTimes] = ABSENT
    findings: list[Finding] = ABSENT
    traces: TraceEntries = ABSENT
    autopsy: Verdict = ABSENT
    launches: int = ABSENT
    representative: str = ABSENT
    representative_rule: str = ABSENT
    launch_set: str = ABSENT
    left_out: list[LaunchLeftOut] = ABSENT
    what_if: WhatIf

    @property
    def described(self) -> dict[str, Statistics]:
        """Metric -> its statistics; empty where no step is used."""
        return self.metrics or {}

    @property
    def few_steps(self) -> bool:
        """Whether values are those over all steps: the overlap ratio rests on less than `MEDIAN_STEPS` steps."""
        ratio, pace = self.described.get("overlap_ratio"), known(self.pace)
        by_kernels = ratio is not None and ratio.source == "kernels" and pace is not None and pace.calibration
        return (by_kernels.steps if by_kernels else self.steps.global_steps_used) < MEDIAN_STEPS

    @property
    def shows_means(self) -> bool:
        """Whether what is shown first are values over all steps: these are few, and no metric has only a median or
        bounds.
        """
        first = [self.described[name] for name in SHOWN_FIRST if name in self.described]
        return self.few_steps and not any(
            metric.over_all is None and (metric.bounds or metric.median is not None) for metric in first
        )

    @property
    def shown_launch(self) -> str | None:
        """The name of the launch that represents its set; None of a single run."""
        return None if known(self.representative) is None else PurePath(self.representative).name

    def value(self, name: str) -> float | None:
        """Return the value of a metric; None where the run does not have it."""
        return self.described[name].value if name in self.described else None

    @property
    def shown(self) -> dict[str, Statistics]:
        """Those that text and page show."""
        return {name: entry for name, entry in self.described.items() if name not in NOT_SHOWN}

    @property
    def matched(self) -> list[CollectiveEntry]:
        """The collectives; empty where no step is used."""
        return self.collectives or []
