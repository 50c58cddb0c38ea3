"""Passes of a model's blocks and ends of backward passes as rows of a ring, in Python: as `native/ranges.hpp` appends
them in compiled code. Must not modify the graph (tensor hooks only observe).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from aorta.instrument.dispatcher import backward_pass, when_backward_ends
from aorta.instrument.module_hooks import observe
from aorta.instrument.transparent import not_compiled
from aorta.records import ring_file as rf
from aorta.records.ring_file import RingFile

if TYPE_CHECKING:  # which has the ranges
    from aorta.instrument.row_steps import RowSteps


def needing_gradient(values: Any) -> list[torch.Tensor]:
    """Return tensors in nested containers that a backward pass will reach."""
    if isinstance(values, torch.Tensor):
        return [values] if values.requires_grad else []
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [tensor for value in values for tensor in needing_gradient(value)]


def last_of(count: int, reached: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """Return what calls `reached` with the last of `count` gradients."""
    left = [count]

    def came(gradient: torch.Tensor) -> None:
        left[0] -= 1
        if left[0] == 0:
            reached(gradient)

    return came


class RowRanges:
    """Hooks that bracket the passes of blocks, and mark the end of each backward pass.

    The engine runs queued callbacks in order, and accepts more while it does: a first callback, queued before those of
    DDP and FSDP, marks the last node of a pass; it queues a second one, which runs after theirs.
    """

    def __init__(self, ring: RingFile, steps: RowSteps) -> None:
        self._ring, self._rows, self._steps = ring, steps.rows, steps
        self._ends: list[Callable[[], None]] = []
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        # Of the open step: the rows of passes that are open, by the number of the block.
        self._forward: dict[int, list[int]] = {}
        self._backward: dict[int, int] = {}
        self._open, self._looks = False, True
        self._asked_in: int | None = None

    def begin(self, *, observed: bool = True) -> None:
        """Begin a step: what was open is forgotten."""
        self._looks = observed
        self._record(open_=observed)

    def end(self) -> None:
        """Record nothing until the next step begins."""
        self._record(open_=False)

    def _record(self, *, open_: bool) -> None:
        with self._lock:
            self._open = open_
            self._forward.clear()
            self._backward.clear()

    def watch(self, name: str, block: nn.Module) -> None:
        """Bracket `block`. Call after the parallel strategy has put its own hooks on it.

        A block's backward pass begins when the first gradient of its outputs arrives, and ends with the last gradient
        of its inputs; where the inputs need none (an embedding), when the backward pass has run.
        """
        number, listed = next(self._numbers), self._ring.text(name)

        @not_compiled
        def last_gradient(_gradient: torch.Tensor) -> None:
            with self._lock:
                if (row := self._backward.pop(number, None)) is not None:
                    self._rows.end_span(row)

        @not_compiled
        def open_backward(_gradient: Any) -> None:
            with self._lock:
                if self._recorded and number not in self._backward:
                    self._backward[number] = self._opened(listed, rf.BACKWARD)

        def before_forward(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._looks:
                return
            inputs = needing_gradient(args)
            if kwargs:
                inputs += needing_gradient(kwargs)
            if inputs:
                closes = last_gradient if len(inputs) == 1 else last_of(len(inputs), last_gradient)
                for tensor in inputs:
                    tensor.register_hook(closes)  # type: ignore[no-untyped-call]
            with self._lock:
                if self._recorded:
                    self._forward.setdefault(number, []).append(self._opened(listed, 0))

        def after_forward(_module: nn.Module, _args: Any, output: Any) -> None:
            if not self._looks:
                return
            with self._lock:
                if passes := self._forward.get(number):
                    self._rows.end_span(passes.pop())
            for tensor in needing_gradient(output):
                # A node's pre-hook runs after all hooks of the tensor, whenever those were registered: FSDP waits for
                # the block's parameters in a tensor hook that it registers later than this (R5).
                before = tensor.register_hook if tensor.grad_fn is None else tensor.grad_fn.register_prehook
                before(open_backward)

        self._ends.append(observe(block, before=before_forward, after=after_forward))

    def watch_backward(self, module: nn.Module) -> None:
        """Mark the end of each backward pass that reaches `module`, including those of gradient accumulation; of all
        modules watched so, the first whose outputs get a gradient counts.
        """

        def after_forward(_module: nn.Module, _args: Any, output: Any) -> None:
            for tensor in needing_gradient(output) if self._looks else ():
                tensor.register_hook(self._gradient_came)  # type: ignore[no-untyped-call]

        # Before FSDP's own hook: hooks of a tensor run in the order of registration, and FSDP queues its callback
        # with the first gradient too.
        self._ends.append(observe(module, after=after_forward))

    def close(self) -> None:
        """Take the hooks away. Those that are in a graph do nothing until something is watched again."""
        while self._ends:
            self._ends.pop()()

    def leave(self) -> None:
        """In a forked child, which has no thread that may hold the lock: record nothing."""
        self._lock = threading.RLock()
        self.close()
        self.end()

    @property
    def _recorded(self) -> bool:
        return self._open and bool(self._ends)

    def _opened(self, name: int, flags: int) -> int:
        return self._rows.append(rf.PASS, flags, name, time.perf_counter_ns())

    @not_compiled
    def _gradient_came(self, _gradient: torch.Tensor) -> None:
        # Compared by id: a pass that failed never ends, and must not hide the next one.
        if self._ends and (current := backward_pass()) != self._asked_in:
            self._asked_in = current
            self._steps.add_watched(1)
            when_backward_ends(self._nodes_ran)

    def _nodes_ran(self) -> None:
        """After the last node of a backward pass, end the passes of blocks whose inputs need no gradient."""
        with self._lock:
            for row in self._backward.values():
                self._rows.end_span(row)
            self._backward.clear()
        begin_ns = time.perf_counter_ns()

        def ended() -> None:
            end_ns = time.perf_counter_ns()
            if self._open:
                self._rows.append(rf.TAIL, a=begin_ns, b=end_ns)
            self._steps.settle(end_ns)
            self._steps.add_watched(-1)

        when_backward_ends(ended)
