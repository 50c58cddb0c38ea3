"""The sections of the root file: the loop, its optimizer and data, compilation, instrumentation, telemetry (a group of
one option), watchdog, and faults that a run is given on purpose (`aorta.workload.faults` carries them out); and the
rule of single numbers of all sections and groups.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Final, NamedTuple

from aorta.errors import ConfigError, meant

_HOLDS: Final[dict[str, Callable[[float], bool]]] = {
    "must be at least 1": lambda value: value >= 1,
    "must be at least 0": lambda value: value >= 0,
    "must be greater than 0 and finite": lambda value: 0 < value < math.inf,
    "must be at least 0 and finite": lambda value: 0 <= value < math.inf,
    "must be in [0, 1)": lambda value: 0 <= value < 1,
}
"""What a rule says -> whether a number keeps it; a NaN keeps none."""
_NUMBERS: Final[dict[str, str]] = {
    "must be at least 0": "training.start_step training.seed dataset.seed scheduler.warmup_steps fault.step "
    "dataloader.num_workers telemetry.warmup_steps parallel.forward_prefetch parallel.backward_prefetch "
    "fabric.slow_min_bytes fabric.slow_max_bytes profiling.wait profiling.warmup profiling.repeat profiling.skip_first "
    "profiling.summary_rows",
    "must be at least 0 and finite": "optimizer.weight_decay fabric.intra_latency_us fabric.inter_latency_us "
    "fabric.straggler_ms workload.balance_weight",
    "must be in [0, 1)": "workload.dropout workload.knee_tolerance fabric.jitter",
    "must be greater than 0 and finite; 1 changes nothing": "fabric.slow_factor",
    "must be greater than 0 and finite; null measures it": "instrument.stall_cutoff_us",
    "must be at least 0 and finite; null learns it, 0 is off": "watchdog.timeout_s",
    "": "instrument.stream_priority clock.fake_offset_ns clock.fake_drift_ppm profiling.num_traces_to_keep "
    "workload.kernel_us fabric.ranks fabric.emulated_world_size fabric.straggler_rank fabric.seed",
}
"""What single numbers must be -> their keys; "": any number, or a rule elsewhere. `number_rules` has that of others."""


def number_rules(section: str, node: Any) -> Iterator[str]:
    """Yield a message for each number of a section that breaks its rule: null is allowed; where `_NUMBERS` has no other
    rule, an integer must be at least 1, and a float greater than 0 and finite.
    """
    own = {key: words for words, keys in _NUMBERS.items() for key in keys.split()}
    for item in fields(node):
        key, value, kind = f"{section}.{item.name}", getattr(node, item.name), str(item.type)
        if value is not None and (numeric := re.match(r"(int|float)\b", kind)):
            usual = "must be at least 1" if numeric[1] == "int" else "must be greater than 0 and finite"
            words = own.get(key, usual)
            if words and not _HOLDS[words.partition(";")[0]](value):
                yield f"{key}={value}: {words}"


class Precision(Enum):
    """Arithmetic of the forward and backward pass; parameters and optimizer state stay in float32."""

    bf16 = "bf16"
    fp16 = "fp16"
    none = "none"


class Wording(Enum):
    """Style of progress lines: overlap, or a profiling tutorial's, which also says when each rank starts and ends."""

    overlap = "overlap"
    tutorial = "tutorial"


class Mode(Enum):
    """How collectives are observed (docs/dev/measuring.md, R2 and R3)."""

    dedicated = "dedicated"
    observe = "observe"
    off = "off"


