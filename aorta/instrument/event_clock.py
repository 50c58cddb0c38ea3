"""Timestamps on the device's own timeline, taken without waiting and read later (docs/dev/measuring.md, R4 and R6).

A `Mark` is taken now and read some steps later: on a CPU it is a reading of the host clock, on an accelerator an event
recorded in the current stream. All times read are in nanoseconds of CLOCK_MONOTONIC (`time.perf_counter_ns` on Linux):

    begin = clock.mark()
    ...
    clock.read_ns(begin)  # None until the device has reached the event
    clock.sent_ns(begin)  # when the host recorded it: how far the device was behind

Must not synchronise with the device, except where a method says so.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, TypeAlias

import torch

from aorta.distributed.cuda import is_capturing
from aorta.records.schema import DeviceClockFacts

Mark: TypeAlias = Any
"""Opaque: only the clock that made it can read it. None: none could be taken (a graph is being captured)."""


def on_host(mark: Mark) -> bool:
    """Return whether a mark is a plain reading of the host clock, whatever clock the run has.

    Collectives of CPU tensors on an accelerator run have such marks. (The compiled clock represents device marks as
    negative numbers.)
    """
    return type(mark) is int and mark > 0


BRACKETS = 20
"""How often an event is bracketed by two host clock readings to relate device time to host time; the narrowest wins."""


class HostClock:
    """Takes and reads marks; those of devices derive from it. Of the host a mark is its own reading; nothing is pooled
    or waited for.

    Attributes:
        bound_ns: how far the device's time and the host's may be apart, 0 where both are one clock. As events tell the
            time, an idle device reaches a mark this long after it was recorded: the same bracket gave both.
    """

    bound_ns = 0

    def mark(self) -> Mark | None:
        """Return a mark in the current stream (on a CPU: now); None while a graph is being captured there."""
        return time.perf_counter_ns()

    def new_epoch(self) -> None:
        """Begin an epoch, once per step: later marks are measured relative to this epoch."""

    def read_ns(self, mark: Mark, /) -> int | None:
        """Return when the mark happened, or None if it has not yet."""
        return int(mark)

    def sent_ns(self, mark: Mark, /) -> int | None:  # noqa: ARG002
        """Return when the host recorded the mark, after handing over all before it; None for a reading of its clock."""
        return None

    def release(self, mark: Mark, /) -> None:
        """Return a mark that has happened and will not be read again."""

    def forget(self, mark: Mark | None) -> None:
        """Drop a mark that will not be read and may not have happened yet."""

    def drain(self) -> None:
        """Wait until every mark taken so far has happened. Synchronises: only after the last step."""

    def facts(self) -> DeviceClockFacts | None:
        """Return how accurately device time maps to host time; None if they are one clock. Synchronises as `drain`."""
        return None


def anchor_event(device: torch.device) -> tuple[Any, int, int]:
    """Return an event, when it happened on the host's clock, and the bound of that time, in nanoseconds; from the
    narrowest of several short brackets of host clock readings.

    A single reading after one wait was off by 1.4 and 3.3 ms on a busy host, which wakes up late; the narrowest bracket
    is off by at most half its width. The device should be otherwise idle.
    """
    anchors, stream = [], torch.accelerator.current_stream(device)
    for _ in range(BRACKETS):
        event = torch.Event(device=device, enable_timing=True)
        before_ns = time.perf_counter_ns()
        event.record(stream)
        while not event.query():
            pass
        after_ns = time.perf_counter_ns()
        anchors.append((event, (before_ns + after_ns) // 2, (after_ns - before_ns + 1) // 2))
    return min(anchors, key=lambda anchor: anchor[2])


class _Epoch:
    """An event that later marks are measured from, and its host time once known. When no mark refers to it any more,
    the event goes back to `pool`.
    """

    def __init__(self, event: Any, before: _Epoch | None, start_ns: int | None, pool: deque[Any]) -> None:
        self.event, self.before, self.start_ns, self._pool = event, before, start_ns, pool

    def __del__(self) -> None:
        self._pool.append(self.event)


class DeviceClock(HostClock):
    """A clock of pooled accelerator events.

    `Event.elapsed_time` answers in float32 milliseconds: 100 ms resolve to 8 ns but an hour only to 0.25 s. Times are
    therefore measured from the step's own first event (an epoch), and epochs are chained. The chain starts at an event
    whose host time is known because the device was idle; each link adds the event resolution (about 0.5 us) of error.
    Marks are taken in the current stream of `device`, whichever device is current.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: deque[Any] = deque()
        torch.accelerator.synchronize(device)  # before the first step; with `facts` the only rendezvous of a run
        event, at_ns, self.bound_ns = anchor_event(device)
        self._epoch = _Epoch(event, None, at_ns, self._pool)

    def mark(self) -> Mark | None:
        if is_capturing():
            return None  # it would become part of the graph, and could never be read
        sent_ns = time.perf_counter_ns()
        return self._event(), self._epoch, sent_ns

    def new_epoch(self) -> None:
        if not is_capturing():
            self._epoch = _Epoch(self._event(), self._epoch, None, self._pool)

    def read_ns(self, mark: Mark) -> int | None:
        if on_host(mark):
            return int(mark)
        event, epoch, _ = mark
        start_ns = _start_of(epoch)
        if start_ns is None or not event.query():
            return None
        return start_ns + round(float(epoch.event.elapsed_time(event)) * 1e6)

    def sent_ns(self, mark: Mark) -> int | None:
        return None if on_host(mark) else int(mark[2])

    def release(self, mark: Mark) -> None:
        if mark is not None and not on_host(mark):
            self._pool.append(mark[0])

    def forget(self, mark: Mark | None) -> None:
        """Do nothing: the event may not have happened yet, and goes with the mark."""

    def drain(self) -> None:
        torch.accelerator.synchronize(self._device)

    def facts(self) -> DeviceClockFacts:
        self.drain()
        self.new_epoch()  # before it, so that it has happened too when `anchor_event` returns
        event, at_ns, bound_ns = anchor_event(self._device)
        chained_ns = self.read_ns((event, self._epoch, 0))
        return DeviceClockFacts(self.bound_ns, bound_ns, None if chained_ns is None else chained_ns - at_ns)

    def _event(self) -> Any:
        event = self._pool.popleft() if self._pool else torch.Event(device=self._device, enable_timing=True)
        # With an explicit stream: by default it takes the current device's.
        event.record(torch.accelerator.current_stream(self._device))
        return event


def _start_of(epoch: _Epoch) -> int | None:
    """Return when an epoch began; resolves the epochs before it on the way."""
    unplaced = []
    before: _Epoch | None = epoch
    while before is not None and before.start_ns is None:
        unplaced.append(before)
        before = before.before
    for mark in reversed(unplaced):
        if mark.before is None or mark.before.start_ns is None or not mark.event.query():
            return None
        mark.start_ns = mark.before.start_ns + round(float(mark.before.event.elapsed_time(mark.event)) * 1e6)
        mark.before = None  # the chain is not walked again
    return epoch.start_ns
