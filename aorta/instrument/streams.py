"""Streams, as the instrumentation needs them: which is current, which computes, and side streams of our own.

A CPU has no streams: gloo runs collectives on threads of its own, so nothing has to be moved there. Must not:
synchronise with the host.
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
        priority: of our own streams (lower is more urgent); None: that of the stream a collective was issued on, so
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
        """Whether the caller's stream is the one that computes: a strategy waits on streams of its own as well."""
        return self.current() == self.compute

    def side(self, key: Hashable) -> torch.Stream | None:
        """Our stream for `key` (a process group, say) with the caller's priority; the same at every call.

        None where the device hands out a stream a second time (CUDA: 32 a priority, in turn): two communicators on one
        stream would wait for each other, in an order that no program promised.
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
        """What comes on `after` waits for what is on `before` now. One event serves every time: a wait remembers the
        moment it was asked for, not the event.
        """
        self._order.record(before)
        self._order.wait(after)


_WAITS = ("wait_event", "wait_stream")


class StreamWaits:
    """Marks round every wait of the stream that computes, for as long as the object is open.

    FSDP's collectives run on streams of its own, and the compute stream waits for events of those, not for a handle:
    these waits are calls of the device's stream class from Python, and pass here.

    Args:
        device: whose stream class. streams: says which stream computes. mark: takes a mark on the current stream.
        on_wait: called with two marks between which the compute stream may have stood waiting.
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
        """Put the class back as it was."""
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
