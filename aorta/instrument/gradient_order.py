"""The order in which the gradients of a DDP model become ready: the bytes and the block of each, and when.

DDP fills its buckets in this order, so with it a replay can cut them anew. It is a property of the model, observed in
one step: hooks on the parameters note it, and are removed when that step has ended. Must not change a gradient.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from aorta.records.schema import Gradient


class ReadyGradient(NamedTuple):
    """The gradients of one parameter of a block. `at_ns`: when the host had them; None on a device, where they are
    ready some time later.
    """

    block: str
    bytes: int
    at_ns: int | None


def gradient_rows(noted: Iterable[ReadyGradient], compute: Iterable[tuple[str, str, int, int]]) -> list[Gradient]:
    """Return the rows of the record.

    Args:
        compute: ranges of the step: block, phase, begin and end, on the clock of `noted`. A block counts with its last
            backward range, as gradients do that are accumulated.
    """
    ranges = {block: (low, high) for block, phase, low, high in compute if phase == "backward"}

    def part(one: ReadyGradient) -> float | None:
        low, high = ranges.get(one.block, (0, 0))
        if one.at_ns is None or low >= high:
            return None
        return round(min(max((one.at_ns - low) / (high - low), 0.0), 1.0), 4)

    return [Gradient(one.block, one.bytes, part(one)) for one in noted]


class GradientOrder:
    """Records once the order in which gradients become ready, from its creation until `take` returns it.

    Args:
        model: the DDP model.
        blocks: those that are watched, by name; a parameter belongs to the smallest of them that holds it.
        on_device: whether a device computes the gradients.
    """

    def __init__(self, model: nn.Module, blocks: Iterable[tuple[str, nn.Module]], *, on_device: bool) -> None:
        self._on_device = on_device
        owner: dict[int, str] = {}
        for name, block in sorted(blocks, key=lambda named: -sum(1 for _ in named[1].parameters())):
            owner |= {id(parameter): name for parameter in block.parameters()}
        self._order: dict[int, ReadyGradient] = {}
        self._handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._ready, owner.get(id(parameter), ""))
            )
            for parameter in model.parameters()
            if parameter.requires_grad
        ]

    def take(self) -> list[ReadyGradient]:
        """Return the gradients since `forget`, in the order of the last backward pass; empty if there were none.
        Otherwise no further ones are noted.
        """
        if self._order:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
        return list(self._order.values())

    def forget(self) -> None:
        """Discard what an abandoned step recorded."""
        self._order.clear()

    def _ready(self, block: str, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None:
            self._order.pop(id(parameter), None)  # with gradient accumulation the last pass counts
            size_bytes = gradient.numel() * gradient.element_size()
            self._order[id(parameter)] = ReadyGradient(
                block, size_bytes, None if self._on_device else time.perf_counter_ns()
            )
