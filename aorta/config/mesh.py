"""The layout of ranks under each parallel strategy: which of them share a batch, and whether the world size fits.

Must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from aorta.config.decoder_sizes import SIZES, dimensions_of
from aorta.config.schema import EP, FSDPTP, HSDP, TP, Config, Gpt, Moe, Ranking, Workload


def data_parallel_size(config: Config, world_size: int) -> int:
    """How many different batches are trained on at once: ranks that compute a layer together share one."""
    match config.parallel:
        case TP():
            return 1
        case FSDPTP(tp_size=tp_size):
            return world_size // tp_size
        case _:
            return world_size


def mesh_rules(config: Config, world_size: int) -> Iterator[str]:
    """One message per broken rule: the ranks must fill the mesh, and the layers must divide into as many parts as it
    has.
    """
    parallel = config.parallel
    match parallel:
        case EP():
            yield from _expert_rules(config.workload, world_size)
            return
        case HSDP(replicas=parts):
            key, what = "parallel.replicas", "copies of the model of equal size"
        case FSDPTP(tp_size=parts):
            key, what = "parallel.tp_size", "groups that compute a layer together"
        case TP():
            key, what, parts = "parallel=tp", "", world_size
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
    if isinstance(parallel, TP | FSDPTP):
        for name, what, value in _split_by_tensor_parallelism(config.workload):
            if value % parts:
                yield (
                    f"workload.{name}={value}: {parts} ranks compute a layer together "
                    f"(parallel={parallel.strategy}), so the {what} must be a multiple of {parts}"
                )


def _split_by_tensor_parallelism(workload: Workload) -> Iterator[tuple[str, str, int]]:
    """Name, meaning and value of each dimension that has to divide into as many parts as there are ranks."""
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


def _expert_rules(workload: Workload, parts: int) -> Iterator[str]:
    if isinstance(workload, Moe) and workload.num_experts % parts:
        yield (
            f"workload.num_experts={workload.num_experts}: {parts} ranks share the experts (parallel=ep), so their "
            f"number must be a multiple of {parts}"
        )
