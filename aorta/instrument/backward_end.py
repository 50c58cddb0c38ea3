"""Marks when a backward pass has computed everything, and when the strategy's work after it (waiting for collectives)
is over.

No call by the user is needed: the first gradient that reaches the output of a watched module queues a callback with the
autograd engine for the end of the pass. Must not change a gradient, or stay active after `close`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from aorta.instrument.compute_ranges import needing_gradient
from aorta.instrument.dispatcher import backward_pass, when_backward_ends
from aorta.instrument.event_clock import EventClock, Mark


class BackwardEnds:
    """Marks the end of each backward pass that reaches a watched module, including those of gradient accumulation.

    The engine runs queued callbacks in order, and accepts more while it does: a first callback, queued before those of
    DDP and FSDP, marks the last node; it queues a second one, which runs after theirs.

    Args:
        clock: takes the marks.
        on_nodes_ran: called when the last node of a pass has run.
        on_tail: called with two marks around the strategy's end-of-backward work, which waits for collectives.
    """

    def __init__(
        self, clock: EventClock, on_nodes_ran: Callable[[], None], on_tail: Callable[[Mark, Mark], None]
    ) -> None:
        self._clock, self._on_nodes_ran, self._on_tail = clock, on_nodes_ran, on_tail
        self._handles: list[Any] = []
        self._asked_in: int | None = None

    def watch(self, module: nn.Module) -> None:
        """Watch the gradients of `module`'s outputs; of all watched modules, the first to get a gradient counts."""

        def after_forward(_module: nn.Module, _args: Any, output: Any) -> None:
            for tensor in needing_gradient(output):
                tensor.register_hook(self._gradient_came)  # type: ignore[no-untyped-call]

        # Before FSDP's own hook: hooks of a tensor run in the order of registration, and FSDP queues its callback
        # with the first gradient too.
        self._handles.append(module.register_forward_hook(after_forward, prepend=True))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _gradient_came(self, _gradient: torch.Tensor) -> None:
        # Compared by id: a pass that failed never ends, and must not hide the next one.
        if self._handles and (current := backward_pass()) != self._asked_in:
            self._asked_in = current
            when_backward_ends(self._nodes_ran)

    def _nodes_ran(self) -> None:
        self._on_nodes_ran()
        begin = self._clock.mark()
        when_backward_ends(lambda: self._on_tail(begin, self._clock.mark()))
