"""`workload=...`: what is computed."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from aorta.config.groups.choices import DType, StreamPattern


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
class Resnet18(Workload):
    """ResNet-18 on one random batch, which never changes: images [batch, 3, size, size] -> 1000 numbers, mean squared
    error, SGD without momentum. Trains with `parallel=ddp` or `none`.

    Choosing it also sets `training.batch_size=10`, `training.max_steps=100`, `training.log_interval=10`,
    `training.grad_clip_norm=null`, `training.progress=tutorial`, `optimizer.lr=0.001`, `optimizer.weight_decay=0`,
    `scheduler.warmup_steps=0`, `scheduler.total_steps=null`, `dataset.num_samples=1000000` (samples that count as one
    epoch; none is stored) and `dataset.sequence_length=1`. `workload.batch_size` is another name for
    `training.batch_size`.
    """

    name: str = "resnet18"
    # height and width of the images
    image_size: int = 224
    # type of parameters, buffers, images and targets: bf16 or fp32
    dtype: DType = DType.bf16


@dataclass
class Gpt(Workload):
    """A decoder of language models on synthetic tokens: RMSNorm, rotary positions, causal attention with grouped heads,
    SwiGLU. A size gives every dimension; those that are set replace the size's.
    """

    name: str = "gpt"
    # parameters, about: 10m, 100m, 350m, 1b, 3b or 7b
    size: str = "10m"
    # decoder layers
    num_layers: int | None = None
    # width of the hidden states
    model_dim: int | None = None
    # attention heads
    num_heads: int | None = None
    # heads of keys and values; each serves num_heads / num_kv_heads heads of queries
    num_kv_heads: int | None = None
    # width of the feed-forward part
    mlp_hidden_dim: int | None = None
    # tokens that there are
    vocab_size: int | None = None


@dataclass
class Moe(Gpt):
    """The decoder of `workload=gpt` with a mixture of experts in place of the feed-forward part: a router sends each
    token to `top_k` of `num_experts` experts, each as wide as the feed-forward part would be.
    """

    name: str = "moe"
    # experts in a layer
    num_experts: int = 8
    # experts that a token is sent to
    top_k: int = 2
    # every so many layers one has experts, the last of them; 1 = all
    expert_interval: int = 1
    # room of an expert: this times what a rank's tokens would be with equal shares; more are dropped
    capacity_factor: float = 1.25
    # weight of the load-balancing loss
    balance_weight: float = 0.01
    # for demonstrations: an expert that the router prefers for every token
    hot_expert: int | None = None


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
class CopyOverlap(Workload):
    """Matrix multiplications beside copies, by a kernel and by copy calls (memcpy, which the driver may give to a copy
    engine), of several sizes: the bandwidth that each copy reaches alone and together with them, and what it costs
    them. One process and an accelerator; trains nothing, so `parallel`, `optimizer` and the like have no meaning here.
    """

    name: str = "copy_overlap"
    # bytes of one copy; each is measured
    sizes_bytes: list[int] = field(default_factory=lambda: [65_536, 1_048_576, 16_777_216, 268_435_456])
    # side of the square matrices
    matrix_size: int = 4096
    # multiplications beside which copies run
    multiplications: int = 20
    # measurements of which the median is taken
    repeats: int = 10
    # type of the matrices: fp32, bf16 or fp16
    dtype: DType = DType.bf16


@dataclass
class Streams(Workload):
    """Patterns of kernels on 1 to 64 streams: how many run at once, and how many hardware queues there are. Trains
    nothing, and needs a CUDA or HIP device; `parallel`, `optimizer` and the like have no meaning here.
    """

    name: str = "streams"
    # numbers of streams that each pattern is run on, from 1 to 64
    streams: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64])
    # which patterns; none: all (docs/streams.md lists them)
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
