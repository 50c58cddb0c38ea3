"""Observes the model: times the computation of its blocks (docs/dev/measuring.md, R5).

A range over the whole backward pass contains every stall, so each block is bracketed by itself, after its parameters
have arrived: these hooks run after FSDP's own. `RowRanges` appends the passes of blocks and the ends of backward passes
to a ring, as `native/ranges.hpp` does in compiled code. Must not change a tensor, or modify the graph
(tensor hooks only observe).
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from aorta.instrument.dispatcher import backward_pass, when_backward_ends
from aorta.instrument.ring_rows import RingRows
from aorta.instrument.transparent import leave_out, not_compiled
from aorta.records import ring_file as rf
from aorta.records.ring_file import RingFile

if TYPE_CHECKING:  # which has the ranges
    from aorta.instrument.python_interceptor import PythonInterceptor


class ModuleHook:
    """A forward hook that observes `module` and no copy of it.

    Copied or pickled with the module it becomes a function of the standard library that does nothing, so that a watched
    model can be copied and saved, and loaded without AORTA.
    """

    def __init__(self, module: nn.Module, observe: Callable[..., None]) -> None:
        self._module, self._observe = weakref.ref(module), observe

    # Called with empty caches, between kernels of the model, where each function of Python costs several times what a
    # loop suggests: hence `torch.compiler.is_compiling` in its parts, of which Dynamo knows the first.
    @not_compiled
    def __call__(self, module: nn.Module, *what: Any) -> None:
        compiler = torch.compiler
        if compiler.is_dynamo_compiling() or getattr(compiler, "_is_compiling_flag", False):
            return
        if module is self._module():
            self._observe(module, *what)

    def __deepcopy__(self, _memo: object) -> Callable[..., None]:
        return nullcontext().__exit__

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, str]]:
        return getattr, (nullcontext(), "__exit__")


_IN_PLACE_OF_HOOKS = "_compiled_call_impl"
"""Attribute of a module: what `nn.Module.__call__` calls in place of hooks and `forward`, set by `Module.compile`.
torch leaves it out of copies and pickles, and Dynamo traces it."""


@dataclass
class _Observers:
    """Of the calls of one module: functions of (module, args, kwargs), and of (module, args, output)."""

    before: list[Callable[..., None]] = field(default_factory=list)
    after: list[Callable[..., None]] = field(default_factory=list)


def observe(
    module: nn.Module,
    *,
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
    first: bool = False,
) -> Callable[[], None]:
    """Have `before(module, args, kwargs)` and `after(module, args, output)` called around the calls of a module, inside
    of the hooks that it has, and not where it is compiled; returns what ends it. Of several observers the last one is
    innermost, and `first` the outermost, outside of the hooks too.

    A module with hooks is observed by hooks. For one without, torch takes a short way to `forward`, and a hook would
    end that: with cold caches this costs more than the hooks.
    """
    observers = _observers_of(module)
    if observers is None and not _takes_short_way(module):
        handles: list[Any] = []
        if before is not None:
            hook = ModuleHook(module, before)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True, prepend=first))
        if after is not None:
            handles.append(module.register_forward_hook(ModuleHook(module, after), prepend=True))

        def remove() -> None:
            for handle in handles:
                handle.remove()

        return remove
    observing = observers or _observe_calls(module)
    for observer in (before, after):
        leave_out(observer, recursively=True)
    if before is not None:
        observing.before.insert(0 if first else len(observing.before), before)
    if after is not None:
        observing.after.insert(0, after)
    reference = weakref.ref(module)

    def end() -> None:
        if before is not None:
            observing.before.remove(before)
        if after is not None:
            observing.after.remove(after)
        watched = reference()
        if watched is not None and not (observing.before or observing.after) and _observers_of(watched) is observing:
            del watched.__dict__[_IN_PLACE_OF_HOOKS]

    return end


def _takes_short_way(module: nn.Module) -> bool:
    return (
        type(module).__call__ is nn.Module.__call__
        and getattr(module, _IN_PLACE_OF_HOOKS, module) is None
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        and not torch.nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
    )


def _observers_of(module: nn.Module) -> _Observers | None:
    observers = getattr(module.__dict__.get(_IN_PLACE_OF_HOOKS), "observers", None)
    return observers if isinstance(observers, _Observers) else None


def _observe_calls(module: nn.Module) -> _Observers:
    reference, observers, compiler = weakref.ref(module), _Observers(), torch.compiler
    before, after, is_traced = observers.before, observers.after, compiler.is_dynamo_compiling

    # In its parts as in `ModuleHook`, and for the same reason.
    def call(*args: Any, **kwargs: Any) -> Any:
        called: Any = reference()
        if is_traced() or getattr(compiler, "_is_compiling_flag", False):
            return called._call_impl(*args, **kwargs)
        for observer in before:
            observer(called, args, kwargs)
        output = called._call_impl(*args, **kwargs)
        for observer in after:
            observer(called, args, output)
        return output

    leave_out(call)
    call.observers = observers  # type: ignore[attr-defined]
    module.__dict__[_IN_PLACE_OF_HOOKS] = call
    _replicas_are_not_observed()
    return observers


@cache
def _replicas_are_not_observed() -> None:
    """Keep `DataParallel` from giving a module's replicas what observes that module: it copies all attributes."""
    replicate = nn.Module._replicate_for_data_parallel

    def replicated(self: nn.Module) -> nn.Module:
        replica: nn.Module = replicate(self)  # type: ignore[no-untyped-call]
        if _observers_of(replica) is not None:
            del replica.__dict__[_IN_PLACE_OF_HOOKS]
        return replica

    nn.Module._replicate_for_data_parallel = replicated  # type: ignore[method-assign]


def taken_out(module: nn.Module) -> Callable[[bool], None]:
    """Take the hooks of AORTA out of a module and its copies' places; returns what puts them back. TorchScript compiles
    hooks, and cannot compile these.
    """
    taken, observed = [], []
    for part in module.modules():
        if _observers_of(part) is not None:
            observed.append((part, part.__dict__.pop(_IN_PLACE_OF_HOOKS)))
        for hooks in (part._forward_pre_hooks, part._forward_hooks):
            # In a copy of a module a function of the standard library stands for a hook.
            ours = [
                key
                for key, hook in hooks.items()
                if isinstance(hook, ModuleHook) or isinstance(getattr(hook, "__self__", None), nullcontext)
            ]
            if ours:
                taken.append((hooks, list(hooks.items())))
            for key in ours:
                del hooks[key]

    def put_back(_returned: bool) -> None:
        for hooks, items in taken:
            hooks.clear()
            hooks.update(items)
        for part, call in observed:
            part.__dict__[_IN_PLACE_OF_HOOKS] = call

    return put_back


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

    def __init__(self, ring: RingFile, rows: RingRows, step: PythonInterceptor) -> None:
        self._ring, self._rows, self._step = ring, rows, step
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
            self._step.add_watched(1)
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
            self._step.settle(end_ns)
            self._step.add_watched(-1)

        when_backward_ends(ended)
