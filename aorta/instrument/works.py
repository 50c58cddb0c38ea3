"""The work handles callers get back: they behave like the backend's, and remember when the caller stood waiting.

A handle that Python made must outlive every C++ caller that may still wait on it (R1), so `KeptAlive` holds on to
them. Must not: wait for a backend's work more than once, or without being asked: gloo's reduce-scatter copies its
result out inside `wait()`, and a second wait copies again (R6).
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from aorta.instrument.seam import Work


class KeptAlive:
    """Handles that C++ may still wait for.

    A Python caller holds the handle itself; a C++ caller holds only its C++ half, and waiting on that after the Python
    half is gone would never end. A handle is let go once it was waited for. DDP never waits (it keeps the future and
    drops the handle): a handle that has completed and is held here alone lets go of the backend's work, whose outputs
    it would keep alive, and beyond `capacity` the oldest go as well.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        self._full: OrderedDict[int, TimedWork] = OrderedDict()
        self._completed: OrderedDict[int, TimedWork] = OrderedDict()

    def hold(self, work: TimedWork) -> None:
        """Keep `work` until it was waited for, or has completed and `capacity` newer ones have come."""
        self._look_at_oldest()
        self._full[id(work)] = work

    def release(self, work: TimedWork) -> None:
        """`work` was waited for."""
        if self._full.pop(id(work), None) is None:
            self._completed.pop(id(work), None)

    def __len__(self) -> int:
        return len(self._full) + len(self._completed)

    def _look_at_oldest(self) -> None:
        for _ in range(min(_LOOKS, len(self._full))):
            number, oldest = next(iter(self._full.items()))
            if sys.getrefcount(oldest) > _HELD_HERE_ALONE:
                # Somebody else in Python holds it, and may ask for the rest yet; those behind it are no less old.
                self._full.move_to_end(number)
                continue
            if not oldest.is_completed():
                return
            oldest.let_go()
            self._completed[number] = self._full.pop(number)
            if len(self._completed) > self._capacity:
                self._completed.popitem(last=False)


_LOOKS = 4
"""Handles that are looked at whenever one comes: more than one, so that none is left behind."""
_HELD_HERE_ALONE = 3
"""References to a handle that `KeptAlive` alone holds, as it counts them: its dictionary's, a name's, the call's."""


class _Done:
    """In the place of a backend's work that has completed and that nobody in Python can ask any more."""

    def wait(self, _timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


class TimedWork(dist._Work):
    """Stands for the backend's work.

    Args:
        work: the backend's handle.
        wait: how to wait; gets a function that waits on the backend's handle, and whether the caller set a limit of
            time. Called once, unless `repeatable`.
        kept: holds this handle until it was waited for.
        waiters: how often it may be waited for. A functional collective of several tensors shares one handle, and each
            tensor's first use waits on it in C++.
        repeatable: a device's wait orders streams, so it is due on every stream that asks; gloo's must not be repeated.
        in_place: its outputs are there when it has completed; gloo's reduce-scatter puts them there in its wait.
    """

    def __init__(
        self,
        work: Work,
        wait: Callable[[Callable[[], bool], bool], bool],
        kept: KeptAlive,
        waiters: int = 1,
        *,
        repeatable: bool = False,
        in_place: bool = False,
    ) -> None:
        super().__init__()
        self._work: Any = work
        self._wait, self._kept, self._repeatable = wait, kept, repeatable
        self._waiters, self._in_place = waiters, in_place
        self._once = threading.Lock()
        self._waited, self._answer = False, True
        kept.hold(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        limited = bool(timeout)  # C++ callers say "no limit" with a length of 0
        with self._once:
            if self._repeatable or not self._waited:
                self._answer = self._wait(
                    lambda: bool(self._work.wait(timeout) if limited else self._work.wait()), limited
                )
                self._waited = True
            self._waiters -= 1
            if self._waiters <= 0:
                self._kept.release(self)
        return self._answer

    def let_go(self) -> None:
        """It has completed, and only C++ may still wait for it: what can only be asked in Python is not needed, and
        neither are the events and marks that a wait uses.
        """
        if self._in_place:
            self._work, self._wait = _Done(), lambda inner, _limited: inner()

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
        return int(self._work.source_rank())

    def get_future(self) -> Any:
        return self._work.get_future()
