"""The typed shape of a configuration. `config/*.yaml` holds values, this file holds names, types and meaning.

Each field's comment on the line(s) above it is its documentation: `docs/configuration.md` is checked against this file.
Hydra overrides need mutable dataclasses, so none is frozen. Must not: import torch, or check one field against another
(that is `resolve`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


class Precision(Enum):
    """Arithmetic of the forward and backward pass; parameters and optimizer state stay in float32."""

    bf16 = "bf16"
    fp16 = "fp16"
    none = "none"


class Device(Enum):
    """Where the run computes; `auto` takes the accelerator where there is one."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Mode(Enum):
    """How collectives are seen (docs/measuring.md, R2 and R3)."""

    dedicated = "dedicated"
    observe = "observe"
    off = "off"


class Algorithm(Enum):
    """How a collective passes data on: round a ring, or in about log2(n) rounds."""

    ring = "ring"
    tree = "tree"


class BackwardPrefetch(Enum):
    """When FSDP1 gathers the next parameters in backward: before or after the current gradients, or not ahead."""

    backward_pre = "backward_pre"
    backward_post = "backward_post"
    none = "none"


class Sharding(Enum):
    """What FSDP1 shards: parameters too, or only gradients and optimizer state once forward has gathered them."""

    full_shard = "full_shard"
    shard_grad_op = "shard_grad_op"


