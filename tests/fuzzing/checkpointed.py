"""A small model with checkpoints, in a process group of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from aorta.runner.checkpoint import Checkpoints


@contextmanager
def checkpointed(folder: Path) -> Iterator[tuple[Checkpoints, nn.Module]]:
    """Its checkpoints in `folder`, and the model."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(module.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _step: 1.0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        yield Checkpoints(folder, module, optimizer, schedule, torch.amp.GradScaler("cpu", enabled=False)), module
    finally:
        dist.destroy_process_group()
