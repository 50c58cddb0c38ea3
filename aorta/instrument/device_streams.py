"""Accelerator streams: which one is current, which one computes, and the side streams that AORTA adds.

A CPU has no streams: gloo runs collectives on its own threads. Must not synchronise with the host.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from aorta.instrument.stream_order import StreamOrder
from aorta.instrument.waits import Name


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
    handle. These waits are Python calls of the device's stream class, which is patched here; so is `record` of its
    events, to know which collectives an event stands for.

    Args:
        device: whose stream class.
        streams: tells which stream computes.
        mark: takes a mark on the current stream.
        on_wait: called with two marks between which the compute stream may have been waiting, and the collectives that
            it waited for.
        order: knows which collectives streams go on after.
    """

    def __init__(
        self,
        device: torch.device,
        streams: DeviceStreams,
        mark: Callable[[], Any],
        on_wait: Callable[[Any, Any, tuple[Name, ...]], None],
        order: StreamOrder,
    ) -> None:
        module = torch.get_device_module(device.type)
        classes = [(module.Stream, name) for name in _WAITS] + [(module.Event, "record")]
        self._own = [(owner, name, owner.__dict__.get(name)) for owner, name in classes]
        self._inside, self._order = False, order
        for name in _WAITS:
            setattr(module.Stream, name, self._marked(getattr(module.Stream, name), streams, mark, on_wait))
        module.Event.record = self._noted(module.Event.record, streams)

    def close(self) -> None:
        """Restore the classes."""
        for owner, name, own in self._own:
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

    def _noted(self, original: Callable[..., Any], streams: DeviceStreams) -> Callable[..., Any]:
        def record(event: Any, stream: Any = None) -> Any:
            outcome = original(event, stream)
            self._order.recorded((streams.current() if stream is None else stream).stream_id, event)
            return outcome

        return record

    def _marked(
        self,
        original: Callable[[Any, Any], Any],
        streams: DeviceStreams,
        mark: Callable[[], Any],
        on_wait: Callable[[Any, Any, tuple[Name, ...]], None],
    ) -> Callable[[Any, Any], Any]:
        order = self._order

        def wait(stream: Any, other: Any) -> Any:
            if self._inside:  # `wait_stream` calls `wait_event`
                return original(stream, other)
            if stream != streams.compute:
                order.passed_on(stream.stream_id, other)  # of a stream nothing: its event comes here as well
                return original(stream, other)
            self._inside = True
            try:
                with nullcontext() if streams.computes() else streams.use(stream):  # marks go to the current stream
                    begin = mark()
                    result = original(stream, other)
                    of_stream = isinstance(other, torch.Stream)
                    names = order.awaited(stream=other.stream_id) if of_stream else order.awaited(other)
                    on_wait(begin, mark(), names)
                return result
            finally:
                self._inside = False

        return wait
