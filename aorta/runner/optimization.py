"""Optimizer, learning rate, loss scaling and clipping.

Must not know any strategy: what differs between strategies is in their `ParallelizedModel`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from aorta.config.schema import Config, Precision
from aorta.parallel.plan import ParallelizedModel, mesh_of, whole_norm
from aorta.workload.task import Task


def make_optimizer(parameters: Iterable[nn.Parameter], task: Task) -> torch.optim.Optimizer:
    """The workload's optimizer for parameters that may be distributed over ranks."""
    # One group per mesh: the multi-tensor update of accelerators accepts no list that mixes them.
    groups: list[dict[str, Any]] = [{"params": group} for group in by_mesh(parameters)]
    return task.optimizer(groups)


def make_schedule(optimizer: torch.optim.Optimizer, config: Config) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up to the peak over `warmup_steps`, then linear decay that reaches 0 at `total_steps`; no decay
    where that is null.
    """
    warmup, total = config.scheduler.warmup_steps, config.scheduler.total_steps

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if total is None:
            return 1.0
        return max(0.0, (total - step) / max(total - warmup, 1))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def make_scaler(model: ParallelizedModel, config: Config, device: torch.device) -> torch.amp.GradScaler:
    """Loss scaling for fp16; a no-op for the other precisions."""
    return model.scaler(device.type, enabled=config.training.mixed_precision is Precision.fp16)


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters grouped for multi-tensor operations: one group per mesh, and one for those on no mesh."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(mesh_of(parameter), []).append(parameter)
    return list(groups.values())


def clip(module: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale the gradients of `module` to a global norm of at most `max_norm`; returns the norm before.

    Gradients that are sharded on a mesh add one all-reduce over each of its dimensions; those on no mesh are whole on
    every rank. The global norm is the root of the sum of squares over meshes.
    """
    groups = by_mesh(p for p in module.parameters() if p.grad is not None)
    norms = [whole_norm(nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])) for group in groups]
    norm = nn.utils.get_total_norm(norms) if len(norms) > 1 else norms[0]
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return norm
