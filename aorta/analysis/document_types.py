"""What `run.json` and `summary.json` hold, as types: the source of their JSON Schemas (`json_schemas`).

Both are written as plain values where they are computed; tests hold real files to these types. What differs from
configuration to configuration stays open. Must not be used to compute anything, or say more than every file holds.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from aorta.analysis.host_bound import MeasuredFrom
from aorta.analysis.metrics import Better, Unit
from aorta.records.schema import InstrumentMode, Platform

Reasons = dict[str, str]
Amounts = dict[str, float | None]


class Ends(msgspec.Struct):
    """What a value is between, where it is not known."""

    at_least: float
    at_most: float


class Versions(msgspec.Struct):
    """Of AORTA, Python, torch and what else decides a measurement; null: not there."""

    aorta: str
    aorta_commit: str | None
    python: str
    torch: str


class HostFacts(msgspec.Struct):
    """The machine of rank 0."""

    machine: str
    kernel: str
    cpus: int | None
    cpus_usable: int | None
    memory_bytes: int


class RankFacts(msgspec.Struct):
    """One rank and where it ran."""

    rank: int
    local_rank: int
    node_rank: int
    host: str
    pid: int
    device: str
    threads: int
    device_telemetry: dict[str, Any] | None


class Manifest(msgspec.Struct):
    """`run.json`."""

    schema_version: int
    run_id: str
    attempt: int
    elastic_run_id: str | None
    label: str
    created_unix_ns: int
    manifest_hash: str
    world_size: int
    platform: Platform
    backend: str | None
    config: dict[str, Any]
    plan: dict[str, Any]
    versions: Versions
    environment: dict[str, str]
    environment_differences: dict[str, dict[str, str]]
    host_facts: HostFacts
    devices: list[str]
    topology: list[RankFacts]
    command: list[str]
    clock_sync: dict[str, Any] | None
    warnings: list[str]
    steps_planned: int | UnsetType = UNSET
    traces: dict[str, Any] | UnsetType = UNSET
    reasons: Reasons | UnsetType = UNSET


class Described(msgspec.Struct):
    """One metric over steps of ranks, job steps or collectives."""

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
    per_rank_median: Amounts | UnsetType = UNSET
    rank_spread: float | UnsetType | None = UNSET
    rank_spread_reason: str | UnsetType | None = UNSET
    ratio_of_sums: float | UnsetType | None = UNSET
    ratio_of_sums_reason: str | UnsetType | None = UNSET
    source: MeasuredFrom | UnsetType | None = UNSET
    bounds: Ends | UnsetType | None = UNSET


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
    world_size: int | None
    platform: str | None
    backend: str | None
    parallel: str | None
    timer: str
    start_step: int | None
    instrument_mode: InstrumentMode | str
    manifest_hash: str | None
    hosts: list[str]


class HealthFacts(msgspec.Struct):
    """What is missing, damaged or unusual."""

    ranks_expected: int | None
    ranks_read: list[int]
    ranks_missing: list[int]
    files_left_out: list[str]
    problem_count: int
    problems: list[str]
    endings: dict[str, str]
    instrument_modes: list[str]
    emulated_fabric: dict[str, Any] | None
    throttled_ranks: list[int]


class StepCounts(msgspec.Struct):
    """How many steps were read, and how many of them count."""

    rank_steps_read: int
    rank_steps_used: int
    rank_steps_left_out_as_warmup: int
    rank_steps_left_out_as_calibration: int
    global_steps_used: int
    isolated_rank_steps: dict[str, int]
    warmup_rule: str


class CollectiveEntry(msgspec.Struct):
    """Collectives of one kind, group, group size and number of bytes."""

    kind: str
    group: str
    group_size: int | None
    bytes: int | None
    collectives: int
    rows: int
    end_sources: dict[str, int]
    duration_ms: Described
    queued_ms: Described
    transfer_ms: Described
    wait_ms: Described
    arrival_skew_ms: Described
    arrival_skew_bound_ms: Described
    algbw_gb_per_s: Described
    busbw_gb_per_s: Described


class GainEntry(msgspec.Struct):
    """A change, and by how much a step would be shorter; `setting`: the next launch can be given it;
    `significant`: the whole interval is a gain; `sentence` says it.
    """

    change: str
    words: str
    setting: bool
    gain_ms: float
    low_ms: float
    high_ms: float
    share: float
    significant: bool
    notes: list[str]
    sentence: str


class MarginalEntry(msgspec.Struct):
    """What a step would gain, were one part of the communication free, or by a bound."""

    what: str
    name: str
    gain_ms: float
    low_ms: float
    high_ms: float
    change: str | None


class WhatIf(msgspec.Struct):
    """What would gain most, from a replay of the last steps; with a `reason` no replay was possible."""

    reason: str | None
    steps: int | UnsetType = UNSET
    ranks: int | UnsetType = UNSET
    level: float | UnsetType = UNSET
    step_ms: float | UnsetType = UNSET
    check: str | UnsetType | None = UNSET
    gains: list[GainEntry] | UnsetType = UNSET
    marginals: list[MarginalEntry] | UnsetType = UNSET
    bounds: list[MarginalEntry] | UnsetType = UNSET
    notes: list[str] | UnsetType = UNSET
    flags: list[str] | UnsetType = UNSET
    command: str | UnsetType = UNSET


class KernelTotalEntry(msgspec.Struct):
    """Kernels of one name and class on one device; without rank and device: on all."""

    rank: int | None
    device: int | None
    name: str
    cls: Literal["compute", "comm", "copy", "unknown"]
    count: int
    total_ms: float
    mean_ms: float
    std_ms: float | None
    min_ms: float
    max_ms: float
    share: float


class GemmEntry(msgspec.Struct):
    """Matrix products of one shape on one device; without rank and device: on all."""

    rank: int | None
    device: int | None
    operator: str
    batch: int
    m: int
    n: int
    k: int
    dtype: str | None
    count: int
    total_ms: float
    mean_ms: float
    std_ms: float | None
    tflops: float | None


class StreamGapsEntry(msgspec.Struct):
    """The time between the kernels of one stream; `reason`: why it is not known how much of it waited for the host."""

    rank: int | None
    device: int | None
    stream: int
    kernels: int
    busy_ms: float
    gaps: int
    gap_ms: float
    gaps_known: int
    launch_bound: int | None
    launch_bound_ms: float | None
    reason: str | None


class CounterEntry(msgspec.Struct):
    """A hardware counter of kernels of one name; `derived_from` the raw ones, or null where the tool gave it."""

    rank: int | None
    device: int | None
    name: str
    counter: str
    count: int
    mean: float
    min: float
    max: float
    comm_share: float | None
    derived_from: str | None


class SlowdownEntry(msgspec.Struct):
    """Kernels of one name on one device, alone and while communication runs; `reason`: why they are not compared."""

    rank: int | None
    device: int | None
    name: str
    alone_count: int
    overlapped_count: int
    partly_count: int
    alone_median_ms: float | None
    overlapped_median_ms: float | None
    slowdown: float | None
    excess_ms: float | None
    alone_mean_ms: float | None
    overlapped_mean_ms: float | None
    mean_ratio: float | None
    mean_ratio_low: float | None
    mean_ratio_high: float | None
    reason: str | None


class KernelEntries(msgspec.Struct):
    """The kernels of traces; `reasons`: kind of rows -> what traces lack of them."""

    by_name: list[KernelTotalEntry]
    by_shape: list[GemmEntry]
    totals: list[KernelTotalEntry]
    gemms: list[GemmEntry]
    gaps: list[StreamGapsEntry]
    counters: list[CounterEntry]
    reasons: dict[str, list[str]]
    left_out: dict[str, int]


class TraceEntries(msgspec.Struct):
    """What a dataset has that was read from traces."""

    whole: dict[str, Any]
    costs: list[dict[str, Any]]
    slowdowns: list[SlowdownEntry]
    kernels: KernelEntries


class DatasetEntry(msgspec.Struct):
    """One run, or the representative launch of a launch set. With `count` 0 there is a `reason`, and no metrics."""

    count: int
    source: SourceFacts
    health: HealthFacts
    steps: StepCounts
    devices: dict[str, Any]
    what_if: WhatIf
    reason: str | UnsetType = UNSET
    overlap_ratio: float | UnsetType | None = UNSET
    null_reasons: Reasons | UnsetType = UNSET
    metrics: dict[str, Described] | UnsetType = UNSET
    collectives: list[CollectiveEntry] | UnsetType = UNSET
    stragglers: list[dict[str, Any]] | UnsetType = UNSET
    experts: dict[str, Any] | UnsetType = UNSET
    stall_cutoff: dict[str, Any] | UnsetType | None = UNSET
    pace: PaceFacts | UnsetType | None = UNSET
    launches: int | UnsetType = UNSET
    representative: str | UnsetType = UNSET
    traces: TraceEntries | UnsetType = UNSET


class Interval(msgspec.Struct):
    """An interval of an effect."""

    low: float | None
    high: float | None


class ComparedBounds(msgspec.Struct):
    """At least and at most of both sides (of a value both), and the least and the greatest difference and change
    (candidate / reference - 1) of any two of their launches.
    """

    reference: Ends
    candidate: Ends
    difference: Interval
    change: Interval
    launches: dict[str, int]


class ComparedMetric(msgspec.Struct):
    """One metric of both sides, in its unit; with launch sets also the test."""

    unit: Unit
    better: Better | None
    reference: float | None
    candidate: float | None
    difference: float | None
    quotient: float | None
    quotient_reason: str | None
    judgement: str | None
    judgement_reason: str | None
    role: str | UnsetType | None = UNSET
    verdict: str | UnsetType | None = UNSET
    verdict_reason: str | UnsetType | None = UNSET
    p: float | UnsetType | None = UNSET
    difference_interval: Interval | UnsetType | None = UNSET
    launches: dict[str, int] | UnsetType | None = UNSET
    bounds: ComparedBounds | UnsetType = UNSET


class HostBoundSide(msgspec.Struct):
    """The side that is host-bound while the other is not, and how far the hosts of both are ahead."""

    side: Literal["reference", "candidate"]
    host_lead_ms: dict[str, float]
    sentence: str


class Comparison(msgspec.Struct):
    """A candidate against a reference."""

    reference: str
    candidate: str
    verdict: str
    verdict_reason: str | None
    host_bound: HostBoundSide | None
    warnings: list[str]
    manifest_differences: list[dict[str, Any]]
    metrics: dict[str, ComparedMetric]
    collectives: list[dict[str, Any]]
    attribution: dict[str, Any] | None
    headline: str | UnsetType = UNSET


class MetricDefinition(msgspec.Struct):
    """What a metric is."""

    unit: Unit
    better: Better | None
    definition: str


class Summary(msgspec.Struct):
    """`summary.json`."""

    summary_version: Literal[1]
    aorta_version: str
    conventions: dict[str, str]
    datasets: dict[str, DatasetEntry]
    metrics: dict[str, MetricDefinition]
    comparison: Comparison | UnsetType = UNSET
