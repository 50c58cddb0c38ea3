"""Saves and restores the training state around steps that must leave no trace.

Values are restored tensor by tensor, in place: strategies hold views of them. Must not communicate, or keep a copy on
an accelerator, whose memory use must stay that of training.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from aorta.distributed.accelerator import random_states, set_random_states
from aorta.parallel.plan import local_part


@contextmanager
def put_back(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LambdaLR,
    scaler: torch.amp.GradScaler,
) -> Iterator[None]:
    """For a `with` block between two steps: restores parameters, buffers, optimizer, schedule, scaler and random
    states on exit, and clears gradients. An error leaves everything as it is: the run ends anyway.
    """
    tensors = [_local(tensor) for tensor in (*module.parameters(), *module.buffers())]
    saved = [_copy(tensor) for tensor in tensors]
    groups = [
        {key: copy.deepcopy(value) for key, value in g.items() if key != "params"} for g in optimizer.param_groups
    ]
    states = _optimizer_state(optimizer)
    others = copy.deepcopy(schedule.state_dict()), copy.deepcopy(scaler.state_dict())
    device = next(module.parameters()).device
    generators = random.getstate(), random_states(device)
    yield
    with torch.no_grad():
        for tensor, value in zip(tensors, saved, strict=True):
            tensor.copy_(value)
        _restore_optimizer(optimizer, states)
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        group.update(values)
    optimizer.zero_grad(set_to_none=True)
    schedule.load_state_dict(others[0])
    scaler.load_state_dict(others[1])
    random.setstate(generators[0])
    set_random_states(generators[1], device)


def _optimizer_state(optimizer: torch.optim.Optimizer) -> dict[Any, dict[str, Any]]:
    return {
        parameter: {
            key: _copy(_local(value)) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
            for key, value in state.items()
        }
        for parameter, state in optimizer.state.items()
    }


def _restore_optimizer(optimizer: torch.optim.Optimizer, states: dict[Any, dict[str, Any]]) -> None:
    for parameter in list(optimizer.state):
        if parameter not in states:
            del optimizer.state[parameter]  # its first update was inside the block
            continue
        for key, value in states[parameter].items():
            now = optimizer.state[parameter][key]
            if isinstance(now, torch.Tensor):
                _local(now).copy_(value)
            else:
                optimizer.state[parameter][key] = value


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that may be distributed over ranks; shares its memory."""
    with torch.no_grad():
        return local_part(tensor).detach()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True)
