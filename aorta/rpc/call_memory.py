"""What each remote call allocates on the host, measured on the thread that serves it.

torch's profiler of all threads hears of no allocation: the allocator tells the profiler of its own thread alone (torch
2.13). So torch's legacy profiler runs beside it for the length of a call, on the thread of that call. Its events come
in the order in which they happened: operators that begin and end, and allocations between them.

Must not be on while a measured function makes a call of its own: torch would have the callee profiled as well.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from aorta.errors import InstrumentError
from aorta.records.run_files import CallMemory, OperatorMemory

try:
    from torch._C._profiler import _ExperimentalConfig
    from torch.autograd import (
        ProfilerConfig,
        ProfilerState,
        _disable_profiler_legacy,
        _enable_profiler_legacy,
        _profiler_enabled,
    )
except ImportError as gone:
    raise InstrumentError(
        f"torch {torch.__version__} does not offer what remote calls are recorded with: {gone}; so workload=rpc does "
        "not work with it. Every other workload does; AORTA has been run with torch 2.11 to 2.15"
    ) from gone

_CONFIG = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
"""Its third value asks for memory."""
_here = threading.local()
_window: MemoryWindow | None = None


class MemoryWindow:
    """The calls measured in this process between `open_window` and `close_window`."""

    def __init__(self) -> None:
        self._events: dict[str, Sequence[Any]] = {}

    def add(self, call_id: str, parts: Sequence[Any]) -> None:
        """Keep the events of one call; they are summed up later, off the thread that has to answer."""
        self._events[call_id] = parts

    def calls(self) -> Mapping[str, CallMemory]:
        """By call id. Calls that are still served may be added meanwhile."""
        return {call_id: summed(_events(parts)) for call_id, parts in list(self._events.items())}


def open_window() -> None:
    """Measure every call served from now on."""
    global _window
    _window = MemoryWindow()


def close_window() -> Mapping[str, CallMemory]:
    """Measure no further call; returns those that ended since `open_window`."""
    global _window
    window, _window = _window, None
    return {} if window is None else window.calls()


@contextmanager
def measured(call_id: str) -> Iterator[None]:
    """Around the function of one call, where a window is open and no profiler of its own runs on this thread."""
    window = _window
    if window is None or _profiler_enabled():
        yield
        return
    parts: list[Any] = []
    _enable_profiler_legacy(_CONFIG)
    _here.parts = parts
    try:
        yield
    finally:
        _here.parts = None
        parts.append(_disable_profiler_legacy())
        window.add(call_id, parts)


@contextmanager
def paused() -> Iterator[None]:
    """Around a call that a measured function makes."""
    parts = getattr(_here, "parts", None)
    if parts is None:
        yield
        return
    parts.append(_disable_profiler_legacy())
    _here.parts = None
    try:
        yield
    finally:
        _enable_profiler_legacy(_CONFIG)
        _here.parts = parts


def _events(parts: Sequence[Any]) -> Iterator[tuple[str, str, int]]:
    """Kind, name and bytes of torch's events; a part holds a list a thread."""
    for event in itertools.chain.from_iterable(itertools.chain.from_iterable(parts)):
        yield event.kind(), event.name(), event.cpu_memory_usage()


def summed(events: Iterable[tuple[str, str, int]]) -> CallMemory:
    """Sum up one call.

    Args:
        events: kind (`push` and `pop` of an operator, `memory_alloc`, others), name, and bytes (negative: freed).
    """
    allocated = freed = peak = 0
    running: list[str] = []
    operators: dict[str, OperatorMemory] = {}
    for kind, name, size in events:
        if kind == "push":
            running.append(name)
        elif kind == "pop" and running:
            running.pop()
        elif kind == "memory_alloc" and size < 0:
            freed -= size
        elif kind == "memory_alloc" and size > 0:
            allocated += size
            peak = max(peak, allocated - freed)
            for operator in set(running):
                operators.setdefault(operator, OperatorMemory()).allocated_bytes += size
            if running:
                operators[running[-1]].self_allocated_bytes += size
    return CallMemory(allocated, freed, peak, operators)
