"""`parallel=...`: how the model is distributed over ranks, which of them share a batch, and its rules.

Must not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from omegaconf import MISSING

from aorta.config.loop import DType, Precision
from aorta.config.workload import SIZES, Gpt, Moe, Ranking, Resnet18, dimensions_of

if TYPE_CHECKING:
    from aorta.config.schema import Config


class BackwardPrefetch(Enum):
    """When FSDP1 gathers the next parameters in backward: before or after the current gradients, or not ahead."""

    backward_pre = "backward_pre"
    backward_post = "backward_post"
    none = "none"


class Sharding(Enum):
    """What FSDP1 shards: parameters too, or only gradients and optimizer state once forward has gathered them."""

    full_shard = "full_shard"
    shard_grad_op = "shard_grad_op"


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
    # size of a gradient bucket in MiB; null = an eighth of the gradients, at most 25
    bucket_cap_mb: float | None = None
    # gradients are views into the buckets
    gradient_as_bucket_view: bool = True
    # search for parameters without a gradient
    find_unused_parameters: bool = False


@dataclass
class FSDP1(Parallel):
    """FSDP1, `FullyShardedDataParallel` around every block."""

    strategy: str = "fsdp1"
    # false = no prefetch, and every collective is waited for
    overlap: bool = True
    # gather the next block's parameters before this one computes in forward
    forward_prefetch: bool = True
    # when the next block's parameters are gathered in backward
    backward_prefetch: BackwardPrefetch = BackwardPrefetch.backward_pre
    # at most two all-gathers at a time, to bound memory
    limit_all_gathers: bool = True
    # keep the block's own parameters visible; torch.compile needs it
    use_orig_params: bool = True
    # what is sharded
    sharding_strategy: Sharding = Sharding.full_shard
    # type in which gradients are reduced; null = as the parameters in use
    reduce_dtype: DType | None = None


@dataclass
class FSDP(Parallel):
    """FSDP2, `fully_shard` on every block."""

    strategy: str = "fsdp"
    # false = no prefetch, and every collective is waited for
    overlap: bool = True
    # blocks gathered ahead in forward (0 = none)
    forward_prefetch: int = 1
    # blocks gathered ahead in backward (0 = none)
    backward_prefetch: int = 1
    # free gathered parameters after forward and gather them again in backward
    reshard_after_forward: bool = True
    # type in which gradients are reduced; null = as the parameters in use
    reduce_dtype: DType | None = None


@dataclass
class HSDP(FSDP):
    """FSDP2 within groups of ranks, an all-reduce of the shards' gradients between the groups."""

    strategy: str = "hsdp"
    # copies of the model; divides the world
    replicas: int = 2


@dataclass
class TP(Parallel):
    """Tensor parallelism: all ranks compute every layer together, on the same samples. Its collectives are waited for
    at once and never overlap.
    """

    strategy: str = "tp"


@dataclass
class FSDPTP(FSDP):
    """Tensor parallelism within groups of ranks, FSDP2 between the groups."""

    strategy: str = "fsdp_tp"
    # ranks that compute a layer together; divides the world
    tp_size: int = 2


@dataclass
class EP(DDP):
    """Expert parallelism: the experts of a layer are split over all ranks, and tokens go to them and back by
    all-to-all; the rest of the model, with its keys, is DistributedDataParallel's.
    """

    strategy: str = "ep"


@dataclass
class CP(DDP):
    """Context parallelism: each rank has a part of every sequence, and attention gathers the keys and values of all.
    Gradients, with their keys, are DistributedDataParallel's.
    """

    strategy: str = "cp"


@dataclass
class FSDPCP(FSDP):
    """Context parallelism within groups of ranks, FSDP2 over all ranks."""

    strategy: str = "fsdp_cp"
    # ranks that share a sequence; divides the world
    cp_size: int = 2


@dataclass
class FSDPEP(FSDP):
    """Expert parallelism within groups of ranks: the experts of a layer are split over the ranks of a group, and FSDP2
    shards them over the groups and the rest of the model over all ranks.
    """

    strategy: str = "fsdp_ep"
    # ranks that share the experts of a layer; divides the world
    ep_size: int = 2


@dataclass
class PP(Parallel):
    """Pipeline parallelism: each rank computes some of the layers; micro-batches go through the ranks."""

    strategy: str = "pp"
    # gpipe, 1f1b, interleaved_1f1b, interleaved_zero_bubble or zbv_zero_bubble of torch.distributed.pipelining
    schedule: str = "1f1b"
    # parts of a batch; divides training.batch_size
    microbatches: int = 4
    # stages of a rank: 1 with gpipe and 1f1b, 2 with zbv_zero_bubble, else 2 or more
    stages_per_rank: int = 1


