"""Which strategy a configuration asks for."""

from __future__ import annotations

import torch
from torch import nn

from aorta.config.schema import DDP, FSDP, Config, NoParallel
from aorta.errors import ConfigError
from aorta.parallel import ddp, fsdp
from aorta.parallel.plan import Blocks, Spread, autocast


def spread(model: nn.Module, blocks: Blocks, config: Config, device: torch.device) -> Spread:
    """Spread `model` as `config.parallel` says; needs an initialised process group.

    Args:
        blocks: the parts that are sharded one by one, in the order they run.
    """
    precision = config.training.mixed_precision
    match config.parallel:
        case DDP() as settings:
            return ddp.spread(model, settings, precision, device)
        case FSDP() as settings:
            return fsdp.spread(model, blocks, settings, precision, device)
        case NoParallel():
            return Spread(model, arithmetic=autocast(precision, device))
        case other:
            raise ConfigError(f"parallel={other.strategy!r}: no such strategy")
