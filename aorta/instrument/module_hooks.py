"""Hooks that observe the calls of modules (docs/dev/measuring.md, R5).

A range over the whole backward pass contains every stall, so each block is bracketed by itself, after its parameters
have arrived: these hooks run after FSDP's own. Must not change a tensor, or stay in copies and pickles of a model.
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

from aorta.instrument.transparent import leave_out, not_compiled


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