@dataclass
class FSDPPP(FSDP, PP):
    """Several pipelines, each with its own batches; FSDP2 between the ranks that have the same stages."""

    strategy: str = "fsdp_pp"
    # the same after each micro-batch; false = gather once per step
    reshard_after_forward: bool = False
    # ranks of one pipeline; divides the world
    pp_size: int = 2


_STAGES: Final = {
    "gpipe": (1, 1),
    "1f1b": (1, 1),
    "interleaved_1f1b": (2, math.inf),
    "interleaved_zero_bubble": (2, math.inf),
    "zbv_zero_bubble": (2, 2),
}
"""`parallel.schedule` -> the least and the most stages that a rank may compute."""


def parallel_rules(config: Config) -> Iterator[str]:
    """Yield one message per broken rule that does not depend on the number of ranks."""
    parallel, workload, training = config.parallel, config.workload, config.training
    chosen, given = f"parallel={parallel.strategy}", f"workload={workload.name}"
    if isinstance(workload, Resnet18) and not isinstance(parallel, DDP | NoParallel):
        yield f"{chosen}: workload=resnet18 cannot be sharded or split by layers; use parallel=ddp or parallel=none"
    if isinstance(parallel, FSDP1) and config.compile.enabled and not parallel.use_orig_params:
        yield "parallel.use_orig_params=false: torch.compile cannot trace FSDP1's flat parameters; set it to true"
    if isinstance(parallel, FSDP1) and (interval := training.checkpoint_interval) is not None:
        yield f"training.checkpoint_interval={interval}: torch does not load FSDP1's shards back; use parallel=fsdp"
    if isinstance(parallel, TP | FSDPTP | PP) and training.mixed_precision is Precision.fp16:
        yield (
            f"training.mixed_precision=fp16: with {chosen} torch's gradient scaler sees the overflow of some ranks "
            "only, and ranks would disagree about a step; use bf16"
        )
    if isinstance(parallel, EP | FSDPEP) and config.compile.enabled:
        yield f"compile.enabled=true: torch.compile does not trace the exchange of tokens of {chosen}; set it to false"
    if isinstance(parallel, EP | FSDPEP) and not isinstance(workload, Moe):
        yield f"{chosen}: {given} has no experts to share; use workload=moe, or parallel=ddp"
    if isinstance(parallel, CP | FSDPCP) and not isinstance(workload, Gpt):
        yield f"{chosen}: {given} has no causal attention over sequences; use workload=gpt or moe, or parallel=ddp"
    if not isinstance(parallel, PP):
        return
    schedule, least, most = f"parallel.schedule={parallel.schedule}", *_STAGES.get(parallel.schedule, (0, math.inf))
    if parallel.schedule not in _STAGES:
        yield f"parallel.schedule={parallel.schedule!r}: must be one of {', '.join(_STAGES)}"
    if not least <= parallel.stages_per_rank <= most:
        allowed = str(least) if least == most else f"{least} or more"
        yield f"parallel.stages_per_rank={parallel.stages_per_rank}: {schedule} takes {allowed}"
    if parallel.microbatches > 0 and training.batch_size % parallel.microbatches:
        of = f"parallel.microbatches={parallel.microbatches}"
        yield f"training.batch_size={training.batch_size}: must be a multiple of {of}, the parts it is cut into"
    if not hasattr(workload, "num_layers"):
        yield f"{chosen}: {given} has no layers that can be cut into stages; use workload=gpt, or parallel=ddp"
    if isinstance(workload, Moe):
        yield (
            f"{chosen}: workload=moe balances tokens over whole batches, which a stage does not see; use workload=gpt, "
            "or parallel=ep"
        )
    if (accumulation := training.gradient_accumulation) != 1:
        yield (
            f"training.gradient_accumulation={accumulation}: with {chosen} the micro-batches of the pipeline are the "
            "accumulation; raise training.batch_size and parallel.microbatches instead"
        )
    if config.baseline.enabled:
        yield "baseline.enabled=true: a stage cannot compute alone, without what its neighbours send; leave it out"
    if config.compile.enabled and "zero_bubble" in parallel.schedule:
        yield f"compile.enabled=true: torch.compile cannot split the backward pass of {schedule}; use 1f1b"


