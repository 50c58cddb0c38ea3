"""Finds what an optimizer trains, where nobody has said it.

Must not import torch before it is asked, or keep a module alive.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


def wrapped(model: nn.Module | None) -> Iterator[nn.Module]:
    """Yield a model, and what it wraps: that of DistributedDataParallel, that of `torch.compile`."""
    while model is not None:
        yield model
        inner = model._modules.get("module")  # asked for None, as a module without len() has no truth
        model = model._modules.get("_orig_mod") if inner is None else inner


def trained_models(optimizer: Optimizer) -> list[nn.Module]:
    """Return the outermost modules that hold parameters of any optimizer. Where none does, as an optimizer of flat
    partitions (DeepSpeed's) has parameters of its own: those that can be trained.
    """
    import torch

    alive = [thing for thing in gc.get_objects() if issubclass(type(thing), (torch.nn.Module, torch.optim.Optimizer))]
    groups = [group for thing in (*alive, optimizer) for group in getattr(thing, "param_groups", ())]
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    modules = [thing for thing in alive if isinstance(thing, torch.nn.Module) and "_modules" in thing.__dict__]
    inner = {id(child) for module in modules for child in module._modules.values()}
    outermost = [module for module in modules if id(module) not in inner]
    holding = [thing for thing in outermost if any(id(parameter) in trained for parameter in thing.parameters())]
    return holding or [
        thing for thing in outermost if thing.training and any(p.requires_grad for p in thing.parameters())
    ]


def steps_made(optimizer: Optimizer) -> int | None:
    """Return how many steps an optimizer has made, those before a resume too; None where it does not count them."""
    counts = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
    return int(max(counts)) or None if counts else None