class DType(Enum):
    """A floating-point type by its short name."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


@dataclass
class Training:
    """The loop."""

    # passes over the dataset; training ends at the earlier of this and max_steps
    epochs: int = 1
    # optimizer steps in the whole training, counted from step 0 (also after a resume); null = all epochs
    max_steps: int | None = 200
    # resume from the checkpoint taken before this global step; null = 0, or the newest checkpoint after a restart
    start_step: int | None = None
    # samples per rank and micro-batch
    batch_size: int = 8
    # micro-batches per optimizer step; gradients are reduced on the last one only
    gradient_accumulation: int = 1
    # arithmetic of forward and backward
    mixed_precision: Precision = Precision.none
    # largest global gradient norm; null = no clipping
    grad_clip_norm: float | None = 1.0
    # steps between two progress lines; the loss is read from the device only then
    log_interval: int = 5
    # where the run writes, relative to the caller's folder; with a label, its sub-folder of that name
    output_dir: str = "artifacts"
    # replace an earlier run in the same folder instead of moving it to history/
    overwrite: bool = False
    # steps between two checkpoints; null = none
    checkpoint_interval: int | None = None
    # seed of initialisation, dropout and sampling
    seed: int = 42
    # where to compute
    device: Device = Device.auto
    # seconds after which a collective that does not end fails the run
    timeout_s: float = 300.0


@dataclass
class Optimizer:
    """AdamW."""

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
    # step at which the learning rate reaches 0
    total_steps: int = 2000


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

    # dedicated = collectives on streams of their own; observe = timed where they run; off = not seen
    mode: Mode = Mode.dedicated
    # priority of the dedicated streams (CUDA/HIP; lower number = more urgent)
    stream_priority: int = 0


@dataclass
class Baseline:
    """Isolated baselines: behind the training, in the same launch, steps that only compute and steps that only
    communicate. `baseline=true` is short for `baseline.enabled=true`.
    """

    # measure them, for overlap_efficiency and compute_slowdown
    enabled: bool = False
    # steps of each of the two; warm-up among them as in training: telemetry.warmup_steps, at most half
    steps: int = 20


@dataclass
class Clock:
    """Clock anchors in the record."""

    # steps between two readings of REALTIME, BOOTTIME and MONOTONIC
    anchor_interval: int = 100


@dataclass
class Workload:
    """Base of the workload group."""

    # which workload
    name: str = MISSING


@dataclass
class Ranking(Workload):
    """A ranking transformer on synthetic features: dense and categorical inputs, an encoder, a scorer."""

    name: str = "ranking"
    # width of the encoder
    model_dim: int = 128
    # attention heads
    num_heads: int = 4
    # encoder layers
    num_layers: int = 4
    # width of the feed-forward part
    mlp_hidden_dim: int = 512
    # rows of the embedding table shared by the categorical features
    vocab_size: int = 4_000
    # width of one embedding before it is projected to the encoder's width
    embedding_dim: int = 64
    # categorical features of an item
    categorical_features: int = 8
    # dense features of an item
    dense_features: int = 16
    # dropout inside the encoder
    dropout: float = 0.1


@dataclass
class Parallel:
    """Base of the parallel group."""

    # which strategy
    strategy: str = MISSING


@dataclass
class NoParallel(Parallel):
    """Every rank trains its own copy; no gradient is exchanged."""

    strategy: str = "none"


@dataclass
class DDP(Parallel):
    """DistributedDataParallel."""

    strategy: str = "ddp"
    # all-reduce buckets during backward; false = the same buckets after backward
    overlap: bool = True
    # size of a gradient bucket in MiB; null = an eighth of the gradients, at most 25 (torch's own default)
    bucket_cap_mb: float | None = None
    # gradients are views into the buckets
    gradient_as_bucket_view: bool = True
    # search for parameters without a gradient
    find_unused_parameters: bool = False


@dataclass
class FSDP1(Parallel):
    """FSDP1, `FullyShardedDataParallel` round every block."""

    strategy: str = "fsdp1"
    # prefetch and overlap; false = no prefetch, and every collective is waited for before computing on
    overlap: bool = True
    # gather the next block's parameters before the current one computes in forward
    forward_prefetch: bool = True
    # when the next block's parameters are gathered in backward
    backward_prefetch: BackwardPrefetch = BackwardPrefetch.backward_pre
    # let at most two all-gathers be under way, to bound memory
    limit_all_gathers: bool = True
    # keep the block's own parameters visible; torch.compile needs it
    use_orig_params: bool = True
    # what is sharded
    sharding_strategy: Sharding = Sharding.full_shard
    # type in which gradients are reduced; null = that of the parameters in use
    reduce_dtype: DType | None = None


@dataclass
class FSDP(Parallel):
    """FSDP2, `fully_shard` on every block."""

    strategy: str = "fsdp"
    # prefetch and overlap; false = no prefetch, and every collective is waited for before computing on
    overlap: bool = True
    # blocks gathered ahead in forward (0 = none)
    forward_prefetch: int = 1
    # blocks gathered ahead in backward (0 = none)
    backward_prefetch: int = 1
    # free gathered parameters after forward and gather them again in backward
    reshard_after_forward: bool = True
    # type in which gradients are reduced; null = that of the parameters in use
    reduce_dtype: DType | None = None


@dataclass
class HSDP(FSDP):
    """Hybrid sharding: FSDP2 within groups of ranks, an all-reduce of the shards' gradients between the groups."""

    strategy: str = "hsdp"
    # copies of the model; each is sharded over world size / replicas ranks
    replicas: int = 2


@dataclass
class TP(Parallel):
    """Tensor parallelism: all ranks compute every encoder layer together, on the same samples. Its collectives stand
    between two layers of a block and are waited for at once, so there is nothing to overlap them with.
    """

    strategy: str = "tp"


@dataclass
class FSDPTP(FSDP):
    """Tensor parallelism within groups of ranks, FSDP2 between the groups."""

    strategy: str = "fsdp_tp"
    # ranks that compute a layer together; the world is a multiple of it
    tp_size: int = 2


@dataclass
class Profiling:
    """A torch.profiler window, beside the record and never a condition of it."""

    # capture a trace
    enabled: bool = False
    # steps of a cycle that are left alone
    wait: int = 1
    # steps of a cycle that are profiled and thrown away
    warmup: int = 1
    # steps of a cycle that are kept
    active: int = 2
    # cycles; 0 = for ever
    repeat: int = 1
    # shapes of inputs
    record_shapes: bool = True
    # allocations
    profile_memory: bool = True
    # Python stacks
    with_stack: bool = False
    # estimated FLOPs
    with_flops: bool = False
    # one file a cycle under torch_profiler/rank<r>/, as TensorBoard and Perfetto read it
    tensorboard: bool = True
    # also a Chrome trace named trace_filename; off on ROCm unless forced
    chrome_trace: bool = False
    # write Chrome traces on ROCm as well
    chrome_trace_force: bool = False
    # name of the Chrome trace; several steps or cycles add _step<N>
    trace_filename: str = "trace.json"


