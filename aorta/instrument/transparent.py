"""Puts AORTA around functions of torch, and into its hooks, so that `torch.compile` does not see it.

Where Dynamo traces such a function or hook, it finds torch's own, and no hook: graphs and graph breaks are those of
the program. Where one of them runs, neither it nor what it calls is compiled. Must not import more of torch than there
is when the first of its modules has been executed, or know what is done around a function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, TypeAlias

import torch

Before: TypeAlias = Callable[..., Callable[[bool], None] | None]
"""Takes a function's arguments; what it returns is called behind the function, with whether that returned."""
_observers: list[tuple[Callable[..., None], Callable[..., None]]] = []
_hooks: list[Any] = []


def put_around(function: Callable[..., Any], before: Before) -> Callable[..., Any]:
    """Return `function` with `before` in front of it, unless it is traced."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        after = before(*args, **kwargs)
        if after is None:
            return function(*args, **kwargs)
        returned = False
        try:
            result = function(*args, **kwargs)
            returned = True
        finally:
            after(returned)
        return result

    leave_out(called)
    return called


def hook_optimizers() -> None:
    """Register the hooks that `observed_steps` needs, until the process ends. Code is compiled again when their number
    changes, so a program that is to notice nothing has them from its import of torch on.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    @not_compiled
    def before(*args: Any) -> None:
        if not torch.compiler.is_compiling():
            for before_step, _ in tuple(_observers):
                before_step(*args)

    @not_compiled
    def after(*args: Any) -> None:
        if not torch.compiler.is_compiling():
            for _, after_step in tuple(_observers):
                after_step(*args)

    _hooks.append(register_optimizer_step_pre_hook(before))
    _hooks.append(register_optimizer_step_post_hook(after))


@contextmanager
def observed_steps(before: Callable[..., None], after: Callable[..., None]) -> Iterator[None]:
    """Have torch's optimizers call `before` and `after` around their steps, as hooks of all of them are called, for the
    length of a `with` block.
    """
    first = not _hooks
    if first:
        hook_optimizers()
    _observers.append((before, after))
    try:
        yield
    finally:
        _observers.remove((before, after))
        while first and _hooks:
            _hooks.pop().remove()


@contextmanager
def observed_loading(before: Before) -> Iterator[None]:
    """Have `before` called with each iterator of a `DataLoader` that is asked for its next batch, for the length of a
    `with` block. Loaders of Transformers, Lightning and Accelerate wrap such an iterator. A torch whose iterators are
    of another class is left alone.
    """
    from torch.utils.data import dataloader

    iterators: Any = getattr(dataloader, "_BaseDataLoaderIter", None)
    own = getattr(iterators, "__next__", None)
    if own is None:
        yield
        return
    iterators.__next__ = around = put_around(own, before)
    try:
        yield
    finally:
        if iterators.__next__ is around:  # else somebody has put a function around ours, which calls it
            iterators.__next__ = own


def not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have Dynamo leave out a function and whatever it calls when it runs inside of compiled code; returns it. As
    `torch.compiler.disable`, which imports Dynamo, and breaks a graph that calls the function.
    """
    leave_out(function, recursively=True)
    return function


def leave_out(function: Any, *, recursively: bool = False) -> None:
    """Have Dynamo leave out the frame of a function where it runs, and not what it calls, unless `recursively`."""
    with suppress(ImportError, AttributeError):  # a torch that tells this in another way compiles a frame more
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        inside = _FrameAction.SKIP if recursively else _FrameAction.DEFAULT
        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, inside))
