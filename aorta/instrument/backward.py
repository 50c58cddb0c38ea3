"""When a backward pass had computed everything, and when the strategy's ending behind it was over.

Nobody has to call anything: the first gradient that reaches the output of a watched module asks the autograd engine
for a word at the end of the pass. Must not: change a gradient, or outlive `close`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from aorta.instrument.clock import Clock, Mark
from aorta.instrument.compute import needing_gradient
from aorta.instrument.seam import backward_pass, when_backward_ends


class BackwardEnds:
    """Once for each backward pass that reaches a watched module, gradient accumulation included.

    The engine runs what it was asked for in order, and takes more while it does: a first word asked for before DDP's
    and FSDP's own endings marks the last node; a second one, asked for by the first, comes behind those endings.

    Args:
        clock: takes the marks.
        on_nodes_ran: called when the last node of a pass has run.
        on_tail: called with two marks between which the strategy's ending ran, which waits for collectives.
    """

    def __init__(self, clock: Clock, on_nodes_ran: Callable[[], None], on_tail: Callable[[Mark, Mark], None]) -> None:
        self._clock, self._on_nodes_ran, self._on_tail = clock, on_nodes_ran, on_tail
        self._handles: list[Any] = []
        self._asked_in: int | None = None

    def watch(self, module: nn.Module) -> None:
        """Look at the gradients of `module`'s outputs; of those watched the first to get one counts."""

        def after_forward(_module: nn.Module, _args: Any, output: Any) -> None:
            for tensor in needing_gradient(output):
                tensor.register_hook(self._gradient_came)  # type: ignore[no-untyped-call]

        # In front of FSDP's own hook: hooks of one tensor run in the order they were put on, and FSDP asks for its
        # ending with the first gradient too.
        self._handles.append(module.register_forward_hook(after_forward, prepend=True))

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _gradient_came(self, _gradient: torch.Tensor) -> None:
        # Told apart by identity: a pass that failed never ends, and must not hide the next one.
        if self._handles and (current := backward_pass()) != self._asked_in:
            self._asked_in = current
            when_backward_ends(self._nodes_ran)

    def _nodes_ran(self) -> None:
        self._on_nodes_ran()
        begin = self._clock.mark()
        when_backward_ends(lambda: self._on_tail(begin, self._clock.mark()))
