"""A collective in flight, from its issue to its end: its process group, and the work handle that its caller gets, which
behaves like the backend's and records when the caller was blocked.

A wait on the host is bracketed where it happens. DDP waits in C++, on futures, where nothing can be bracketed: only the
whole of it is (`row_ranges.RowRanges`), and the waits inside follow from the order in which DDP waits, which is
that of issue. A handle created in Python must outlive every C++ caller that may still wait on it (R1), so `KeptAlive`
keeps references. Must not wait for a backend's work more than once, or unless the caller does: gloo's
reduce-scatter copies its result out inside `wait()`, and a second wait copies again (R6).
"""

from __future__ import annotations

import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from aorta.instrument.dispatcher import Work, backward_pass
from aorta.instrument.ring_rows import NOWHERE, RingRows
from aorta.records import ring_file as rf
from aorta.records.schema import EndSource

_LOOKS: Final = 4
"""Handles checked whenever one is added: more than one, so that the backlog shrinks."""
_HELD_HERE_ALONE: Final = 3
"""Reference count of a handle that only `KeptAlive` holds: the dictionary's, a local name's, the call's."""


@dataclass(slots=True)
class InFlight:
    """One collective in flight, and its rows, if it has any: its own, and in a step that of its emulated link.

    Attributes:
        number: counts the collectives that all ranks of a group take part in, so it is the same on each; None for send
            and receive.
        start: set by an emulated link; None where it follows from the backend's queue.
        backend_end_ns: when the backend itself was done, where the emulated fabric set `end`.
    """

    kind: str
    group: str
    seq: int
    bytes: int
    issue_ns: int
    number: int | None = None
    start: int | None = None
    end: int | None = None
    end_source: EndSource | None = None
    backend_end_ns: int | None = None
    has_completed: Callable[[], bool] | None = field(default=None, repr=False)
    op: int = 0
    of_group: int = 0
    rows: RingRows | None = field(default=None, repr=False)
    row: int = NOWHERE
    link: int = NOWHERE

    def stamp(self, source: EndSource, at_ns: int | None = None) -> None:
        """Stamp its end: now, or `at_ns` of the host's clock; the first call counts."""
        if self.end is None:
            self.end, self.end_source = time.perf_counter_ns() if at_ns is None else at_ns, source
            self.has_completed = None


class KeptAlive:
    """Keeps handles that C++ may still wait for.

    A Python caller holds the handle itself; a C++ caller holds only its C++ half, and waiting on that after the Python
    half is gone would never return. A handle is released once it was waited for. DDP never waits (it keeps the future
    and drops the handle): a handle that has completed and is referenced only here releases the backend's work, whose
    outputs it would keep alive, and beyond `capacity` the oldest handles are dropped as well. It takes the future
    before it issues its next collective, so the last handle of a thread stays as it is, whatever other threads issue.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        self._lock = threading.RLock()  # entered again where what is released here runs Python code
        self._last_of: dict[int, int] = {}
        self._full: OrderedDict[int, TimedWork] = OrderedDict()
        self._completed: OrderedDict[int, TimedWork] = OrderedDict()

    def hold(self, work: TimedWork) -> None:
        """Keep `work` until it was waited for, or has completed and `capacity` newer ones have been added."""
        with self._lock:
            self._last_of[threading.get_ident()] = id(work)
            for _ in range(min(_LOOKS, len(self._full))):
                number, oldest = next(iter(self._full.items()))
                if sys.getrefcount(oldest) > _HELD_HERE_ALONE or number in self._last_of.values():
                    # Its caller may still use it; check the ones after it, which may be as old.
                    self._full.move_to_end(number)
                    continue
                if not oldest.is_completed():
                    break
                oldest.let_go()
                self._completed[number] = self._full.pop(number)
                if len(self._completed) > self._capacity:
                    self._completed.popitem(last=False)
            self._full[id(work)] = work

    def release(self, work: TimedWork) -> None:
        with self._lock:
            if self._full.pop(id(work), None) is None:
                self._completed.pop(id(work), None)

    def __len__(self) -> int:
        return len(self._full) + len(self._completed)


class _Done:
    """Replaces a backend's work that has completed and that no Python code can query any more."""

    def wait(self, _timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


class TimedWork(dist._Work):
    """Wraps the backend's work.

    Args:
        work: the backend's handle.
        wait: how to wait; gets a function that waits on the backend's handle. Called once, unless `repeatable`.
        kept: keeps this handle until it was waited for.
        waiters: how often it may be waited for. A functional collective of several tensors shares one handle, and each
            tensor's first use waits on it in C++.
        repeatable: a device's wait orders streams, so every stream that waits needs it; gloo's must not be repeated.
        in_place: whether its outputs are written on completion; gloo's reduce-scatter writes them in its wait.
        issued: its collective, if it is one of the record.
    """

    def __init__(
        self,
        work: Work,
        wait: Callable[[Callable[[], bool]], bool],
        kept: KeptAlive,
        waiters: int = 1,
        *,
        repeatable: bool = False,
        in_place: bool = False,
        issued: InFlight | None = None,
    ) -> None:
        super().__init__()
        self._work: Any = work
        self._issued = issued
        self._wait, self._kept, self._repeatable = wait, kept, repeatable
        self._waiters, self._in_place = waiters, in_place
        self._once = threading.Lock()
        self._waited, self._answer = False, True
        kept.hold(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit = [timeout] if timeout else []  # C++ callers pass 0 for "no limit"
        with self._once:
            if self._repeatable or not self._waited:
                self._answer = self._wait(lambda: bool(self._work.wait(*limit)))
                self._waited = True
            self._waiters -= 1
            if self._waiters <= 0:
                self._kept.release(self)
        return self._answer

    def let_go(self) -> None:
        """Release, when it has completed and only C++ may still wait for it, what only Python could query, and the
        events and marks that a wait uses.
        """
        if self._in_place:
            self._work, self._wait, self._issued = _Done(), lambda inner: inner(), None

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        if self._repeatable:
            self.wait()
        else:
            self._work.block_current_stream()

    def is_completed(self) -> bool:
        return (self._waited and not self._repeatable) or bool(self._work.is_completed())

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        return list(self._work.result())

    def source_rank(self) -> int:
        return int(self._work._source_rank())

    _source_rank = source_rank  # which torch itself calls, of a receive from any rank

    def _get_op_type(self) -> Any:
        return self._work._get_op_type()

    def _get_duration(self) -> float:
        return float(self._work._get_duration())

    def get_future_result(self) -> Any:
        return self._work.get_future_result()

    def get_future(self) -> Any:
        issued = self._issued
        if issued is not None and issued.rows is not None and backward_pass() != -1:
            issued.rows.add_flags(issued.row, rf.BY_FUTURE)  # DDP waits for it at the end of the pass
        return self._work.get_future()
