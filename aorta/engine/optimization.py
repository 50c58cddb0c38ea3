"""Optimizer, learning rate, loss scaling and clipping."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from aorta.config.schema import Config, Precision


def make_optimizer(parameters: Iterable[nn.Parameter], config: Config) -> torch.optim.AdamW:
    """AdamW with the configured rates."""
    settings = config.optimizer
    return torch.optim.AdamW(
        parameters, lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
    )


def make_schedule(optimizer: torch.optim.Optimizer, config: Config) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up to the peak over `warmup_steps`, then linear decay that reaches 0 at `total_steps`."""
    warmup, total = config.scheduler.warmup_steps, config.scheduler.total_steps

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return max(0.0, (total - step) / max(total - warmup, 1))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def make_scaler(config: Config, device: torch.device) -> torch.amp.GradScaler:
    """Loss scaling for fp16; passes everything through for the other precisions."""
    return torch.amp.GradScaler(device.type, enabled=config.training.mixed_precision is Precision.fp16)


def clip(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale gradients to a global norm of at most `max_norm`; returns the norm before.

    With sharded gradients the norm is one all-reduce over the ranks.
    """
    kept = [p for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in kept if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    nn.utils.clip_grads_with_norm_(kept, max_norm, norm)
    return norm
