"""Ends a run early, with all ranks stopping after the same step.

A signal reaches ranks at different times; if each stopped after its own current step, the faster ones would wait in a
collective for ever. So a thread of each rank agrees on the last step through the store: once a stop is requested, each
rank posts the step it is in and starts no other until all have posted; the largest is the last one for all. The loop
checks one flag per step. A rank whose loop is over posts -1, so nobody waits for it.

Must not use a collective.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import torch.distributed as dist

_POLL_S = 0.25
_IMPATIENCE_S = 2.0
_GRACE_S = 15.0
"""A living rank posts within one poll, whatever its training thread does; torchrun kills 30 s after its own signal."""
_NO_DEMAND = -1


class StopAgreement:
    """Decides before each step whether it may start. `stopped_by`: the signal that requested a stop on any rank."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self.stopped_by: signal.Signals | None = None
        self._lock = threading.Lock()
        self._started = _NO_DEMAND
        self._posted = False
        self._last_step: int | None = None
        self._decided = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if world_size > 1:
            self._thread = threading.Thread(target=self._watch, name="aorta-stop", daemon=True)
            self._thread.start()

    def request(self, by: signal.Signals) -> None:
        """Ask all ranks to stop after the current step. Safe inside a signal handler."""
        self.stopped_by = self.stopped_by or by

    def may_start(self, step: int) -> bool:
        """Return whether `step` (a global step) may begin; blocks while the ranks agree on the last one."""
        if self._thread is None:
            return self.stopped_by is None
        with self._lock:
            if not self._posted and not self._decided.is_set():
                self._started = step
                return True
        self._decided.wait()
        return step <= self._last_step if self._last_step is not None else self.stopped_by is None

    def close(self) -> None:
        """Stop watching; this rank starts no further step."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=10 * _POLL_S)
            with suppress(RuntimeError, OSError):  # the store is gone, and with it whoever would read this
                self._post(_NO_DEMAND)

    def _watch(self) -> None:
        try:
            while not self._closed.wait(_POLL_S):
                if self.stopped_by is not None:
                    self._store.set("stop/asked", str(int(self.stopped_by)))
                if self.stopped_by is not None or self._store.check(["stop/asked"]):
                    break
            else:
                return
            self._post()
            names = [f"stop/at/{rank}" for rank in range(self._world_size)]
            deadline = time.monotonic() + _GRACE_S
            while not self._store.check(names):
                if self._closed.wait(_POLL_S / 5) or time.monotonic() > deadline:
                    return
            self.stopped_by = self.stopped_by or signal.Signals(int(self._store.get("stop/asked")))
            self._last_step = max(int(text) for text in self._store.multi_get(names))
        except (RuntimeError, OSError):
            # The store is gone: the run is failing, and a rank that got no stop request goes on into the
            # collective that reports it. One that gets it later stops by itself.
            return
        finally:
            self._decided.set()

    def _post(self, demand: int | None = None) -> None:
        """Post `demand`, or the step this rank is in; only the first post counts."""
        with self._lock:
            if self._posted:
                return
            self._posted = True
            step = self._started if demand is None else demand
        self._store.set(f"stop/at/{self._rank}", str(step))


@contextmanager
def stop_on_signals(request: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Turn SIGINT and SIGTERM into one call of `request`, inside the signal handler, for the length of a `with` block.

    Launchers often repeat the signal, so a repetition is ignored; a SIGINT more than two seconds after the first signal
    comes from an impatient person and interrupts at once (KeyboardInterrupt).
    """
    first: float | None = None

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal first
        if first is None:
            first = time.monotonic()
            request(signal.Signals(number))
        elif number == signal.SIGINT and time.monotonic() - first > _IMPATIENCE_S:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
