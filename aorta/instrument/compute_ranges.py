"""Observes the model: times the computation of its blocks (docs/dev/measuring.md, R5).

A range over the whole backward pass contains every stall, so each block is bracketed by itself, after its parameters
have arrived: these hooks run after FSDP's own. Must not change a tensor, or modify the graph (tensor hooks only
observe).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn

from aorta.instrument.dispatcher import backward_pass, when_backward_ends
from aorta.instrument.event_clock import EventClock, Mark
from aorta.instrument.transparent import leave_out, not_compiled, unseen_hook


@dataclass(slots=True)
class Range:
    """One forward or backward pass of one block, between two marks; `end` is None while it is open."""

    block: str
    phase: str
    start: Mark
    end: Mark | None = None


class ModuleHook:
    """A forward hook that observes `module` and no copy of it.

    Copied or pickled with the module it becomes a function of the standard library that does nothing, so that a watched
    model can be copied and saved, and loaded without AORTA.
    """

    def __init__(self, module: nn.Module, observe: Callable[..., None]) -> None:
        self._module, self._observe = weakref.ref(module), observe

    @unseen_hook
    def __call__(self, module: nn.Module, *what: Any) -> None:
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
    reference, observers = weakref.ref(module), _Observers()
    before, after = observers.before, observers.after

    def call(*args: Any, **kwargs: Any) -> Any:
        called: Any = reference()
        if torch.compiler.is_compiling():
            return called._call_impl(*args, **kwargs)
        _tell(before, called, args, kwargs)
        output = called._call_impl(*args, **kwargs)
        _tell(after, called, args, output)
        return output

    leave_out(call)
    call.observers = observers  # type: ignore[attr-defined]
    module.__dict__[_IN_PLACE_OF_HOOKS] = call
    _replicas_are_not_observed()
    return observers


@not_compiled
def _tell(observers: list[Callable[..., None]], *what: Any) -> None:
    for one in observers:
        one(*what)


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
            ours = [key for key, one in hooks.items() if isinstance(one, ModuleHook) or _replaces_hook(one)]
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


def _replaces_hook(one: object) -> bool:
    return isinstance(getattr(one, "__self__", None), nullcontext)


class BlockRanges:
    """Hooks that bracket the passes of blocks, and mark the end of each backward pass.

    The engine runs queued callbacks in order, and accepts more while it does: a first callback, queued before those of
    DDP and FSDP, marks the last node of a pass; it queues a second one, which runs after theirs.

    Args:
        on_range: called with each range when it opens.
        on_tail: called with two marks around the strategy's end-of-backward work, which waits for collectives.
        on_watched: called with 1 when a backward pass reaches what is watched, and with -1 when it ends.
    """

    def __init__(
        self,
        clock: EventClock,
        on_range: Callable[[Range], None],
        on_tail: Callable[[Mark, Mark], None],
        on_watched: Callable[[int], None] = lambda _passes: None,
    ) -> None:
        self._clock, self._on_range, self._on_tail, self._on_watched = clock, on_range, on_tail, on_watched
        self._ends: list[Callable[[], None]] = []
        self._backward: dict[str, Range] = {}
        self._asked_in: int | None = None

    def watch(self, name: str, block: nn.Module) -> None:
        """Bracket `block`. Call after the parallel strategy has put its own hooks on it.

        A block's backward range opens when the first gradient of its outputs arrives, and closes with the last
        gradient of its inputs; a block whose inputs need none (an embedding) closes when the backward pass has run.
        """
        forward: list[Range] = []
        clock = self._clock

        @not_compiled
        def last_gradient(_gradient: torch.Tensor) -> None:
            if name in self._backward:
                self._backward.pop(name).end = clock.mark()

        @not_compiled
        def open_backward(_gradient: Any) -> None:
            if name not in self._backward:
                self._backward[name] = self._opened(name, "backward")

        def before_forward(_module: nn.Module, args: Any, kwargs: Any) -> None:
            inputs = needing_gradient(args)
            if kwargs:
                inputs += needing_gradient(kwargs)
            if inputs:
                closes = last_gradient if len(inputs) == 1 else last_of(len(inputs), last_gradient)
                for tensor in inputs:
                    tensor.register_hook(closes)  # type: ignore[no-untyped-call]
            forward.append(self._opened(name, "forward"))

        def after_forward(_module: nn.Module, _args: Any, output: Any) -> None:
            forward.pop().end = clock.mark()
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
            for tensor in needing_gradient(output):
                tensor.register_hook(self._gradient_came)  # type: ignore[no-untyped-call]

        # Before FSDP's own hook: hooks of a tensor run in the order of registration, and FSDP queues its callback
        # with the first gradient too.
        self._ends.append(observe(module, after=after_forward))

    def close(self) -> None:
        while self._ends:
            self._ends.pop()()

    def _opened(self, name: str, phase: str) -> Range:
        opened = Range(name, phase, self._clock.mark())
        self._on_range(opened)
        return opened

    @not_compiled
    def _gradient_came(self, _gradient: torch.Tensor) -> None:
        # Compared by id: a pass that failed never ends, and must not hide the next one.
        if self._ends and (current := backward_pass()) != self._asked_in:
            self._asked_in = current
            self._on_watched(1)
            when_backward_ends(self._nodes_ran)

    def _nodes_ran(self) -> None:
        """After the last node of a backward pass, close blocks whose inputs need no gradient."""
        for open_range in self._backward.values():
            open_range.end = self._clock.mark()  # one mark each: every range returns its marks to the clock
        self._backward.clear()
        begin = self._clock.mark()
        when_backward_ends(lambda: self._on_tail(begin, self._clock.mark()))
        when_backward_ends(lambda: self._on_watched(-1))


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
