"""Rules of `parallel=...`. How ranks form a mesh is `aorta.config.mesh`.

Must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from aorta.config.rules.bounds import at_least
from aorta.config.schema import EP, FSDP, FSDP1, FSDPTP, TP, Config, Moe, Precision


def parallel_rules(config: Config) -> Iterator[str]:
    """One message per broken rule."""
    if isinstance(config.parallel, FSDP):
        yield from _fsdp_rules(config.parallel)
    if isinstance(config.parallel, FSDP1) and config.compile.enabled and not config.parallel.use_orig_params:
        yield "parallel.use_orig_params=false: torch.compile cannot trace FSDP1's flat parameters; set it to true"
    if isinstance(config.parallel, FSDP1) and config.training.checkpoint_interval is not None:
        yield (
            f"training.checkpoint_interval={config.training.checkpoint_interval}: torch does not load FSDP1's shards "
            "back; use parallel=fsdp, or set it to null"
        )
    if isinstance(config.parallel, TP | FSDPTP) and config.training.mixed_precision is Precision.fp16:
        yield (
            f"training.mixed_precision=fp16: parallel={config.parallel.strategy} keeps parameters on several meshes, "
            "and torch's gradient scaler looks for overflow on one only, so ranks would disagree about a step; use bf16"
        )
    if isinstance(config.parallel, EP) and config.compile.enabled:
        yield (
            f"compile.enabled=true: torch.compile does not trace the exchange of tokens of parallel="
            f"{config.parallel.strategy}; set it to false, or use parallel=ddp"
        )
    if isinstance(config.parallel, EP) and not isinstance(config.workload, Moe):
        yield (
            f"parallel={config.parallel.strategy}: workload={config.workload.name} has no experts that ranks could "
            "share; use workload=moe, or parallel=ddp"
        )


def _fsdp_rules(parallel: FSDP) -> Iterator[str]:
    yield from at_least(
        0,
        {
            "parallel.forward_prefetch": parallel.forward_prefetch,
            "parallel.backward_prefetch": parallel.backward_prefetch,
        },
    )
