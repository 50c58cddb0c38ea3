"""Moments on the device's own time line, read later (docs/measuring.md, R4 and R6).

A `Mark` is taken now and read some steps later: on a CPU it is the host clock, on CUDA/HIP an event in the current
stream. Reading never waits. Everything read is in nanoseconds of CLOCK_MONOTONIC (`time.perf_counter_ns` on Linux).
Must not: synchronise, except where a method says so.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch

Mark: TypeAlias = Any
"""Opaque: only the clock that made it can read it."""


class Clock(Protocol):
    """Takes and reads marks."""

    def mark(self) -> Mark:
        """A mark in the current stream (on a CPU: now)."""

    def new_epoch(self) -> None:
        """Once a step: marks are read against the newest epoch before them."""

    def read_ns(self, mark: Mark) -> int | None:
        """When the mark happened, or None if it has not yet."""

    def release(self, mark: Mark) -> None:
        """The mark will not be read again."""

    def drain(self) -> None:
        """Wait until every mark taken so far has happened. Synchronises: only after the last step."""


class HostClock:
    """The host clock: a mark is its own reading, so there is nothing to pool, chain or wait for."""

    def mark(self) -> Mark:
        return time.perf_counter_ns()

    def new_epoch(self) -> None:
        pass

    def read_ns(self, mark: Mark) -> int | None:
        return int(mark)

    def release(self, mark: Mark) -> None:
        pass

    def drain(self) -> None:
        pass


class _Epoch:
    """An event all later marks are measured from, and its own place in time once that is known."""

    def __init__(self, event: Any, before: _Epoch | None, start_ns: int | None) -> None:
        self.event, self.before, self.start_ns = event, before, start_ns


class DeviceClock:
    """CUDA/HIP events from a pool.

    `Event.elapsed_time` answers in float32 milliseconds: 100 ms resolve to 8 ns but an hour only to 0.25 s, so times
    are measured from the step's own first event (an epoch), and epochs are chained. The chain begins at an event whose
    host time is known because nothing else was running; each link adds the event's resolution (about 0.5 us) of error.

    Args:
        new_event: makes a timing event with `record() query() elapsed_time() synchronize()`.
    """

    def __init__(self, new_event: Callable[[], Any] | None = None) -> None:
        self._new_event = new_event or _timing_event
        self._pool: deque[Any] = deque()
        origin = self._new_event()
        origin.record()
        origin.synchronize()  # before the first step: the only host-device rendezvous of a run
        self._epoch = _Epoch(origin, None, time.perf_counter_ns())

    def mark(self) -> Mark:
        return self._event(), self._epoch

    def new_epoch(self) -> None:
        self._epoch = _Epoch(self._event(), self._epoch, None)

    def read_ns(self, mark: Mark) -> int | None:
        if isinstance(mark, int):
            return mark  # taken on the host: a collective of CPU tensors beside the device's
        event, epoch = mark
        start_ns = self._start_of(epoch)
        if start_ns is None or not event.query():
            return None
        return start_ns + round(float(epoch.event.elapsed_time(event)) * 1e6)

    def release(self, mark: Mark) -> None:
        if not isinstance(mark, int):
            self._pool.append(mark[0])

    def drain(self) -> None:
        torch.cuda.synchronize()

    def _event(self) -> Any:
        event = self._pool.popleft() if self._pool else self._new_event()
        event.record()
        return event

    def _start_of(self, epoch: _Epoch) -> int | None:
        if epoch.start_ns is None and epoch.before is not None and epoch.event.query():
            before_ns = self._start_of(epoch.before)
            if before_ns is not None:
                epoch.start_ns = before_ns + round(epoch.before.event.elapsed_time(epoch.event) * 1e6)
                epoch.before = None  # the chain is not walked again
        return epoch.start_ns


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return HostClock() if device.type == "cpu" else DeviceClock()


def _timing_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
