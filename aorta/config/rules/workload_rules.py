"""Rules of `workload=...`.

Must not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from aorta.config.decoder_sizes import SIZES, dimensions_of
from aorta.config.rules.bounds import at_least
from aorta.config.schema import (
    DDP,
    Config,
    CopyOverlap,
    Devices,
    DType,
    EmulatedFabric,
    Gpt,
    Moe,
    NoParallel,
    Precision,
    Profiling,
    Ranking,
    Resnet18,
    Rpc,
    Streams,
)

_RESNET18_STRIDE = 32
"""Downsampling of the image per side at the last stage: halved five times."""

COPIES_NEED_DEVICE = (
    "workload=copy_overlap compares streams of an accelerator, and on a CPU the threads that compute also copy; run it "
    "where there is one, with training.device=auto (workload=ranking measures overlap with communication on a CPU too)"
)
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


def workload_rules(config: Config) -> Iterator[str]:
    """One message per broken rule."""
    if isinstance(config.workload, Ranking):
        yield from _ranking_rules(config.workload)
    if isinstance(config.workload, Gpt):
        yield from _gpt_rules(config.workload)
    if isinstance(config.workload, Moe):
        yield from _moe_rules(config, config.workload)
    if isinstance(config.workload, Resnet18):
        yield from _resnet18_rules(config, config.workload)
    if isinstance(config.workload, Rpc):
        yield from _rpc_rules(config, config.workload)
    if isinstance(config.workload, CopyOverlap):
        yield from _copy_overlap_rules(config, config.workload)
    if isinstance(config.workload, Streams):
        yield from _streams_rules(config, config.workload)
    if isinstance(config.workload, Rpc | CopyOverlap | Streams):
        yield from _trains_nothing(config, config.workload)


def workload_notes(config: Config) -> Iterator[str]:
    """One note for each setting that this workload does not use."""
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


def _ranking_rules(workload: Ranking) -> Iterator[str]:
    yield from at_least(
        1,
        {
            f"workload.{name}": getattr(workload, name)
            for name in (
                "model_dim",
                "num_heads",
                "num_layers",
                "mlp_hidden_dim",
                "vocab_size",
                "embedding_dim",
                "categorical_features",
                "dense_features",
            )
        },
    )
    if workload.num_heads >= 1 and workload.model_dim % workload.num_heads:
        yield f"workload.model_dim={workload.model_dim}: must be a multiple of workload.num_heads={workload.num_heads}"
    if not 0 <= workload.dropout < 1:
        yield f"workload.dropout={workload.dropout}: must be in [0, 1)"


def _gpt_rules(workload: Gpt) -> Iterator[str]:
    if workload.size not in SIZES:
        yield f"workload.size={workload.size!r}: must be one of {', '.join(SIZES)}"
        return
    dims = dimensions_of(workload)
    too_small = list(at_least(1, {f"workload.{name}": value for name, value in dims._asdict().items()}))
    yield from too_small
    if too_small:
        return
    if dims.model_dim % dims.num_heads or dims.model_dim // dims.num_heads % 2:
        yield (
            f"workload.model_dim={dims.model_dim}: must be an even multiple of workload.num_heads={dims.num_heads}: "
            "rotary positions turn the numbers of a head in pairs"
        )
    if dims.num_heads % dims.num_kv_heads:
        yield (
            f"workload.num_kv_heads={dims.num_kv_heads}: must divide workload.num_heads={dims.num_heads}: each head of "
            "keys and values serves as many heads of queries"
        )


def _moe_rules(config: Config, workload: Moe) -> Iterator[str]:
    counts = {name: getattr(workload, name) for name in ("num_experts", "top_k", "expert_interval")}
    yield from at_least(1, {f"workload.{name}": value for name, value in counts.items()})
    if workload.top_k > workload.num_experts >= 1:
        yield f"workload.top_k={workload.top_k}: must not exceed workload.num_experts={workload.num_experts}"
    if not 0 < workload.capacity_factor < math.inf:
        yield f"workload.capacity_factor={workload.capacity_factor}: must be greater than 0 and finite"
    if not 0 <= workload.balance_weight < math.inf:
        yield f"workload.balance_weight={workload.balance_weight}: must be at least 0 and finite"
    if workload.hot_expert is not None and not 0 <= workload.hot_expert < workload.num_experts:
        yield (
            f"workload.hot_expert={workload.hot_expert}: must be from 0 to {workload.num_experts - 1}, as there are "
            f"{workload.num_experts} experts (workload.num_experts), or null"
        )
    if config.training.mixed_precision is Precision.fp16:
        yield (
            "training.mixed_precision=fp16: workload=moe adds the gradient of its load-balancing loss behind the "
            "scaled loss, so that the two would not fit; use bf16"
        )


def _resnet18_rules(config: Config, workload: Resnet18) -> Iterator[str]:
    yield from at_least(1, {"workload.image_size": workload.image_size})
    if config.training.batch_size == 1 and 1 <= workload.image_size <= _RESNET18_STRIDE:
        yield (
            f"workload.image_size={workload.image_size}: the last stage sees one pixel, and batch norm needs more than "
            f"one value a channel; use images of more than {_RESNET18_STRIDE}, or training.batch_size of 2 and more"
        )
    if workload.dtype not in (DType.bf16, DType.fp32):
        yield f"workload.dtype={workload.dtype.name}: must be bf16 or fp32"
    elif workload.dtype is not DType.fp32 and config.training.mixed_precision is not Precision.none:
        yield (
            f"training.mixed_precision={config.training.mixed_precision.name}: the parameters are in "
            f"{workload.dtype.name} already; set it to none, or workload.dtype=fp32"
        )
    if not isinstance(config.parallel, DDP | NoParallel):
        yield (
            f"parallel={config.parallel.strategy}: workload=resnet18 cannot be sharded or split: its first and last "
            "layers lie at the root of the model; use parallel=ddp or parallel=none"
        )


def _copy_overlap_rules(config: Config, workload: CopyOverlap) -> Iterator[str]:
    counts = ("matrix_size", "multiplications", "repeats")
    yield from at_least(1, {f"workload.{name}": getattr(workload, name) for name in counts})
    if not workload.sizes_bytes or not all(size >= 4 and size % 4 == 0 for size in workload.sizes_bytes):
        yield f"workload.sizes_bytes={list(workload.sizes_bytes)}: multiples of 4 from 4 on, at least one"
    if config.training.device == "cpu":
        yield f"training.device=cpu: {COPIES_NEED_DEVICE}"


def _trains_nothing(config: Config, workload: Rpc | CopyOverlap | Streams) -> Iterator[str]:
    """What belongs to a training was asked of a workload that trains nothing."""
    this = f"workload={workload.name}"
    if config.baseline.enabled:
        yield f"baseline=true: {this} has no training steps to isolate; leave it out"
    if isinstance(config.fabric, EmulatedFabric):
        yield f"fabric=emulated: delays collectives of a training, and {this} is none; use fabric=none"
    if config.profiling.enabled and not isinstance(workload, Rpc):  # whose workers profile their calls
        yield f"profiling.enabled=true: {this} takes no traces; leave it out"


def _rpc_rules(config: Config, workload: Rpc) -> Iterator[str]:
    names = ("num_worker_threads", "windows", "calls", "tensor_size")
    yield from at_least(1, {f"workload.{name}": getattr(workload, name) for name in names})
    if not 0 < workload.timeout_s < math.inf:
        yield f"workload.timeout_s={workload.timeout_s}: must be greater than 0 and finite"
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
    yield from at_least(
        1, {f"workload.{name}": getattr(workload, name) for name in ("matrix_size", "transfer_bytes", "repeats")}
    )
    if not 0 <= workload.knee_tolerance < 1:
        yield f"workload.knee_tolerance={workload.knee_tolerance}: must be in [0, 1)"
    if config.training.device == "cpu":
        yield f"training.device=cpu: {STREAMS_NEED_DEVICE}"
