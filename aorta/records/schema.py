"""The lines of `rank_<rank>_metrics.jsonl`: one header, a step per iteration, anchors now and then, one footer; of a
device, a calibration behind the steps that its profiler saw.

Every line is a JSON object tagged by `record`. Dense parts are arrays of rows whose columns are the fields of the
`array_like` structs below, in that order; the header repeats the column names, so a file explains itself.
Offsets inside a step are integer nanoseconds after that step's `start_mono_ns`. Unknown is null with a reason in
`reasons`, never 0. Rows of numbers and words cannot be part of a cycle, so the garbage collector does not track them
(`gc=False`): a run makes a hundred in every step. Must not compute a metric (that is `aorta.timeline`).
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from aorta.timeline.classes import LANES

SCHEMA_VERSION: Final = 2
"""Of records and manifests; no other version is read."""
WORLD_LIMIT: Final = 1 << 20
"""Ranks of a run: ten times the largest machines of today, and few enough to count those that are missing. A source
that says more is damaged."""

Integer: TypeAlias = Annotated[int, msgspec.Meta(gt=-(2**62), lt=2**62)]
"""What a 64-bit column holds, with room for the difference of two values: 146 years in nanoseconds."""
Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=WORLD_LIMIT)]
Reading: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
"""What a sensor says, or a loss: any diverged 32-bit value fits; means and medians of it stay finite."""
Milliseconds: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
"""Also of ratios. 1e15 ms are 30,000 years; sums of a billion such values are exact enough and finite."""

InstrumentMode: TypeAlias = Literal["dedicated", "observe", "off"]
Platform: TypeAlias = Literal["cpu", "cuda", "rocm", "other"]
Timer: TypeAlias = Literal["cuda_event", "device_event", "perf_counter"]
Phase: TypeAlias = Literal["train", "compute_only", "comm_only"]
"""What a step is part of: the training, or one of the isolated baselines behind it (docs/dev/measuring.md, R10)."""
MeasuredBy: TypeAlias = Literal["kernels"]
"""Timing source of a step if not its marks: the profiler's kernels."""
StallCause: TypeAlias = Literal["wait", "hand_over"]
"""Why the training thread stood: it waited for a collective, or a backend's call that hands one over took long."""
CopyDirection: TypeAlias = Literal["h2d", "d2h", "d2d", "p2p"]
"""Host to device, device to host, within a device, from one device to another."""
EndSource: TypeAlias = Literal["event", "future", "wait", "emulated"]
"""How a collective's end was learnt: a device event, the backend's completion callback, or the caller's own wait
(an upper bound: gloo's reduce-scatter offers nothing else). `emulated`: the emulated fabric set it; on that fabric
`future` and `wait` mark a collective for which the backend was slower than the emulation."""


STALL_CUTOFF_NS: Final = 200_000
"""The stall cut-off of records that do not state one, and where none can be measured: handing a collective over to gloo
has been seen to take 20 to 195 us on two busy cores."""


PYTHON_COST: Final = "steps of DDP were 4 to 7 % longer"
"""What timing collectives from Python costs a run on a CPU; on a device nothing is timed then (docs/overhead.md)."""


def chosen_python(why: str) -> bool:
    """Return whether the configuration asks for timing from Python, or emulates the network."""
    return why.strip() in ("instrument.native=false", "the fabric is emulated")


class StallCutoff(msgspec.Struct, frozen=True):
    """A backend's call of this length or shorter only handed a collective over; a longer one is a stall of the training
    thread. `calibrated`: measured on this host when the run began, from calls whose 99th percentile is `hand_over_ns`;
    `configured`: `instrument.stall_cutoff_us`; `default`: neither, `problem` says why.
    """

    cutoff_ns: int
    source: Literal["calibrated", "configured", "default"]
    hand_over_ns: int | None = None
    problem: str | None = None


