"""End a run early, all ranks after the same step.

A signal reaches ranks at different times; if each stopped after its own current step, the faster ones would wait in a
collective for ever. So ranks agree on the last step through the store, in a thread, without touching the training
loop: once a stop was asked for, each rank posts the step it is in and starts no further step until all have posted;
the largest posted step is the last one for everybody. It costs the loop one flag per step.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch.distributed as dist

_POLL_S = 0.25
_IMPATIENCE_S = 2.0


class StopAgreement:
    """Asked before each step whether it may start."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._lock = threading.Lock()
        self._started = -1
        self._posted = False
        self._requested = False
        self._last_step: int | None = None
        self._decided = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if world_size > 1:
            self._thread = threading.Thread(target=self._watch, name="aorta-stop", daemon=True)
            self._thread.start()

    def request(self) -> None:
        """Ask all ranks to stop after the current step. Safe inside a signal handler."""
        self._requested = True

    def may_start(self, step: int) -> bool:
        """Whether `step` (a global step) may begin; blocks while the ranks agree on the last one."""
        if self._thread is None:
            return not self._requested
        with self._lock:
            if not self._posted:
                self._started = step
                return True
        self._decided.wait()
        return self._last_step is not None and step <= self._last_step

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=10 * _POLL_S)

    def _watch(self) -> None:
        try:
            while not self._closed.wait(_POLL_S):
                if self._requested:
                    self._store.set("stop/asked", "1")
                if self._requested or self._store.check(["stop/asked"]):
                    self._agree()
                    return
        except (RuntimeError, OSError):
            # The store is gone: the run is failing, and its collectives will say so. Let the loop go on to meet that.
            self._last_step = None
        finally:
            self._decided.set()

    def _agree(self) -> None:
        with self._lock:
            self._posted = True
            self._store.set(f"stop/at/{self._rank}", str(self._started))
        names = [f"stop/at/{rank}" for rank in range(self._world_size)]
        while not self._store.check(names):
            if self._closed.wait(_POLL_S / 5):
                return
        self._last_step = max(int(text) for text in self._store.multi_get(names))


class Signals:
    """Which signal asked this process to stop, if any."""

    received: signal.Signals | None = None


@contextmanager
def stop_on_signals(agreement: StopAgreement) -> Iterator[Signals]:
    """Turn SIGINT and SIGTERM into a stop after the current step, for the length of a `with` block.

    A launcher often repeats the signal, so a repetition is ignored; a SIGINT more than two seconds after the first
    signal is a person losing patience and interrupts at once (KeyboardInterrupt).
    """
    seen = Signals()
    first = 0.0

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal first
        if seen.received is None:
            seen.received, first = signal.Signals(number), time.monotonic()
            agreement.request()
        elif number == signal.SIGINT and time.monotonic() - first > _IMPATIENCE_S:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
