"""Accelerator streams: which one is current, which one computes, and which collectives a stream of the strategy
continues after.

A CPU has no streams: gloo runs collectives on its own threads. FSDP issues its collectives on streams of its own; the
compute stream waits for events recorded there. An event stands for everything before it on its stream, so it carries
the names of the collectives that the stream had joined by then, and a wait for it can name them. Must not synchronise
with the host.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Hashable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from aorta.instrument.transparent import not_compiled

_BEHIND = "_aorta_behind"
"""Attribute of an event: what its stream had joined."""
_MOST = 256
"""Collectives kept per stream: those that nothing which computes ever waits for must not pile up."""


@dataclass(slots=True, eq=False)
class _JoinedCollective:
    """A collective that a stream continues after, `name` stands for it; `awaited`: what computes has waited for it."""

    name: Hashable
    awaited: bool = False


class StreamOrder:
    """The collectives that streams other than the computing one have joined.

    Args:
        take: id of a stream -> collectives that compiled code has seen it join since the last call.
    """

    def __init__(self, take: Callable[[int], Iterable[Hashable]] = lambda _stream: ()) -> None:
        self._take = take
        self._behind: dict[int, list[_JoinedCollective]] = {}

    def recorded(self, stream: int, event: Any) -> None:
        setattr(event, _BEHIND, tuple(self._of(stream)))

    def passed_on(self, stream: int, event: Any) -> None:
        if behind := [joined for joined in getattr(event, _BEHIND, ()) if not joined.awaited]:
            known = set(map(id, self._of(stream)))
            self._add(stream, [joined for joined in behind if id(joined) not in known])

    def awaited(self, event: Any = None, stream: int | None = None) -> tuple[Hashable, ...]:
        """Note that what computes waits for an event or a stream; returns collectives it had not waited for."""
        behind = getattr(event, _BEHIND, ()) if stream is None else self._of(stream)
        fresh = [joined for joined in behind if not joined.awaited]
        for joined in fresh:
            joined.awaited = True
        return tuple(joined.name for joined in fresh)

    def _of(self, stream: int) -> list[_JoinedCollective]:
        if taken := self._take(stream):
            self._add(stream, [_JoinedCollective(name) for name in taken])
        behind = self._behind.get(stream)
        if behind is None:
            return []
        if any(joined.awaited for joined in behind):
            behind = self._behind[stream] = [joined for joined in behind if not joined.awaited]
        return behind

    def _add(self, stream: int, joined: list[_JoinedCollective]) -> None:
        behind = self._behind.setdefault(stream, [])
        behind += joined
        del behind[:-_MOST]


class DeviceStreams:
    """The streams of one accelerator.

    Attributes:
        compute: the stream that computes, where waiting for a collective is a stall.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device.type)
        self.compute = self.current()

    def current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)

    @not_compiled
    def priority(self) -> int:
        """Return the priority of the caller's stream; 0 where the device has none."""
        return int(getattr(self._module.current_stream(self._device), "priority", 0))


_event_wait = torch.Event.wait  # torch's own, also while `StreamWaits` is open


def wait_unseen(stream: torch.Stream, event: torch.Event) -> None:
    """Make a stream wait for an event of AORTA's own: `StreamWaits` does not report it."""
    _event_wait(event, stream)


class StreamWaits:
    """Brackets every wait of the compute stream with marks, while the object is open.

    FSDP's collectives run on its own streams, and the compute stream waits for their events rather than for a work
    handle. These waits are Python calls: of the streams and events of the device's module, and of `torch.Stream` and
    `torch.Event`, which `torch.accelerator.current_stream()` returns and DDP creates. All are patched here; so is
    `record` of the module's events, to know which collectives an event stands for.

    Args:
        mark: takes a mark on the current stream.
        on_wait: called with two marks between which the compute stream may have been waiting, and the collectives that
            it waited for.
        order: knows which collectives streams continue after.
    """

    def __init__(
        self,
        device: torch.device,
        streams: DeviceStreams,
        mark: Callable[[], Any],
        on_wait: Callable[[Any, Any, tuple[Any, ...]], None],
        order: StreamOrder,
    ) -> None:
        module = torch.get_device_module(device.type)
        self._streams, self._mark, self._on_wait, self._order = streams, mark, on_wait, order
        self._inside = False
        self._own: list[tuple[type, str, Any]] = []
        for owner in dict.fromkeys((torch.Stream, module.Stream)):
            for name in ("wait_event", "wait_stream"):
                if name in vars(owner):
                    self._replace(owner, name, self._wait_of_stream(vars(owner)[name]))
        for owner in dict.fromkeys((torch.Event, module.Event)):
            if "wait" in vars(owner):
                self._replace(owner, "wait", self._wait_for_event(vars(owner)["wait"]))
        recorded = module.Event.record

        def record(event: Any, stream: Any = None) -> Any:
            outcome = recorded(event, stream)
            order.recorded((streams.current() if stream is None else stream).stream_id, event)
            return outcome

        self._replace(module.Event, "record", record)

    def close(self) -> None:
        for owner, name, own in reversed(self._own):
            if own is None:
                delattr(owner, name)
            else:
                _set(owner, name, own)

    def _replace(self, owner: type, name: str, function: Callable[..., Any]) -> None:
        self._own.append((owner, name, vars(owner).get(name)))
        _set(owner, name, function)

    def _wait_of_stream(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(stream: Any, *args: Any, **kwargs: Any) -> Any:
            (other,) = args or kwargs.values()
            return self._bracketed(stream, other, lambda: original(stream, *args, **kwargs))

        return wait

    def _wait_for_event(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(event: Any, stream: Any = None) -> Any:
            waits = self._streams.current() if stream is None else stream
            return self._bracketed(waits, event, lambda: original(event, stream))

        return wait

    def _bracketed(self, stream: Any, other: Any, wait: Callable[[], Any]) -> Any:
        streams, order = self._streams, self._order
        if self._inside:  # `wait_stream` calls `wait_event`, and that the event's `wait`
            return wait()
        # Not `==`: a stream of the module is equal to none of `torch.Stream`.
        if stream.stream_id != streams.compute.stream_id or stream.device != streams.compute.device:
            order.passed_on(stream.stream_id, other)  # of a stream nothing: its event comes here as well
            return wait()
        self._inside = True
        try:
            with nullcontext() if streams.current() == streams.compute else stream:  # marks go to the current stream
                begin = self._mark()
                result = wait()
                of_stream = isinstance(other, torch.Stream)
                names = order.awaited(stream=other.stream_id) if of_stream else order.awaited(other)
                self._on_wait(begin, self._mark(), names)
            return result
        finally:
            self._inside = False


def _set(owner: type, name: str, value: Any) -> None:
    """Set an attribute of a class, also of a C type, whose attributes Python code cannot assign."""
    try:
        setattr(owner, name, value)
    except TypeError:
        (attributes,) = gc.get_referents(vars(owner))
        attributes[name] = value
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))  # the interpreter caches lookups