def data_parallel_size(config: Config, world_size: int) -> int:
    """Return how many different batches are trained on at once: ranks that compute one together share it."""
    match config.parallel:
        case FSDPPP(pp_size=sharing) | FSDPTP(tp_size=sharing) | FSDPCP(cp_size=sharing):
            return world_size // sharing
        case TP() | PP() | CP():
            return 1
        case _:
            return world_size


def pipeline_ranks(parallel: PP, world_size: int) -> int:
    """Return how many ranks one pipeline has."""
    return parallel.pp_size if isinstance(parallel, FSDPPP) else world_size


def pipeline_stages(parallel: PP, rank: int, world_size: int) -> list[int]:
    """Return the stages that a rank computes: of P ranks of a pipeline every Pth; where the schedule is V-shaped the
    second counts from the end. Ranks that follow one another have the same stages of pipelines beside each other.
    """
    ranks = pipeline_ranks(parallel, world_size)
    stage = rank // (world_size // ranks)
    if parallel.schedule == "zbv_zero_bubble":
        return [stage, 2 * ranks - 1 - stage]
    return [stage + turn * ranks for turn in range(parallel.stages_per_rank)]


_SIZES: Final = {
    "ep_size": "groups that share the experts",
    "replicas": "copies of the model of equal size",
    "tp_size": "groups that compute a layer together",
    "cp_size": "groups that share sequences",
    "pp_size": "pipelines of equal length",
}
"""Field that divides the ranks -> what they form."""


def mesh_rules(config: Config, world_size: int) -> Iterator[str]:
    """Yield one message per broken rule: the ranks must fill the mesh, and the layers must divide into as many parts as
    it has.
    """
    parallel, workload, parts = config.parallel, config.workload, world_size
    for name, what in _SIZES.items():
        parts = getattr(parallel, name, parts)
        if parts < 1:  # which the rule of single numbers says
            return
        if world_size % parts:
            yield (
                f"parallel.{name}={parts}: {world_size} rank(s) cannot form {what}; start a multiple of {parts} ranks "
                f"(torchrun --nproc_per_node), or set parallel.{name} to a divisor of {world_size}"
            )
            return
    divided: dict[str, tuple[int, str, int]] = {}  # key -> value, what it must be a multiple of, and that number
    layers = None
    if isinstance(workload, Ranking):
        layers = workload.num_layers
    elif isinstance(workload, Gpt) and workload.size in SIZES:
        layers = dimensions_of(workload).num_layers
    match parallel:
        case CP() | FSDPCP() if isinstance(workload, Gpt):
            why = f"{parts} ranks share sequences, in two chunks each"
            divided["dataset.sequence_length"] = (config.dataset.sequence_length, why, 2 * parts)
        case EP() | FSDPEP() if isinstance(workload, Moe):
            divided["workload.num_experts"] = (workload.num_experts, f"{parts} ranks share the experts", parts)
        case TP() | FSDPTP() if layers is not None:
            dims = dimensions_of(workload) if isinstance(workload, Gpt) else workload
            names = ["num_heads"] + ["num_kv_heads"] * isinstance(workload, Gpt)
            if not isinstance(workload, Moe) or workload.expert_interval > 1:  # experts are not split by hidden units
                names.append("mlp_hidden_dim")
            for name in names:
                why = f"{parts} ranks compute a layer together"
                divided[f"workload.{name}"] = (getattr(dims, name), why, parts)
    for key, (value, why, multiple) in divided.items():
        if value % multiple:
            yield f"{key}={value}: {why} (parallel={parallel.strategy}); must be a multiple of {multiple}"
    if not isinstance(parallel, PP):
        return
    stages, cut = parts * max(parallel.stages_per_rank, 1), parallel.microbatches
    if layers is not None and layers < stages:
        yield (
            f"workload.num_layers={layers}: {parts} rank(s) with parallel.stages_per_rank={parallel.stages_per_rank} "
            f"make {stages} stages of a layer or more; use {stages} layers or more, or fewer ranks"
        )
    if parallel.schedule == "1f1b" and cut < parts:
        yield (
            f"parallel.microbatches={cut}: parallel.schedule=1f1b needs as many micro-batches as stages ({parts}) or "
            "more; raise it, or use parallel.schedule=gpipe"
        )
    if "interleaved" in parallel.schedule and cut % max(cut // parts, 1):
        yield f"parallel.microbatches={cut}: parallel.schedule={parallel.schedule} needs a multiple of {parts} (ranks)"
