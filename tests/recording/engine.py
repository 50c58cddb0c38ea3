"""Stands for `deepspeed.runtime.engine`: an engine that gathers parameters behind the step of its optimizer."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


class DeepSpeedEngine(nn.Module):
    """Two micro-batches make a step."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.module, self._optimizer, self._micro = module, optimizer, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)

    def zero_optimization_stage(self) -> int:
        return 3

    def is_gradient_accumulation_boundary(self) -> bool:
        return self._micro % 2 == 1

    def step(self) -> None:
        if self.is_gradient_accumulation_boundary():
            for parameter in self.module.parameters():
                dist.all_reduce(parameter.grad)
            self._optimizer.step()
            self._optimizer.zero_grad()
            for parameter in self.module.parameters():
                dist.broadcast(parameter.data, 0)
        self._micro += 1
