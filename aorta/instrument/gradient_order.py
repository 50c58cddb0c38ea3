"""The order in which the gradients of a DDP model become ready, with the bytes and the block of each.

DDP fills its buckets in this order, so with it a replay can cut them anew. It is a property of the model, observed in
one step: hooks on the parameters note it, and are removed when that step has ended. Must not change a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from aorta.records.schema import Gradient


class GradientOrder:
    """Notes gradients from its creation until `take` has them.

    Args:
        model: the DDP model.
        blocks: those that are watched, by name; a parameter belongs to the smallest of them that holds it.
    """

    def __init__(self, model: nn.Module, blocks: Iterable[tuple[str, nn.Module]]) -> None:
        owner: dict[int, str] = {}
        for name, block in sorted(blocks, key=lambda named: -sum(1 for _ in named[1].parameters())):
            owner |= {id(parameter): name for parameter in block.parameters()}
        self._order: dict[int, Gradient] = {}
        self._handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._ready, owner.get(id(parameter), ""))
            )
            for parameter in model.parameters()
            if parameter.requires_grad
        ]

    def take(self) -> list[Gradient]:
        """The gradients since `forget`, in the order of the last backward pass; empty if there were none. Otherwise no
        further ones are noted.
        """
        if self._order:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
        return list(self._order.values())

    def forget(self) -> None:
        """The step was abandoned."""
        self._order.clear()

    def _ready(self, block: str, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None:
            self._order.pop(id(parameter), None)  # with gradient accumulation the last pass counts
            self._order[id(parameter)] = Gradient(block, gradient.numel() * gradient.element_size())
