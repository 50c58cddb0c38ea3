"""What several groups share: enums of allowed values, and the rule of single numbers."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any


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


def at_least(minimum: int, values: dict[str, Any]) -> Iterator[str]:
    """Yield a message for every value below `minimum`; None is accepted."""
    for key, value in values.items():
        if value is not None and not value >= minimum:
            yield f"{key}={value}: must be at least {minimum}"