class DType(Enum):
    """A floating-point type by its short name."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


@dataclass
class Training:
    """The loop."""

    # most passes over the dataset; null = as many as max_steps needs
    epochs: int | None = None
    # optimizer steps, resumes included; null = all epochs, or one
    max_steps: int | None = 200
    # resume from the checkpoint taken before this global step; null = 0, or the newest checkpoint after a restart
    start_step: int | None = None
    # samples per rank and micro-batch; also workload.batch_size
    batch_size: int = 8
    # micro-batches per optimizer step; gradients are reduced on the last one only
    gradient_accumulation: int = 1
    # arithmetic of forward and backward
    mixed_precision: Precision = Precision.none
    # largest global gradient norm; null = no clipping
    grad_clip_norm: float | None = 1.0
    # steps between two progress lines; the loss is read from the device only then
    log_interval: int = 5
    # what a progress line shows; tutorial = `[rank 0] step i/n loss=x`
    progress: Wording = Wording.overlap
    # where the run writes; with a label, its sub-folder of that name
    output_dir: str = "artifacts"
    # replace an earlier run in the same folder instead of moving it to history/
    overwrite: bool = False
    # steps between two checkpoints; null = none
    checkpoint_interval: int | None = None
    # seed of initialisation, dropout and sampling
    seed: int = 42
    # auto, cpu, cuda (CUDA and HIP), or another accelerator as torch names it (xpu); auto = an accelerator that
    # AORTA can measure on, else the CPU
    device: str = "auto"
    # ranks that share a device, for checks; NCCL is set to allow it
    ranks_per_device: int = 1
    # seconds after which a collective that does not end fails the run
    timeout_s: float = 300.0


@dataclass
class Optimizer:
    """AdamW; with `workload=resnet18` SGD without momentum, which has neither `betas` nor `eps`."""

    # peak learning rate
    lr: float = 3e-4
    # decoupled weight decay
    weight_decay: float = 0.01
    # decay rates of the two moments
    betas: tuple[float, float] = (0.9, 0.98)
    # added to the denominator
    eps: float = 1e-8


@dataclass
class Scheduler:
    """Linear warm-up, then linear decay to 0."""

    # steps from 0 to the peak learning rate
    warmup_steps: int = 100
    # step at which the learning rate reaches 0; null = never, it stays at the peak
    total_steps: int | None = 2000


@dataclass
class Dataset:
    """Synthetic, made once at start from the seed."""

    # samples in one epoch, over all ranks
    num_samples: int = 10_000
    # items in one sample
    sequence_length: int = 32
    # seed of the data, apart from the training seed
    seed: int = 42
    # keep the whole data set in device memory: no copy inside the loop
    on_device: bool = True


@dataclass
class Dataloader:
    """How batches are fetched when the data set is not on the device."""

    # loader processes per rank; 0 = in the training process
    num_workers: int = 0
    # page-locked host memory, for asynchronous copies
    pin_memory: bool = False


@dataclass
class Compile:
    """torch.compile, block by block, so that compute ranges stay outside compiled code."""

    # compile every block of the model
    enabled: bool = False
    # compiler backend
    backend: str = "inductor"
    # inductor's mode; null = default
    mode: str | None = None
    # fail on a graph break
    fullgraph: bool = False
    # symbolic shapes
    dynamic: bool = False


@dataclass
class Instrument:
    """How collectives and compute are seen."""

    # dedicated = collectives on AORTA's streams; observe = timed where they run; off = not measured
    mode: Mode = Mode.dedicated
    # priority of dedicated streams (lower = more urgent); null = as the issuing stream
    stream_priority: int | None = None
    # dedicated: move asynchronous collectives (DDP's) too; experimental (docs/dev/devices.md)
    dedicated_async: bool = False
    # time collectives in C++ if built; false: from Python, on a device not at all
    native: bool = True
    # CPU backends: longer calls count as blocking, in microseconds; null = measured on each host
    stall_cutoff_us: float | None = None
    # steps after warm-up that torch.profiler measures too: auto (3 on an accelerator), off or a number
    calibration: str = "auto"
    # observe one of every N steps, drawn at random; auto: N at which AORTA's own work takes 0.1 %
    every: str = "1"


CALIBRATION_STEPS = 3
"""Default steps of a calibration window: a single one could be a straggler's, and the profiler slows all of them."""
_MOST_CALIBRATED = 100
_LARGEST_BLOCK = 1_000_000


def calibration_steps(setting: str, *, on_device: bool) -> int:
    """Return how many steps `instrument.calibration` asks for; raises ConfigError where it is not allowed."""
    if setting in ("auto", "off"):
        return CALIBRATION_STEPS if setting == "auto" and on_device else 0
    if not (setting.isascii() and setting.isdigit() and 1 <= int(setting) <= _MOST_CALIBRATED):
        raise ConfigError(
            f"instrument.calibration={setting}: must be auto, off, or a number of steps from 1 to {_MOST_CALIBRATED}"
        )
    return int(setting)


def observed_every(setting: str) -> int | None:
    """Return of how many steps one is observed, None for `auto`; raises ConfigError where `instrument.every` is not
    allowed.
    """
    if setting == "auto":
        return None
    if not (setting.isascii() and setting.isdigit() and 1 <= int(setting) <= _LARGEST_BLOCK):
        raise ConfigError(f"instrument.every={setting}: must be auto, or a number of steps from 1 to {_LARGEST_BLOCK}")
    return int(setting)


@dataclass
class Baseline:
    """After training, steps that only compute and steps that only communicate."""

    # measure overlap_efficiency and compute_slowdown
    enabled: bool = False
    # steps per phase, warm-up included
    steps: int = 20


@dataclass
class Clock:
    """Clock anchors, and the ranks' clocks against each other."""

    # steps between readings of REALTIME, BOOTTIME and MONOTONIC
    anchor_interval: int = 100
    # measure clocks against rank 0's before the first and after the last step
    sync: bool = True
    # ping-pongs per rank and measurement; the quickest counts
    sync_samples: int = 32
    # for tests: nanoseconds that clocks of ranks other than 0 are ahead
    fake_offset_ns: int = 0
    # for tests: drift in microseconds per second
    fake_drift_ppm: float = 0.0


Devices = Enum("Devices", {"auto": "auto", "nvml": "nvml", "amdsmi": "amdsmi", "rocm-smi": "rocm-smi", "off": "off"})
"""Source of device samples; `auto`: the best one for the platform. rocm-smi is a program."""


