"""The work handles callers get back: they behave like the backend's, and remember when the caller stood waiting.

A handle that Python made must outlive every C++ caller that may still wait on it (R1), so `KeptAlive` holds on to
them. Must not: wait for a backend's work more than once, or without being asked: gloo's reduce-scatter copies its
result out inside `wait()`, and a second wait copies again (R6).
"""

from __future__ import annotations

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
    drops the handle), so beyond `capacity` the oldest completed ones go as well.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        self._look_at = capacity + 1
        self._works: OrderedDict[int, TimedWork] = OrderedDict()

    def hold(self, work: TimedWork) -> None:
        """Keep `work` until it was waited for, or `capacity` newer ones have come and it has completed."""
        self._works[id(work)] = work
        if len(self._works) >= self._look_at:
            while len(self._works) > self._capacity and next(iter(self._works.values())).is_completed():
                self._works.popitem(last=False)
            # Asking the oldest goes through C++: not with every collective of a reducer that never waits.
            self._look_at = len(self._works) + 1 + self._capacity // 8

    def release(self, work: TimedWork) -> None:
        """`work` was waited for."""
        self._works.pop(id(work), None)


class TimedWork(dist._Work):
    """Stands for the backend's work.

    Args:
        work: the backend's handle.
        wait: how to wait; gets a function that waits on the backend's handle. Called once, unless `repeatable`.
        kept: holds this handle until it was waited for.
        waiters: how often it may be waited for. A functional collective of several tensors shares one handle, and each
            tensor's first use waits on it in C++.
        repeatable: a device's wait orders streams, so it is due on every stream that asks; gloo's must not be repeated.
    """

    def __init__(
        self,
        work: Work,
        wait: Callable[[Callable[[], bool]], bool],
        kept: KeptAlive,
        waiters: int = 1,
        *,
        repeatable: bool = False,
    ) -> None:
        super().__init__()
        self._work, self._wait, self._kept, self._repeatable = work, wait, kept, repeatable
        self._waiters = waiters
        self._once = threading.Lock()
        self._waited, self._answer = False, True
        kept.hold(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        with self._once:
            if self._repeatable or not self._waited:
                self._answer = self._wait(lambda: self._work.wait() if timeout is None else self._work.wait(timeout))
                self._waited = True
            self._waiters -= 1
            if self._waiters <= 0:
                self._kept.release(self)
        return self._answer

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self._work.block_current_stream()

    def is_completed(self) -> bool:
        return (self._waited and not self._repeatable) or self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        return self._work.result()

    def source_rank(self) -> int:
        return self._work.source_rank()

    def get_future(self) -> Any:
        return self._work.get_future()
