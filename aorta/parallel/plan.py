"""A model and a strategy -> something the training step can run without knowing which strategy it is.

Must not: know the workload beyond its named blocks, or the instrumentation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from aorta.config.schema import DDP, FSDP, Config, NoParallel, Precision
from aorta.errors import ConfigError

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
Blocks = Sequence[tuple[str, nn.Module]]


@dataclass(frozen=True)
class Spread:
    """A model, spread.

    Attributes:
        module: what to call in the forward pass.
        micro_batch: context of one micro-batch, told whether it is the step's last: gradients are reduced then only.
        arithmetic: context of forward and loss (autocast, where the strategy does not cast by itself).
        facts: effective settings, for the manifest.
    """

    module: nn.Module
    micro_batch: Callable[[bool], AbstractContextManager[Any]] = lambda _last: nullcontext()
    arithmetic: Callable[[], AbstractContextManager[Any]] = nullcontext
    facts: dict[str, Any] = field(default_factory=dict)


def spread(model: nn.Module, blocks: Blocks, config: Config, device: torch.device) -> Spread:
    """Spread `model` as `config.parallel` says; needs an initialised process group.

    Args:
        blocks: the parts that are sharded one by one, in the order they run.
    """
    # Imported here: each strategy imports the types above.
    from aorta.parallel import ddp, fsdp

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


def autocast(precision: Precision, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """The autocast context of a precision; none for `none`."""
    if precision is Precision.none:
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=DTYPES[precision.value])
