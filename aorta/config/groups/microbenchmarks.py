"""`workload=rpc` and `streams`: what trains nothing, and its rules.

Must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aorta.config.groups.common import StreamPattern
from aorta.config.groups.fabric import EmulatedFabric
from aorta.config.groups.loop import Devices
from aorta.config.groups.profiling import Profiling
from aorta.config.groups.workload import Workload

if TYPE_CHECKING:
    from aorta.config.schema import Config


@dataclass
class Rpc(Workload):
    """Calls through torch.distributed.rpc: rank 0 drives, the others serve, so two processes are the least; `parallel`,
    `optimizer` and the like have no meaning here.
    """

    name: str = "rpc"
    # what the processes are called; {rank} counts from 0, {number} from 1
    worker_name: str = "worker{rank}"
    # threads that serve calls in each process
    num_worker_threads: int = 4
    # profiling windows; each is one trace a worker
    windows: int = 2
    # calls that rank 0 issues in a window
    calls: int = 12
    # side of the square tensors that are sent
    tensor_size: int = 64
    # seconds after which a call, or a worker that gives no sign, counts as lost
    timeout_s: float = 60.0


@dataclass
class Streams(Workload):
    """Patterns of kernels on 1 to 64 streams: how many run at once, and how many hardware queues there are. Trains
    nothing, and needs a CUDA or HIP device; `parallel`, `optimizer` and the like have no meaning here.
    """

    name: str = "streams"
    # numbers of streams that each pattern is run on, from 1 to 64
    streams: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64])
    # which patterns; none: all (docs/dev/streams.md lists them)
    patterns: list[StreamPattern] = field(default_factory=list)
    # microseconds that a kernel of one block computes
    kernel_us: float = 100.0
    # side of the matrices that are multiplied
    matrix_size: int = 512
    # bytes of a copy, and of an all-reduce
    transfer_bytes: int = 4_194_304
    # how often each point is measured; the median counts
    repeats: int = 5
    # more streams that gain less than this share of the throughput gain nothing
    knee_tolerance: float = 0.05


MOST_STREAMS = 64
STREAMS_NEED_DEVICE = (
    "workload=streams times kernels on streams of a CUDA or HIP device, and a CPU has no streams; run it on a machine "
    "with such a device and training.device=auto (here, workload=ranking trains and measures overlap on the CPU)"
)

_NOT_IN_RPC = (
    "ranks",
    "naming",
    "compression",
    "folder",
    "overwrite",
    "num_traces_to_keep",
    "memory_filename",
    "chrome_trace",
    "summary_rows",
)
"""Keys of the profiling group, besides the schedule, that `rpc.rpc_run` does not read."""


def microbenchmark_rules(config: Config) -> Iterator[str]:
    """Yield one message per broken rule of a workload that trains nothing."""
    if isinstance(config.workload, Rpc):
        yield from _rpc_rules(config, config.workload)
    if isinstance(config.workload, Streams):
        yield from _streams_rules(config, config.workload)
    if isinstance(config.workload, Rpc | Streams):
        yield from _trains_nothing(config, config.workload)


def microbenchmark_notes(config: Config) -> Iterator[str]:
    """Yield one note for each setting that this workload does not use."""
    if not isinstance(config.workload, Rpc):
        return
    without = []
    if config.profiling.enabled:
        asked = config.profiling
        without = [f"profiling.{name}" for name in _NOT_IN_RPC if getattr(asked, name) != getattr(Profiling, name)]
    if config.telemetry.devices not in (Devices.auto, Devices.off):
        without.append("telemetry.devices")
    if config.telemetry.loggers:
        without.append("telemetry.loggers")
    if without:
        yield (
            f"workload=rpc: has no use for {', '.join(without)}: every worker profiles itself, samples no device and "
            "has no steps"
        )


def _trains_nothing(config: Config, workload: Rpc | Streams) -> Iterator[str]:
    """Yield a message for each setting of a training that a workload without one cannot have."""
    this = f"workload={workload.name}"
    if config.baseline.enabled:
        yield f"baseline=true: {this} has no training steps to isolate; leave it out"
    if isinstance(config.fabric, EmulatedFabric):
        yield f"fabric=emulated: delays collectives of a training, and {this} is none; use fabric=none"
    if config.profiling.enabled and not isinstance(workload, Rpc):  # whose workers profile their calls
        yield f"profiling.enabled=true: {this} takes no traces; leave it out"


def _rpc_rules(config: Config, workload: Rpc) -> Iterator[str]:
    try:
        distinct = len({workload.worker_name.format(rank=rank, number=rank + 1) for rank in range(2)}) == 2
    except (KeyError, IndexError, ValueError):
        distinct = False
    if not distinct:
        yield f"workload.worker_name={workload.worker_name!r}: a name with {{rank}} or {{number}} in it, no other {{}}"
    if config.profiling.remote_root is not None:
        yield f"profiling.remote_root={config.profiling.remote_root!r}: workload=rpc uploads nothing; set it to null"


def _streams_rules(config: Config, workload: Streams) -> Iterator[str]:
    if not workload.streams or not all(1 <= number <= MOST_STREAMS for number in workload.streams):
        yield f"workload.streams={list(workload.streams)}: numbers from 1 to {MOST_STREAMS}, at least one"
    if 1 not in workload.streams:
        yield f"workload.streams={list(workload.streams)}: must have 1, which the others are compared with"
    if not 0 < workload.kernel_us <= 1e6:
        yield f"workload.kernel_us={workload.kernel_us}: must be greater than 0 and at most 1000000"
    if config.training.device == "cpu":
        yield f"training.device=cpu: {STREAMS_NEED_DEVICE}"
