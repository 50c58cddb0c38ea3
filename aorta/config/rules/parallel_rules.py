"""Rules of `parallel=...`. How ranks form a mesh is `aorta.config.mesh`.

Must not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from aorta.config.rules.bounds import at_least
from aorta.config.schema import CP, EP, FSDP, FSDP1, FSDPCP, FSDPEP, FSDPTP, PP, TP, Config, Gpt, Moe, Precision


def parallel_rules(config: Config) -> Iterator[str]:
    """One message per broken rule."""
    if isinstance(config.parallel, FSDP):
        yield from _fsdp_rules(config.parallel)
    if isinstance(config.parallel, PP):
        yield from _pipeline_rules(config, config.parallel)
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
    if isinstance(config.parallel, EP | FSDPEP) and config.compile.enabled:
        yield (
            f"compile.enabled=true: torch.compile does not trace the exchange of tokens of parallel="
            f"{config.parallel.strategy}; set it to false, or use parallel=ddp"
        )
    if isinstance(config.parallel, EP | FSDPEP) and not isinstance(config.workload, Moe):
        yield (
            f"parallel={config.parallel.strategy}: workload={config.workload.name} has no experts that ranks could "
            "share; use workload=moe, or parallel=ddp"
        )
    if isinstance(config.parallel, CP | FSDPCP) and not isinstance(config.workload, Gpt):
        yield (
            f"parallel={config.parallel.strategy}: workload={config.workload.name} has no causal attention over "
            "sequences that ranks could share; use workload=gpt or moe, or parallel=ddp"
        )


def _fsdp_rules(parallel: FSDP) -> Iterator[str]:
    yield from at_least(
        0,
        {
            "parallel.forward_prefetch": parallel.forward_prefetch,
            "parallel.backward_prefetch": parallel.backward_prefetch,
        },
    )


_STAGES: Final = {
    "gpipe": (1, 1),
    "1f1b": (1, 1),
    "interleaved_1f1b": (2, math.inf),
    "interleaved_zero_bubble": (2, math.inf),
    "zbv_zero_bubble": (2, 2),
}
"""`parallel.schedule` -> the least and the most stages that a rank may compute."""


def _pipeline_rules(config: Config, parallel: PP) -> Iterator[str]:
    training = config.training
    yield from at_least(1, {"parallel.microbatches": parallel.microbatches})
    if parallel.schedule not in _STAGES:
        yield f"parallel.schedule={parallel.schedule!r}: must be one of {', '.join(_STAGES)}"
    else:
        least, most = _STAGES[parallel.schedule]
        if not least <= parallel.stages_per_rank <= most:
            wanted = str(least) if least == most else f"{least} or more"
            yield (
                f"parallel.stages_per_rank={parallel.stages_per_rank}: parallel.schedule={parallel.schedule} takes "
                f"{wanted}"
            )
    if parallel.microbatches > 0 and training.batch_size % parallel.microbatches:
        yield (
            f"training.batch_size={training.batch_size}: must be a multiple of "
            f"parallel.microbatches={parallel.microbatches}, the parts it is cut into"
        )
    if not hasattr(config.workload, "num_layers"):
        yield (
            f"parallel={parallel.strategy}: workload={config.workload.name} has no layers that can be cut into stages; "
            "use workload=gpt, or parallel=ddp"
        )
    if isinstance(config.workload, Moe):
        yield (
            f"parallel={parallel.strategy}: workload=moe counts and balances the tokens of its experts over whole "
            "batches, which a stage does not see; use workload=gpt, or parallel=ep"
        )
    if training.gradient_accumulation != 1:
        yield (
            f"training.gradient_accumulation={training.gradient_accumulation}: with parallel={parallel.strategy} the "
            "micro-batches of the pipeline are the accumulation; raise training.batch_size and parallel.microbatches "
            "instead"
        )
    if training.mixed_precision is Precision.fp16:
        yield (
            "training.mixed_precision=fp16: torch's gradient scaler looks for overflow on one rank only, so the "
            f"stages of parallel={parallel.strategy} would disagree about a step; use bf16"
        )
    if config.baseline.enabled:
        yield "baseline.enabled=true: a stage cannot compute alone, without what its neighbours send; leave it out"
    if config.compile.enabled and "zero_bubble" in parallel.schedule:
        yield (
            f"compile.enabled=true: parallel.schedule={parallel.schedule} splits backward passes, which torch.compile "
            "does not allow; use parallel.schedule=1f1b"
        )
