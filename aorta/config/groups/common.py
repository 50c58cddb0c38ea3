"""What several groups share: enums of allowed values, and the rule of single numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Final


class Precision(Enum):
    """Arithmetic of the forward and backward pass; parameters and optimizer state stay in float32."""

    bf16 = "bf16"
    fp16 = "fp16"
    none = "none"


class Wording(Enum):
    """Style of progress lines: overlap, or that of a profiling tutorial, which also says when each rank starts and
    ends.
    """

    overlap = "overlap"
    tutorial = "tutorial"


class Mode(Enum):
    """How collectives are observed (docs/dev/measuring.md, R2 and R3)."""

    dedicated = "dedicated"
    observe = "observe"
    off = "off"


class Algorithm(Enum):
    """The algorithm of a collective: around a ring, or in about log2(n) rounds."""

    ring = "ring"
    tree = "tree"


class Sharing(Enum):
    """Whether each process group has a link of its own, or those of a rank take turns on its links."""

    group = "group"
    link = "link"


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


_HOLDS: Final[Mapping[str, Callable[[float], bool]]] = {
    "must be at least 1": lambda value: value >= 1,
    "must be at least 0": lambda value: value >= 0,
    "must be greater than 0 and finite": lambda value: 0 < value < math.inf,
    "must be at least 0 and finite": lambda value: 0 <= value < math.inf,
    "must be in [0, 1)": lambda value: 0 <= value < 1,
}
"""What a rule says -> whether a number keeps it; a NaN keeps none."""
NUMBERS: Final[Mapping[str, tuple[str, ...]]] = {
    "must be at least 1": (
        *("training.epochs", "training.max_steps", "training.batch_size", "training.gradient_accumulation"),
        *(
            "training.log_interval",
            "training.ranks_per_device",
            "training.checkpoint_interval",
            "telemetry.logger_interval",
        ),
        *("scheduler.total_steps", "dataset.num_samples", "dataset.sequence_length", "baseline.steps"),
        *("clock.anchor_interval", "clock.sync_samples", "fabric.ranks_per_node", "parallel.microbatches"),
        *("workload.model_dim", "workload.num_heads", "workload.num_kv_heads", "workload.num_layers"),
        *("workload.mlp_hidden_dim", "workload.vocab_size", "workload.embedding_dim", "workload.categorical_features"),
        *("workload.dense_features", "workload.num_experts", "workload.top_k", "workload.expert_interval"),
        *("workload.image_size", "workload.num_worker_threads", "workload.windows", "workload.calls"),
        *("workload.tensor_size", "workload.matrix_size", "workload.transfer_bytes", "workload.repeats"),
        *("profiling.active", "profiling.period"),
    ),
    "must be at least 0": (
        *("training.start_step", "training.seed", "dataset.seed", "scheduler.warmup_steps", "dataloader.num_workers"),
        *("telemetry.warmup_steps", "optimizer.weight_decay", "parallel.forward_prefetch"),
        *("parallel.backward_prefetch", "fabric.slow_min_bytes", "fabric.slow_max_bytes", "profiling.wait"),
        *("profiling.warmup", "profiling.repeat", "profiling.skip_first", "profiling.summary_rows"),
    ),
    "must be greater than 0 and finite": (
        *("training.timeout_s", "training.grad_clip_norm", "optimizer.lr", "optimizer.eps", "workload.timeout_s"),
        *("telemetry.device_interval_s", "parallel.bucket_cap_mb", "watchdog.grace_s", "workload.capacity_factor"),
        *("fabric.intra_bandwidth_gb_per_s", "fabric.inter_bandwidth_gb_per_s", "profiling.upload_wait_s"),
    ),
    "must be greater than 0 and finite; 1 changes nothing": ("fabric.slow_factor",),
    "must be greater than 0 and finite; null measures it": ("instrument.stall_cutoff_us",),
    "must be at least 0 and finite": (
        *("fabric.intra_latency_us", "fabric.inter_latency_us", "fabric.straggler_ms", "workload.balance_weight"),
    ),
    "must be at least 0 and finite; null learns it, 0 is off": ("watchdog.timeout_s",),
    "must be in [0, 1)": ("workload.dropout", "workload.knee_tolerance", "fabric.jitter"),
}
"""What single numbers must be -> their keys."""


def number_rules(section: str, node: object) -> Iterator[str]:
    """Yield a message for each number of a section that breaks its rule in `NUMBERS`; null is allowed by all."""
    for words, keys in NUMBERS.items():
        holds = _HOLDS[words.partition(";")[0]]
        for key in keys:
            value = getattr(node, key.partition(".")[2], None) if key.startswith(f"{section}.") else None
            if isinstance(value, int | float) and not holds(value):
                yield f"{key}={value}: {words}"