@dataclass
class Fabric:
    """The network between ranks."""

    # none = the real one
    kind: str = "none"


@dataclass
class EmulatedFabric(Fabric):
    """A slower or larger network than the real one: collectives complete when it would have completed them."""

    kind: str = "emulated"
    # microseconds one message takes between two ranks of a node, before its first byte
    intra_latency_us: float = 25.0
    # GB/s (1e9 bytes a second) a rank sends at within a node
    intra_bandwidth_gb_per_s: float = 1.25
    # the same between nodes; a group that spans nodes uses these two
    inter_latency_us: float = 50.0
    # GB/s a rank sends at between nodes
    inter_bandwidth_gb_per_s: float = 0.125
    # consecutive ranks that make one emulated node
    ranks_per_node: int = 1
    # times are those of a ring or of a tree
    algorithm: Algorithm = Algorithm.ring
    # groups of all ranks get the times of a world of this size; smaller groups keep their own; null = the real size
    emulated_world_size: int | None = None
    # each collective takes up to this part more or less, the same on every rank; 0 = always the same
    jitter: float = 0.0
    # seed of the jitter
    seed: int = 42
    # rank that is late to every collective; null = none
    straggler_rank: int | None = None
    # milliseconds by which it is late
    straggler_ms: float = 0.0


@dataclass
class Telemetry:
    """What the record holds beside timings."""

    # first steps that the report leaves out (at most half of the run)
    warmup_steps: int = 5
    # sample rocm-smi in the background (AMD devices only)
    rocm_smi: bool = False
    # seconds between two samples
    rocm_smi_interval_s: float = 1.0
    # sample even where no AMD device was found
    force: bool = False


@dataclass
class Config:
    """What belongs to no section."""

    # name of the run; its files go to <output_dir>/<label>/
    label: str | None = None
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    scheduler: Scheduler = field(default_factory=Scheduler)
    dataset: Dataset = field(default_factory=Dataset)
    dataloader: Dataloader = field(default_factory=Dataloader)
    compile: Compile = field(default_factory=Compile)
    instrument: Instrument = field(default_factory=Instrument)
    baseline: Baseline = field(default_factory=Baseline)
    clock: Clock = field(default_factory=Clock)
    workload: Workload = MISSING
    parallel: Parallel = MISSING
    profiling: Profiling = MISSING
    fabric: Fabric = MISSING
    telemetry: Telemetry = MISSING


GROUPS: dict[str, dict[str, type[Any]]] = {
    "workload": {"ranking": Ranking},
    "parallel": {
        "none": NoParallel,
        "ddp": DDP,
        "fsdp1": FSDP1,
        "fsdp": FSDP,
        "hsdp": HSDP,
        "tp": TP,
        "fsdp_tp": FSDPTP,
    },
    "profiling": {"aorta": Profiling},
    "fabric": {"none": Fabric, "emulated": EmulatedFabric},
    "telemetry": {"default": Telemetry},
}
"""Config group -> option -> its schema. Every option has a file `config/<group>/<option>.yaml`."""

NAMES = ("workload.name", "parallel.strategy", "fabric.kind")
"""Keys that repeat the option chosen: the record cites them, nobody sets them."""


def register() -> None:
    """Hand the schemas to Hydra: `base_config`, and `<group>/base_<option>` for every option."""
    store = ConfigStore.instance()
    store.store(name="base_config", node=Config)
    for group, options in GROUPS.items():
        for option, node in options.items():
            store.store(group=group, name=f"base_{option}", node=node)
