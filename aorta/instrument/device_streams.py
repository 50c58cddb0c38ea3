"""Accelerator streams: which one is current, which one computes, and the side streams that AORTA adds.

A CPU has no streams: gloo runs collectives on its own threads. Must not synchronise with the host.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class DeviceStreams:
    """The streams of one accelerator.

    Args:
        device: whose streams.
        priority: of AORTA's own streams (lower is more urgent); None: that of the stream a collective was issued on, so
            that moving it changes nothing for the device's scheduler.

    Attributes:
        compute: the stream that computes, where waiting for a collective is a stall.
    """

    def __init__(self, device: torch.device, priority: int | None = None) -> None:
        self._device, self._priority = device, priority
        self._module = torch.get_device_module(device.type)
        self._sides: dict[tuple[Hashable, int], torch.Stream | None] = {}
        self._order = torch.Event(device=device)
        self.compute = self.current()

    def current(self) -> torch.Stream:
        """The caller's stream."""
        return torch.accelerator.current_stream(self._device)

    def computes(self) -> bool:
        """Whether the caller's stream is the one that computes; strategies also wait on streams of their own."""
        return self.current() == self.compute

    def side(self, key: Hashable) -> torch.Stream | None:
        """AORTA's stream for `key` (e.g. a process group) with the caller's priority; the same at every call.

        Returns None where the device hands out a stream a second time (CUDA has 32 per priority, round robin): two
        communicators on one stream would wait for each other in an order that the program never requested.
        """
        priority = self.priority() if self._priority is None else self._priority
        if (key, priority) not in self._sides:
            fresh = torch.Stream(self._device, priority=priority)
            taken = {self.compute, self.current(), *self._sides.values()}
            self._sides[key, priority] = None if fresh in taken else fresh
        return self._sides[key, priority]

    def priority(self) -> int:
        """Of the caller's stream; 0 where the device has none."""
        return int(getattr(self._module.current_stream(self._device), "priority", 0))

    def use(self, stream: torch.Stream) -> AbstractContextManager[Any]:
        """Make `stream` current for a `with` block."""
        return stream

    def order(self, before: torch.Stream, after: torch.Stream) -> None:
        """Make `after` wait for everything on `before` so far. One event is reused: a wait captures the event's state
        at the time of the call.
        """
        self._order.record(before)
        self._order.wait(after)


_WAITS = ("wait_event", "wait_stream")


class StreamWaits:
    """Brackets every wait of the compute stream with marks, while the object is open.

    FSDP's collectives run on its own streams, and the compute stream waits for their events rather than for a work
    handle. These waits are Python calls of the device's stream class, which is patched here.

    Args:
        device: whose stream class.
        streams: tells which stream computes.
        mark: takes a mark on the current stream.
        on_wait: called with two marks between which the compute stream may have been waiting.
    """

    def __init__(
        self,
        device: torch.device,
        streams: DeviceStreams,
        mark: Callable[[], Any],
        on_wait: Callable[[Any, Any], None],
    ) -> None:
        self._class = torch.get_device_module(device.type).Stream
        self._own = {name: self._class.__dict__.get(name) for name in _WAITS}
        self._inside = False
        for name in _WAITS:
            setattr(self._class, name, self._marked(getattr(self._class, name), streams, mark, on_wait))

    def close(self) -> None:
        """Restore the class."""
        for name, own in self._own.items():
            if own is None:
                delattr(self._class, name)
            else:
                setattr(self._class, name, own)

    def _marked(
        self,
        original: Callable[[Any, Any], Any],
        streams: DeviceStreams,
        mark: Callable[[], Any],
        on_wait: Callable[[Any, Any], None],
    ) -> Callable[[Any, Any], Any]:
        def wait(stream: Any, other: Any) -> Any:
            if self._inside or stream != streams.compute:  # `wait_stream` calls `wait_event`
                return original(stream, other)
            self._inside = True
            try:
                with nullcontext() if streams.computes() else streams.use(stream):  # marks go to the current stream
                    begin = mark()
                    result = original(stream, other)
                    on_wait(begin, mark())
                return result
            finally:
                self._inside = False

        return wait
