"""Traces every call through torch.distributed.rpc on both sides, without changes to the calling code.

While a `TracedRpc` is open, `rpc_sync`, `rpc_async` and `remote` are replaced in every module that holds them: each
call adds a `Call` to its list, and on the callee a `record_function` range around the called function, for that
worker's profiler (and what it allocates, in a memory window).

torch's own tools do not suffice (torch 2.13): its Kineto profiler sees callers only, its legacy one the first call of
each server thread only, and one started on a server thread ends the process.

Host allocations of a call are measured in a memory window (`open_window`, `close_window`), on the thread that serves
it. The allocator reports to the profiler of its own thread only, so torch's profiler of all threads misses them;
torch's legacy profiler runs beside it for the length of a call. Its events come in the order in which they happened:
operators that begin and end, and allocations between them.

Must not change a value, an exception's type, an RRef or a timeout, leave a function replaced on exit, or measure memory
while a measured function makes a call of its own: torch would have the callee profiled as well.
"""

from __future__ import annotations

import functools
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Self

import torch
import torch.distributed.rpc as rpc
from torch.autograd.profiler import record_function
from torch.distributed.rpc.constants import UNSET_RPC_TIMEOUT

from aorta.errors import InstrumentError
from aorta.records.run_files import CALL_MARK, Call, CallMemory, OperatorMemory

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

_log = logging.getLogger(__name__)
KINDS = {"rpc_sync": "rpc_sync", "rpc_async": "rpc_async", "remote": "rpc_remote"}
"""Function of torch.distributed.rpc -> the name of its calls (C3)."""
_here = threading.local()
_CONFIG = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
"""Its third value asks for memory."""
_window: dict[str, Sequence[Any]] | None = None
"""Call -> its events: summed up later, off the thread that has to answer; None where memory is not measured."""


class Ticket(NamedTuple):
    """Identity of a call, sent along with it."""

    call_id: str
    name: str


def run_traced(ticket: Ticket, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run the call, on the callee, inside its range. Importable wherever AORTA is installed."""
    before = getattr(_here, "ticket", None)
    _here.ticket = ticket
    try:
        with record_function(f"{ticket.name}{CALL_MARK}{ticket.call_id}"), measured(ticket.call_id):
            return function(*args, **kwargs)
    finally:
        _here.ticket = before


class TracedRpc:
    """Replaces the three functions wherever a module holds them, for the length of a `with` block.

    Methods of `RRef.rpc_sync()` and its siblings keep the originals, which torch looks up once at start: they are not
    traced. Functions marked `async_execution`, and TorchScript ones, cannot be wrapped: their calls are listed, their
    remote side is not marked, and one warning says so.

    Attributes:
        calls: every call, in order of issue; `window` is the value of `self.window` at that time.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.window: int | None = None
        self._numbers = itertools.count()
        self._replaced: list[tuple[Any, str, Any]] = []
        self._warned = False
        self._changed = threading.Condition()

    def __enter__(self) -> Self:
        self._me = rpc.get_worker_info()
        for name, kind in KINDS.items():
            original = getattr(rpc, name)
            wrapper = self._wrapper(kind, original)
            # Modules hold it under other names, too: `from torch.distributed.rpc import rpc_sync` makes a copy.
            for module in list(sys.modules.values()):
                if getattr(module, "__name__", "").startswith("torch.distributed.rpc."):
                    continue  # torch's internal calls (e.g. shutdown's barriers) are not traced
                for attribute, value in list(getattr(module, "__dict__", {}).items()):
                    if value is original:
                        self._replaced.append((module, attribute, original))
                        setattr(module, attribute, wrapper)
        return self

    def __exit__(self, *error: object) -> None:
        for module, name, original in reversed(self._replaced):
            setattr(module, name, original)
        self._replaced.clear()

    def settle(self, timeout_s: float) -> bool:
        """Wait until every call was answered; returns whether that happened within `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: all(call.reply_ns is not None for call in self.calls), timeout_s)

    def of_window(self, window: int) -> list[Call]:
        """Return the calls issued in one window, which is the last or not far from it."""
        with self._changed:
            later = itertools.takewhile(lambda call: (call.window or 0) >= window, reversed(self.calls))
            return [call for call in later if call.window == window][::-1]

    def _wrapper(self, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def traced(to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
            try:
                callee = rpc.api._to_worker_info(to)  # type: ignore[no-untyped-call]
            except (RuntimeError, ValueError, TypeError):
                callee = None
            if not callable(func) or callee is None:
                return original(to, func, args, kwargs, timeout)  # torch raises its own error
            call = self._new(kind, func, callee)
            whole = (func, args, kwargs)
            if call.traced:
                whole = (run_traced, (Ticket(call.call_id, call.name), func, args or (), kwargs or {}), None)
            try:
                with paused():
                    result = original(to, *whole, timeout)
            except BaseException as error:
                self._answered(call, error)
                raise
            future = result if kind == "rpc_async" else None
            if kind == "rpc_remote":  # it completes when the owner has created the value; torch may not expose it
                with suppress(AttributeError, RuntimeError):
                    future = result._get_future()
            if future is None:
                self._answered(call, None)
            else:
                future.add_done_callback(lambda done: self._answered(call, _error_of(done)))
            return result

        return traced

    def _new(self, kind: str, func: Any, callee: Any) -> Call:
        parent: Ticket | None = getattr(_here, "ticket", None)
        builtin = torch.jit._builtins._find_builtin(func)  # type: ignore[no-untyped-call]  # aten::add of torch.add
        function = str(builtin or getattr(func, "__qualname__", type(func).__name__))
        name = f"{kind}#{function}({self._me.name} -> {callee.name})"
        scripted = isinstance(func, torch.jit.ScriptFunction)
        traced = not scripted and not hasattr(func, "_wrapped_async_rpc_function")
        if not traced and not self._warned:
            self._warned = True
            what = "TorchScript" if scripted else "an async_execution function"
            _log.warning("rpc: %s is %s: such calls are listed, but not marked on the callee", function, what)
        with self._changed:
            call = Call(
                call_id=f"{self._me.id}-{next(self._numbers)}",
                name=name if parent is None else f"{parent.name}#remote_op: {name}",
                kind=kind,
                function=function,
                caller=self._me.id,
                callee=callee.id,
                window=self.window,
                parent=None if parent is None else parent.call_id,
                issue_ns=time.time_ns(),
                traced=traced,
            )
            self.calls.append(call)
        return call

    def _answered(self, call: Call, error: BaseException | None) -> None:
        with self._changed:
            call.reply_ns, call.error = time.time_ns(), None if error is None else type(error).__name__
            self._changed.notify_all()


def _error_of(future: Any) -> Exception | None:
    try:
        future.wait()
    except Exception as error:  # noqa: BLE001  any error of the remote function; its caller gets it too
        return error
    return None


def open_window() -> None:
    global _window
    _window = {}


def close_window() -> Mapping[str, CallMemory]:
    """Measure no further call; returns those that ended since `open_window`."""
    global _window
    window, _window = _window, None
    chain = itertools.chain.from_iterable
    return {  # a part holds a list a thread
        call_id: summed((event.kind(), event.name(), event.cpu_memory_usage()) for event in chain(chain(parts)))
        for call_id, parts in list((window or {}).items())
    }


@contextmanager
def measured(call_id: str) -> Iterator[None]:
    """Measure the function of one call, where a window is open and no profiler of its own runs on this thread."""
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
        window[call_id] = parts


@contextmanager
def paused() -> Iterator[None]:
    """Pause measuring around a call that a measured function makes."""
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
