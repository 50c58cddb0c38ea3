"""Selects the parallel strategy that a configuration names, and loads it: torch takes a second for those not chosen.

Must not know the details of any strategy.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from aorta.config.schema import CP, DDP, EP, FSDP, FSDP1, PP, TP, Config, NoParallel
from aorta.errors import ConfigError
from aorta.parallel.plan import Blocks, ParallelizedModel, Parts, autocast


def parallelize(
    model: nn.Module,
    blocks: Blocks,
    parts: Iterable[Parts],
    experts: Iterable[nn.Module],
    attentions: Iterable[nn.Module],
    config: Config,
    device: torch.device,
) -> ParallelizedModel:
    """Distribute `model` as `config.parallel` says; needs an initialised process group.

    Args:
        blocks: the modules that are sharded one by one, in the order they run.
        parts: the modules that several ranks can compute together, each with its layers.
        experts: the modules whose parameters count experts in their first dimension.
        attentions: the modules that look at other positions of a sequence than their own.
    """
    precision = config.training.mixed_precision
    match config.parallel:
        case EP() as settings:
            from aorta.parallel import expert

            return expert.parallelize(model, experts, settings, precision, device)
        case CP() as settings:
            from aorta.parallel import context

            return context.parallelize(model, attentions, settings, precision, device)
        case DDP() as settings:
            from aorta.parallel import ddp

            return ddp.parallelize(model, settings, precision, device)
        case FSDP1() as settings:
            from aorta.parallel import fsdp1

            return fsdp1.parallelize(model, blocks, settings, precision, device)
        case FSDP() | TP() as settings:
            from aorta.parallel import meshes

            return meshes.parallelize(model, blocks, parts, experts, attentions, settings, precision, device)
        case PP() as settings:
            from aorta.parallel import pipeline

            assert dist.group.WORLD is not None
            return pipeline.parallelize(model, settings, autocast(precision, device), device, dist.group.WORLD)
        case NoParallel():
            return ParallelizedModel(model, arithmetic=autocast(precision, device))
        case other:
            raise ConfigError(f"parallel={other.strategy!r}: no such strategy")