class CalibrationPlan(msgspec.Struct, frozen=True):
    """Which steps a run measures by the profiler's kernels, to say how far its marks can be believed. `setting` is
    `instrument.calibration` as it was given; `steps` 0: none are, and `problem` says why where some were asked for.
    """

    setting: str
    first_step: Integer
    steps: Integer
    problem: str | None = None


class ClockReading(msgspec.Struct, frozen=True):
    """REALTIME, BOOTTIME and MONOTONIC read together; they belong to one instant within `uncertainty_ns`."""

    realtime_ns: Integer
    boottime_ns: Integer
    monotonic_ns: Integer
    uncertainty_ns: Integer


class Collective(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One collective on one rank. `start_ns` is the later of its issue and the end of the one before it on its link;
    `start_ns - issue_ns` is the time it was queued. `seq` counts per (group, rank) from 0; sends and receives, in which
    not every rank takes part, are each counted by themselves. `bytes` is the full array (all-to-all: one rank's send
    buffer). `backend_end_ns`: when the backend itself was done, where the emulated fabric set the end.
    """

    kind: str
    group: str
    seq: Integer
    bytes: Integer
    dtype: str | None
    issue_ns: Integer
    start_ns: Integer | None
    end_ns: Integer | None
    end_source: EndSource | None
    backend_end_ns: Integer | None = None


class ComputeRange(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One pass of one block. `phase` is "forward" or "backward"; stalls inside it are not yet taken out."""

    block: str
    phase: str
    start_ns: Integer
    end_ns: Integer


class Stall(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A stretch in which the compute stream (on a CPU the training thread) stood blocked on a collective. `cause` is
    None in records that do not tell.
    """

    start_ns: Integer
    end_ns: Integer
    cause: StallCause | None = None


class Wait(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One wait of what computes (the compute stream; on a CPU the training thread) for the collective `seq` of `group`,
    in the step in which it ended; the collective may be of an earlier step. One that did not block is recorded too:
    it continued at once. `kind` is "send" or "recv" where it is one of those, whose `seq` is counted apart.
    """

    group: str
    seq: Integer
    enter_ns: Integer
    leave_ns: Integer
    kind: str | None = None


class AuxRange(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Work that is neither compute nor communication: data, clipping, optimizer, loss read."""

    name: str
    start_ns: Integer
    end_ns: Integer


class Copy(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One copy of `bytes` (those written) between host and device, between devices or within one, on the stream it was
    issued on. Null times: it could not be timed, `reasons` of its line says why.
    """

    direction: CopyDirection
    bytes: Integer
    start_ns: Integer | None
    end_ns: Integer | None


class UserRange(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A range that the caller named. It stands in the step that ended first after it, so it may begin before that step
    (negative offsets). `thread`: 0 is the one that records; `depth`: ranges of its thread round it. Times are the
    host's: of work on a device, when it was issued. `error`: type of the exception that ended it.
    """

    name: str
    thread: Integer
    depth: Integer
    start_ns: Integer
    end_ns: Integer
    error: str | None = None


class BlockKernels(msgspec.Struct, frozen=True, gc=False):
    """Passes of one block in the steps of a calibration: the sum of their ranges, without stalls, and the share of it
    in which kernels of the compute stream ran; null where the ranges are empty.
    """

    block: str
    phase: str
    range_ms: float
    kernel_share: float | None


class DeviceSample(msgspec.Struct, array_like=True, frozen=True):
    """A device reading between `start_mono_ns` and `end_mono_ns` (CLOCK_MONOTONIC, absolute: a sample belongs to
    the step in which it was taken, not to the one whose line holds it). `throttle` names what holds clocks back; empty:
    nothing does. All values null: the sample failed, `reasons` of its line says why.
    """

    start_mono_ns: Integer
    end_mono_ns: Integer
    temp_c: Reading | None
    power_w: Reading | None
    sclk_mhz: Reading | None
    mclk_mhz: Reading | None
    util_pct: Reading | None
    mem_used_bytes: Integer | None
    throttle: list[str] | None


class DeviceTelemetry(msgspec.Struct, frozen=True):
    """Where device samples come from; `source` null: there are none, `problem` says why."""

    source: str | None
    interval_s: Reading | None
    problem: str | None = None


class ActiveSegment(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A stretch in which the set of active lanes does not change; bit i of `lanes` is `Header.lanes[i]`.
    The segments of a step tile its window.
    """

    start_ns: Integer
    end_ns: Integer
    lanes: Integer


COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "collectives": Collective.__struct_fields__,
    "compute": ComputeRange.__struct_fields__,
    "stalls": Stall.__struct_fields__,
    "aux": AuxRange.__struct_fields__,
    "copies": Copy.__struct_fields__,
    "active_segments": ActiveSegment.__struct_fields__,
    "device": DeviceSample.__struct_fields__,
    "ranges": UserRange.__struct_fields__,
    "waits": Wait.__struct_fields__,
}


class Coverage(msgspec.Struct, frozen=True):
    """Collectives seen at the dispatcher, against those the process groups' own sequence counters say were issued (R8).
    Sends and receives of NCCL and RCCL are in neither: their counters leave them out. `issued` is null where a backend
    keeps no counter; `reason` says why coverage is incomplete or unknown. `outside`: how many collectives were seen
    between this step and the one before it that are part of no step (checkpoints, evaluation). `unwatched`: how many
    were issued in backward passes before, or without, a gradient of a watched module: by a model that is not recorded.
    """

    seen: Integer
    issued: Integer | None
    complete: bool
    reason: str | None = None
    outside: Integer = 0
    unwatched: Integer = 0


class Header(msgspec.Struct, tag_field="record", tag="header", frozen=True):
    """First line. Everything needed to read the rest without another file. `emulated_ranks`: how many ranks the only
    process stands for, on an emulated fabric; null where every rank is a process. `every`: of how many steps one is
    observed, as `instrument.every` was given; null where nothing is looked at.
    """

    schema_version: int
    run_id: str
    label: str
    attempt: int
    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    host: str
    pid: int
    boot_id: str
    platform: Platform
    device: str
    backend: str | None
    parallel: str
    timer: Timer
    instrument_mode: InstrumentMode
    manifest_hash: str
    start_step: int
    warmup_steps: int
    clock: ClockReading
    device_telemetry: DeviceTelemetry | None = None
    stall_cutoff: StallCutoff | None = None
    calibration: CalibrationPlan | None = None
    emulated_ranks: int | None = None
    every: str | None = None
    lanes: tuple[str, ...] = LANES
    columns: dict[str, tuple[str, ...]] = msgspec.field(default_factory=lambda: dict(COLUMNS))


class Step(msgspec.Struct, tag_field="record", tag="step", frozen=True):
    """One iteration. `step` counts within the epoch, `global_step` from the start of training, both from 0; in another
    `phase` than `train` both count the steps of that phase, and nothing but the isolated baselines rests on them.
    `warmup` marks steps that the report leaves out of its aggregates (W21). `device` and the `rocm_smi_*` fields stand
    only in the first step written after a sample; those of rocm-smi only where its words were asked for, begun at
    `rocm_smi_t_ns`. `ranges` stands only where the caller named any. `waits`: in order of time; absent where waits are
    not known. `copies`: in the order of their issue; absent where copies were not looked at. `bounds`: metric -> the
    least and the greatest value that it can have, for those which are null in `overlap` because the marks of a device
    leave more open than `aorta.timeline.overlap.DECIDED`. `measured_by`: absent where marks tell when the step computed
    and communicated. `drawn`: the step was observed as one of so many, drawn at random, or 0 for another reason (a
    profiler's window); absent where every step is observed, and in those that were passed over.
    """

    rank: Integer
    world_size: Integer
    epoch: Integer
    step: Integer
    global_step: Integer
    warmup: bool
    loss: Reading | None
    lr: Reading | None
    grad_norm: Reading | None
    start_mono_ns: Integer
    end_mono_ns: Integer
    t_start_ns: Integer
    t_end_ns: Integer
    per_stream_ms: dict[str, float | None]
    overlap: dict[str, Milliseconds | None]
    utilization: dict[str, float | None]
    concurrency: dict[str, float | None]
    coverage: Coverage
    active_segments: list[ActiveSegment]
    collectives: list[Collective]
    compute: list[ComputeRange]
    stalls: list[Stall]
    aux: list[AuxRange]
    phase: Phase = "train"
    reasons: dict[str, str] = {}
    device: list[DeviceSample] | msgspec.UnsetType = msgspec.UNSET
    ranges: list[UserRange] | msgspec.UnsetType = msgspec.UNSET
    waits: list[Wait] | msgspec.UnsetType = msgspec.UNSET
    copies: list[Copy] | msgspec.UnsetType = msgspec.UNSET
    bounds: dict[str, tuple[Milliseconds, Milliseconds]] | msgspec.UnsetType = msgspec.UNSET
    measured_by: MeasuredBy | msgspec.UnsetType = msgspec.UNSET
    drawn: Integer | msgspec.UnsetType = msgspec.UNSET
    rocm_smi_t_ns: Integer | msgspec.UnsetType = msgspec.UNSET
    rocm_smi_output: str | msgspec.UnsetType = msgspec.UNSET
    rocm_smi_exit_code: Integer | msgspec.UnsetType = msgspec.UNSET
    rocm_smi_stderr: str | msgspec.UnsetType = msgspec.UNSET
    rocm_smi_error: str | msgspec.UnsetType = msgspec.UNSET


class Anchor(msgspec.Struct, tag_field="record", tag="anchor", frozen=True):
    """A later reading of the three clocks, so that drift between them can be seen (R7)."""

    global_step: Integer
    clock: ClockReading


class Calibration(msgspec.Struct, tag_field="record", tag="calibration", frozen=True):
    """A window of steps that were measured by marks and by the profiler's kernels, behind its last step.

    `first_step` and `last_step` are global steps; `steps`: how many of them have `measured_by`; `problem`: why not all.
    Both ratios are overlap ratios of the same steps, hidden over all communication of all of them together;
    `ratio_by_marks` is the most that the marks allow. `window_step_ms` against `other_step_ms`, median step times in
    the window and of as many steps behind it, is what the profiler cost each step of the window; `setup_ms`: the time
    it took between steps, which is part of none.
    """

    first_step: Integer
    last_step: Integer
    steps: Integer
    problem: str | None
    ratio_by_kernels: float | None
    ratio_by_marks: float | None
    blocks: list[BlockKernels]
    window_step_ms: float | None
    other_step_ms: float | None
    setup_ms: float | None


class DeviceClockFacts(msgspec.Struct, frozen=True):
    """How well device events were placed on the host's clock: half the width of the host's bracket round the event
    that all others are measured from, the same of one at the end, and how far the two time lines had moved apart by
    then (device minus host); null where it could not be read.
    """

    bound_at_start_ns: Integer
    bound_at_end_ns: Integer
    drift_ns: Integer | None


class Footer(msgspec.Struct, tag_field="record", tag="footer", frozen=True):
    """Last line. A file without one belongs to a process that was killed. `outside`: as in `Coverage`, behind the last
    step. `steps_lost`: steps that ended and have no line.
    """

    reason: Literal["completed", "signal", "error"]
    exit_code: Integer
    steps_written: Integer
    clock: ClockReading
    groups: dict[str, list[Integer]] = {}
    signal: str | None = None
    error: str | None = None
    device_clock: DeviceClockFacts | None = None
    outside: Integer = 0
    steps_lost: Integer = 0


Line: TypeAlias = Header | Step | Anchor | Calibration | Footer
