"""`parallel=...`: how the model is distributed over ranks."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from aorta.config.groups.choices import BackwardPrefetch, DType, Sharding


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
class EP(DDP):
    """Expert parallelism: the experts of a layer are split over all ranks, and tokens go to them and back by
    all-to-all; the rest of the model is DistributedDataParallel's. What computes waits for each all-to-all at once;
    `overlap` and the other fields are about DistributedDataParallel's all-reduces.
    """

    strategy: str = "ep"


@dataclass
class CP(DDP):
    """Context parallelism: each rank has a part of every sequence, and attention gathers the keys and values of all;
    the model is DistributedDataParallel's. What computes waits at once for each all-gather, and in backward for each
    reduce-scatter; `overlap` and the other fields are about DistributedDataParallel's all-reduces.
    """

    strategy: str = "cp"


@dataclass
class FSDPCP(FSDP):
    """Context parallelism within groups of ranks, FSDP2 over all ranks."""

    strategy: str = "fsdp_cp"
    # ranks that share a sequence; the world is a multiple of it
    cp_size: int = 2


@dataclass
class FSDPEP(FSDP):
    """Expert parallelism within groups of ranks, FSDP2 over all of them: the experts of a layer are split over the
    ranks of a group and sharded over the groups, the rest of the model is sharded over all ranks.
    """

    strategy: str = "fsdp_ep"
    # ranks that share the experts of a layer; the world is a multiple of it
    ep_size: int = 2


@dataclass
class PP(Parallel):
    """Pipeline parallelism: each rank computes some of the layers, on all samples; micro-batches follow each other
    through the ranks.
    """

    strategy: str = "pp"
    # gpipe, 1f1b, interleaved_1f1b, interleaved_zero_bubble or zbv_zero_bubble, as torch.distributed.pipelining runs it
    schedule: str = "1f1b"
    # parts of a batch that follow each other through the pipeline; training.batch_size is a multiple of it
    microbatches: int = 4
    # stages that a rank computes: 1 with gpipe and 1f1b, 2 with zbv_zero_bubble, 2 or more with the interleaved ones
    stages_per_rank: int = 1


@dataclass
class FSDPPP(FSDP, PP):
    """Several pipelines on batches of their own, FSDP2 between the ranks that have the same stages."""

    strategy: str = "fsdp_pp"
    # free gathered parameters after each forward pass of a micro-batch and gather them again; false gathers once a step
    reshard_after_forward: bool = False
    # ranks of one pipeline; the world is a multiple of it
    pp_size: int = 2