class Loggers(Enum):
    """Tools that `aorta.loggers` sends the scalars of steps to."""

    tensorboard = "tensorboard"
    wandb = "wandb"


@dataclass
class Telemetry:
    """What the record holds beside timings."""

    # first steps that the report leaves out (at most half of the run)
    warmup_steps: int = 5
    # source of device samples (temperature, power, clocks, use, memory, throttling)
    devices: Devices = Devices.auto
    # seconds between two samples; rocm-smi: at least 1, with auto 5
    device_interval_s: float = 1.0
    # also keep what rocm-smi prints (AMD devices only)
    rocm_smi: bool = False
    # run rocm-smi even without an AMD device
    force: bool = False
    # tools that get rank 0's scalars during the run (docs/loggers.md)
    loggers: list[Loggers] = field(default_factory=list)
    # steps between logged steps
    logger_interval: int = 1


@dataclass
class Watchdog:
    """Notices ranks that are stuck or die, and writes an autopsy of the run; never ends a rank."""

    # seconds without progress on a rank; null = learned from the run's steps, at least 10; 0 = no watchdog
    timeout_s: float | None = None
    # the same before it is learned, and in announced phases (checkpoint, baseline)
    grace_s: float = 600.0


FAULTS: Final = {
    "workload_exception": "raises RuntimeError in its forward pass",
    "async_exception": "another thread raises RuntimeError in the one that trains",
    "signal_exception": "a handler of SIGALRM raises RuntimeError",
    "sigint": "gets SIGINT twice, the second of which ends it at once",
    "sigterm": "gets SIGTERM without a handler",
    "sigkill": "gets SIGKILL",
    "sigstop": "gets SIGSTOP",
    "segfault": "reads address 0",
    "abort": "calls abort()",
    "lock_gil": "deadlocks in compiled code that holds the interpreter lock",
    "stuck_forward": "sleeps in its forward pass without end",
    "link_stalled": "loses all that its peers send, without an error",
    "skipped_collective": "leaves out an all-reduce of the others, and goes on",
    "swapped_order": "issues two all-reduces the other way round",
    "wrong_size": "reduces three times as many elements",
    "wrong_dtype": "reduces float64 for float32",
    "wrong_kind": "broadcasts instead of reducing",
    "wrong_group": "reduces in another group of the same ranks",
    "rank_dependent_branch": "waits in a barrier that only it calls",
    "slow_data": "waits three seconds for each batch",
    "stuck_data": "waits for a batch without end",
    "stuck_optimizer": "sleeps in its optimizer without end",
    "stuck_checkpoint": "sleeps while it writes a checkpoint, without end",
    "slow_rank": "takes three seconds longer for each forward pass",
}
"""Kind -> what the rank does from the beginning of `fault.step` on, one rank of a data-parallel run."""
_WITHOUT_FORWARD: Final = ("slow_data", "stuck_data", "stuck_optimizer", "stuck_checkpoint")
"""Kinds that do not act in the model's forward pass: a pipeline runs its stages, never the model as a whole."""


class PlannedFault(NamedTuple):
    kind: str
    rank: int
    step: int


@dataclass
class Fault:
    """Faults injected on purpose, to see what is detected."""

    # what goes wrong, several joined by +; null = nothing; pipelines: faults of data, optimizer, checkpoint
    kind: str | None = None
    # rank that fails; several kinds: as many ranks, joined by +
    rank: str = "1"
    # global step of the fault
    step: int = 10


def planned_faults(fault: Fault) -> list[PlannedFault]:
    """Return the faults of a configuration that `fault_rules` accepts."""
    kinds = [] if fault.kind is None else fault.kind.split("+")
    ranks = fault.rank.split("+")
    if len(ranks) == 1:
        ranks *= len(kinds)
    return [PlannedFault(kind, int(rank), fault.step) for kind, rank in zip(kinds, ranks, strict=True)]


def fault_rules(fault: Fault, world_size: int, *, in_pipeline: bool = False) -> Iterator[str]:
    """Yield one message per broken rule. `in_pipeline`: the ranks run stages of the model."""
    if fault.kind is None:
        return
    kinds, ranks = fault.kind.split("+"), fault.rank.split("+")
    for kind in kinds:
        if kind not in FAULTS:
            yield f"fault.kind={fault.kind}: {kind!r} must be one of {', '.join(FAULTS)}{meant(kind, FAULTS, '; ')}"
        elif in_pipeline and kind not in _WITHOUT_FORWARD:
            allowed = ", ".join(_WITHOUT_FORWARD)
            yield f"fault.kind={fault.kind}: {kind!r} acts in the whole model's forward pass; pipelines take {allowed}"
    if len(ranks) not in (1, len(kinds)):
        yield f"fault.rank={fault.rank}: must be one rank, or one for each of {fault.kind}"
    for rank in ranks:
        if not rank.isdecimal() or int(rank) >= world_size:
            yield f"fault.rank={fault.rank}: {rank!r} must be a rank, at least 0 and below {world_size}"
