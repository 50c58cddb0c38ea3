"""`workload=...`: the models that are trained, what trains nothing (`rpc`, `streams`), and their rules.

Must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from omegaconf import MISSING

from aorta.config.fabric import EmulatedFabric
from aorta.config.loop import Devices, DType, Precision
from aorta.config.profiling import Profiling

if TYPE_CHECKING:
    from aorta.config.schema import Config


class StreamPattern(Enum):
    """Patterns of `workload=streams`; `aorta.streams.patterns` declares each."""

    independent = "independent"
    depth_first = "depth_first"
    chained = "chained"
    fan_in = "fan_in"
    fan_out = "fan_out"
    fork_join = "fork_join"
    ping_pong = "ping_pong"
    pipeline = "pipeline"
    moe_bursts = "moe_bursts"
    small_kernel_storm = "small_kernel_storm"
    unbalanced = "unbalanced"
    priorities = "priorities"
    copies_beside_gemm = "copies_beside_gemm"
    allreduce_beside_gemm = "allreduce_beside_gemm"


@dataclass
class Workload:
    """Base of the workload group."""

    # which workload
    name: str = MISSING


@dataclass
class Ranking(Workload):
    """A ranking transformer on synthetic features: dense and categorical inputs, an encoder, a scorer."""

    name: str = "ranking"
    # width of the hidden states
    model_dim: int = 128
    # attention heads
    num_heads: int = 4
    # layers
    num_layers: int = 4
    # width of the feed-forward part
    mlp_hidden_dim: int = 512
    # rows of the embedding table
    vocab_size: int = 4_000
    # width of one embedding, projected to model_dim
    embedding_dim: int = 64
    # categorical features of an item
    categorical_features: int = 8
    # dense features of an item
    dense_features: int = 16
    # dropout inside the encoder
    dropout: float = 0.1


@dataclass
class Resnet18(Workload):
    """ResNet-18 on one random batch: images [batch, 3, size, size] -> 1000 numbers, mean squared error, SGD without
    momentum. Trains with `parallel=ddp` or `none`. Sets its own batch size, length, optimizer and schedule
    (`config/workload/resnet18.yaml`); no data set is stored.
    """

    name: str = "resnet18"
    # height and width of the images
    image_size: int = 224
    # type of parameters, buffers, images and targets: bf16 or fp32
    dtype: DType = DType.bf16


@dataclass
class Gpt(Workload):
    """A decoder of language models on synthetic tokens: RMSNorm, rotary positions, causal attention with grouped heads,
    SwiGLU. `size` gives every dimension that is not set.
    """

    name: str = "gpt"
    # parameters, about: 10m, 100m, 350m, 1b, 3b or 7b
    size: str = "10m"
    # layers
    num_layers: int | None = None
    # width of the hidden states
    model_dim: int | None = None
    # attention heads
    num_heads: int | None = None
    # heads of keys and values; a divisor of num_heads
    num_kv_heads: int | None = None
    # width of the feed-forward part
    mlp_hidden_dim: int | None = None
    # rows of the embedding table
    vocab_size: int | None = None


@dataclass
class Moe(Gpt):
    """The decoder of `workload=gpt` with a mixture of experts in place of the feed-forward part: a router sends each
    token to `top_k` of `num_experts` experts, each as wide as that part.
    """

    name: str = "moe"
    # experts in a layer
    num_experts: int = 8
    # experts per token
    top_k: int = 2
    # every N-th layer has experts; 1 = all
    expert_interval: int = 1
    # capacity of an expert over an equal share of a rank's tokens; the rest is dropped
    capacity_factor: float = 1.25
    # weight of the load-balancing loss
    balance_weight: float = 0.01


@dataclass
class Rpc(Workload):
    """Calls through torch.distributed.rpc: rank 0 drives, the others serve (two processes or more); `parallel`,
    `optimizer` and the like are ignored.
    """

    name: str = "rpc"
    # names of the processes; {rank} counts from 0, {number} from 1
    worker_name: str = "worker{rank}"
    # threads that serve calls in each process
    num_worker_threads: int = 4
    # profiling windows; each is one trace a worker
    windows: int = 2
    # calls that rank 0 issues in a window
    calls: int = 12
    # side of the square tensors that are sent
    tensor_size: int = 64
    # seconds until a call or a silent worker counts as lost
    timeout_s: float = 60.0


@dataclass
class Streams(Workload):
    """Patterns of kernels on 1 to 64 streams: how many run at once, and how many hardware queues there are. Needs a
    CUDA or HIP device; trains nothing: `parallel`, `optimizer` and the like are ignored.
    """

    name: str = "streams"
    # numbers of streams, 1 to 64
    streams: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64])
    # patterns to run; none: all (docs/dev/streams.md)
    patterns: list[StreamPattern] = field(default_factory=list)
    # length of a kernel in microseconds
    kernel_us: float = 100.0
    # side of the matrices of a GEMM
    matrix_size: int = 512
    # bytes of a copy, and of an all-reduce
    transfer_bytes: int = 4_194_304
    # measurements per point; the median counts
    repeats: int = 5
    # smaller gains in throughput count as none
    knee_tolerance: float = 0.05


class Dimensions(NamedTuple):
    """Of a decoder. The fields are called as in the configuration."""

    num_layers: int
    model_dim: int
    num_heads: int
    num_kv_heads: int
    mlp_hidden_dim: int
    vocab_size: int

    @property
    def head_dim(self) -> int:
        """Numbers in one head of queries, keys or values."""
        return self.model_dim // self.num_heads


SIZES: Final = {
    "10m": Dimensions(8, 256, 8, 4, 704, 8_000),
    "100m": Dimensions(12, 768, 12, 4, 2_048, 16_000),
    "350m": Dimensions(24, 1_024, 16, 8, 2_816, 32_000),
    "1b": Dimensions(22, 2_048, 32, 4, 5_632, 32_000),
    "3b": Dimensions(26, 3_200, 32, 32, 8_640, 32_000),
    "7b": Dimensions(32, 4_096, 32, 32, 11_008, 32_000),
}
"""Name -> dimensions; 1b, 3b and 7b are those of TinyLlama (arXiv 2401.02385), OpenLLaMA 3B, and Llama 2 7B (arXiv
2307.09288)."""


def dimensions_of(workload: Gpt) -> Dimensions:
    """Return the dimensions of its size, but for those that it sets itself; `workload.size` must be one of `SIZES`."""
    own = {name: value for name in Dimensions._fields if (value := getattr(workload, name)) is not None}
    return SIZES[workload.size]._replace(**own)


_RESNET18_STRIDE = 32
"""Downsampling of the image per side at the last stage: halved five times."""
MOST_STREAMS = 64
STREAMS_NEED_DEVICE = (
    "workload=streams times kernels on streams of a CUDA or HIP device, and a CPU has no streams; run it on a machine "
    "with such a device and training.device=auto (here, workload=ranking trains and measures overlap on the CPU)"
)
_NOT_IN_RPC = (
    *("ranks", "naming", "compression", "folder", "overwrite", "num_traces_to_keep", "memory_filename", "chrome_trace"),
    "summary_rows",
)
"""Keys of the profiling group, besides the schedule, that `rpc.rpc_run` does not read."""


def workload_rules(config: Config) -> Iterator[str]:
    """Yield one message per broken rule."""
    workload, training, this = config.workload, config.training, f"workload={config.workload.name}"
    fp16 = training.mixed_precision is Precision.fp16
    match workload:
        case Ranking(model_dim=width, num_heads=heads) if heads >= 1 and width % heads:
            yield f"workload.model_dim={width}: must be a multiple of workload.num_heads={heads}"
        case Gpt() if workload.size not in SIZES:
            yield f"workload.size={workload.size!r}: must be one of {', '.join(SIZES)}"
        case Gpt() if min(dims := dimensions_of(workload)) >= 1:  # or else a rule of single numbers says so
            of_queries, shared = f"workload.num_heads={dims.num_heads}", dims.num_kv_heads
            if dims.model_dim % dims.num_heads or dims.head_dim % 2:
                why = "rotary positions turn the numbers of a head in pairs"
                yield f"workload.model_dim={dims.model_dim}: must be an even multiple of {of_queries}: {why}"
            if dims.num_heads % shared:
                yield f"workload.num_kv_heads={shared}: must divide {of_queries}: it serves as many heads of queries"
        case Resnet18(image_size=size, dtype=dtype):
            if training.batch_size == 1 and 1 <= size <= _RESNET18_STRIDE:
                yield (
                    f"workload.image_size={size}: the last stage sees one pixel, and batch norm needs more values; use "
                    f"images of more than {_RESNET18_STRIDE}, or training.batch_size of 2 and more"
                )
            if dtype not in (DType.bf16, DType.fp32):
                yield f"workload.dtype={dtype.name}: must be bf16 or fp32"
            elif dtype is not DType.fp32 and training.mixed_precision is not Precision.none:
                yield (
                    f"training.mixed_precision={training.mixed_precision.name}: the parameters are in {dtype.name} "
                    "already; set it to none, or workload.dtype=fp32"
                )
        case Rpc(worker_name=name):
            try:
                distinct = len({name.format(rank=rank, number=rank + 1) for rank in range(2)}) == 2
            except (KeyError, IndexError, ValueError):
                distinct = False
            if not distinct:
                yield f"workload.worker_name={name!r}: a name with {{rank}} or {{number}} in it, no other {{}}"
            if (root := config.profiling.remote_root) is not None:
                yield f"profiling.remote_root={root!r}: workload=rpc uploads nothing; set it to null"
        case Streams(streams=streams, kernel_us=kernel_us):
            if not streams or not all(1 <= number <= MOST_STREAMS for number in streams):
                yield f"workload.streams={list(streams)}: numbers from 1 to {MOST_STREAMS}, at least one"
            if 1 not in streams:
                yield f"workload.streams={list(streams)}: must have 1, which the others are compared with"
            if not 0 < kernel_us <= 1e6:
                yield f"workload.kernel_us={kernel_us}: must be greater than 0 and at most 1000000"
            if training.device == "cpu":
                yield f"training.device=cpu: {STREAMS_NEED_DEVICE}"
            if config.profiling.enabled:
                yield f"profiling.enabled=true: {this} takes no traces; leave it out"
    if isinstance(workload, Moe):
        if workload.top_k > workload.num_experts >= 1:
            yield f"workload.top_k={workload.top_k}: must not exceed workload.num_experts={workload.num_experts}"
        if fp16:
            why = "the scaled loss and the load-balancing loss would not fit"
            yield f"training.mixed_precision=fp16: {this}: {why}; use bf16"
    if isinstance(workload, Rpc | Streams):
        if config.baseline.enabled:
            yield f"baseline=true: {this} has no training steps to isolate; leave it out"
        if isinstance(config.fabric, EmulatedFabric):
            yield f"fabric=emulated: delays collectives of a training, and {this} has none; use fabric=none"


def workload_notes(config: Config) -> Iterator[str]:
    """Yield one note for each setting that this workload does not use."""
    profiling, without = config.profiling, list[str]()
    if profiling.enabled:
        without += [f"profiling.{name}" for name in _NOT_IN_RPC if getattr(profiling, name) != getattr(Profiling, name)]
    if config.telemetry.devices not in (Devices.auto, Devices.off):
        without.append("telemetry.devices")
    if config.telemetry.loggers:
        without.append("telemetry.loggers")
    if without and isinstance(config.workload, Rpc):
        yield f"workload=rpc has no steps, samples no device and profiles every worker; it ignores {', '.join(without)}"
