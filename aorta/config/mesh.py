"""The layout of ranks under each parallel strategy: which of them share a batch, and whether the world size fits.

Must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from aorta.config.groups.workload import SIZES, dimensions_of
from aorta.config.schema import (
    CP,
    EP,
    FSDPCP,
    FSDPEP,
    FSDPPP,
    FSDPTP,
    HSDP,
    PP,
    TP,
    Config,
    Gpt,
    Moe,
    Ranking,
    Workload,
)


def data_parallel_size(config: Config, world_size: int) -> int:
    """Return how many different batches are trained on at once: ranks that compute one together share it."""
    match config.parallel:
        case FSDPPP(pp_size=pp_size):
            return world_size // pp_size
        case TP() | PP() | CP():
            return 1
        case FSDPTP(tp_size=tp_size):
            return world_size // tp_size
        case FSDPCP(cp_size=cp_size):
            return world_size // cp_size
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
    place = rank // (world_size // ranks)
    if parallel.schedule == "zbv_zero_bubble":
        return [place, 2 * ranks - 1 - place]
    return [place + turn * ranks for turn in range(parallel.stages_per_rank)]


def mesh_rules(config: Config, world_size: int) -> Iterator[str]:
    """Yield one message per broken rule: the ranks must fill the mesh, and the layers must divide into as many parts as
    it has.
    """
    parallel = config.parallel
    match parallel:
        case EP():
            yield from _expert_rules(config.workload, parallel.strategy, world_size)
            return
        case FSDPEP(ep_size=parts):
            key, what = "parallel.ep_size", "groups that share the experts"
        case HSDP(replicas=parts):
            key, what = "parallel.replicas", "copies of the model of equal size"
        case FSDPTP(tp_size=parts):
            key, what = "parallel.tp_size", "groups that compute a layer together"
        case FSDPCP(cp_size=parts):
            key, what = "parallel.cp_size", "groups that share sequences"
        case CP():
            key, what, parts = "parallel=cp", "", world_size
        case TP():
            key, what, parts = "parallel=tp", "", world_size
        case FSDPPP(pp_size=parts):
            key, what = "parallel.pp_size", "pipelines of equal length"
        case PP():
            yield from _pipeline_rules(config, parallel, world_size)
            return
        case _:
            return
    if parts < 1:
        yield f"{key}={parts}: must be at least 1"
        return
    if world_size % parts:
        yield (
            f"{key}={parts}: {world_size} rank(s) cannot form {what}; start a multiple of {parts} ranks "
            f"(torchrun --nproc_per_node), or set {key} to a divisor of {world_size}"
        )
        return
    if isinstance(parallel, CP | FSDPCP) and isinstance(config.workload, Gpt):
        length = config.dataset.sequence_length
        if length % (2 * parts):
            yield (
                f"dataset.sequence_length={length}: {parts} ranks share each sequence (parallel={parallel.strategy}), "
                f"with two chunks each and all of one length, so it must be a multiple of {2 * parts}"
            )
    if isinstance(parallel, FSDPEP):
        yield from _expert_rules(config.workload, parallel.strategy, parts)
    if isinstance(parallel, FSDPPP):
        yield from _pipeline_rules(config, parallel, parts)
    if isinstance(parallel, TP | FSDPTP):
        for name, what, value in _split_by_tensor_parallelism(config.workload):
            if value % parts:
                yield (
                    f"workload.{name}={value}: {parts} ranks compute a layer together "
                    f"(parallel={parallel.strategy}), so the {what} must be a multiple of {parts}"
                )


def _pipeline_rules(config: Config, parallel: PP, ranks: int) -> Iterator[str]:
    stages = ranks * max(parallel.stages_per_rank, 1)
    layers = _layers(config.workload)
    if layers is not None and layers < stages:
        yield (
            f"workload.num_layers={layers}: {ranks} rank(s) with parallel.stages_per_rank="
            f"{parallel.stages_per_rank} make {stages} stages, and each needs a layer; use {stages} layers or more, "
            "or fewer ranks"
        )
    if parallel.schedule == "1f1b" and parallel.microbatches < ranks:
        yield (
            f"parallel.microbatches={parallel.microbatches}: parallel.schedule=1f1b needs as many micro-batches as "
            f"stages ({ranks}) or more; raise it, or use parallel.schedule=gpipe"
        )
    if "interleaved" in parallel.schedule and parallel.microbatches % max(parallel.microbatches // ranks, 1):
        yield (
            f"parallel.microbatches={parallel.microbatches}: parallel.schedule={parallel.schedule} runs them in rounds "
            f"of one for each of the {ranks} ranks; use a multiple of {ranks}"
        )


def _split_by_tensor_parallelism(workload: Workload) -> Iterator[tuple[str, str, int]]:
    """Yield the name, meaning and value of each dimension that has to divide into as many parts as there are ranks."""
    match workload:
        case Ranking() as shape:
            yield "num_heads", "attention heads", shape.num_heads
            yield "mlp_hidden_dim", "hidden units", shape.mlp_hidden_dim
        case Gpt() if workload.size in SIZES:
            dims = dimensions_of(workload)
            yield "num_heads", "attention heads", dims.num_heads
            yield "num_kv_heads", "heads of keys and values", dims.num_kv_heads
            if not isinstance(workload, Moe) or workload.expert_interval > 1:  # experts are not split by hidden units
                yield "mlp_hidden_dim", "hidden units", dims.mlp_hidden_dim


def _expert_rules(workload: Workload, strategy: str, parts: int) -> Iterator[str]:
    if isinstance(workload, Moe) and workload.num_experts % parts:
        yield (
            f"workload.num_experts={workload.num_experts}: {parts} ranks share the experts (parallel={strategy}), so "
            f"their number must be a multiple of {parts}"
        )


def _layers(workload: Workload) -> int | None:
    """Return how many layers there are to cut into stages; None where a rule of the workload refuses it anyway."""
    match workload:
        case Ranking() as shape:
            return shape.num_layers
        case Gpt() if workload.size in SIZES:
            return dimensions_of(workload).num_layers
        case _:
            return None
