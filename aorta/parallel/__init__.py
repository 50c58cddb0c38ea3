"""Distributes a model over ranks, with overlap and without, by the parallel strategy that a configuration names.

A strategy is loaded when it is chosen: torch takes a second for them. Must not know the workload beyond its named
blocks, or the instrumentation.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from aorta.config.schema import CP, DDP, EP, FSDP, FSDP1, PP, TP, Config, NoParallel
from aorta.errors import ConfigError
from aorta.parallel.plan import Blocks, ParallelizedModel, Parts, autocast, replicate


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
            from aorta.parallel import context

            return context.parallelize_experts(model, experts, settings, precision, device)
        case CP() as settings:
            from aorta.parallel import context

            return context.parallelize(model, attentions, settings, precision, device)
        case DDP() as settings:
            return replicate(model, settings, precision, device)
        case FSDP1() as settings:
            from aorta.parallel import fsdp

            return fsdp.parallelize_fsdp1(model, blocks, settings, precision, device)
        case FSDP() | TP() as settings:
            from aorta.parallel import fsdp

            return fsdp.parallelize(model, blocks, parts, experts, attentions, settings, precision, device)
        case PP() as settings:
            from aorta.parallel import pipeline

            assert dist.group.WORLD is not None
            return pipeline.parallelize(model, settings, autocast(precision, device), device, dist.group.WORLD)
        case NoParallel():
            return ParallelizedModel(model, arithmetic=autocast(precision, device))
        case other:
            raise ConfigError(f"parallel={other.strategy!r}: no such strategy")
