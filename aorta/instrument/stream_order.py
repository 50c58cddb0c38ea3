"""Which collectives a stream of the strategy goes on after, so that a wait for one of its events can name them.

FSDP issues its collectives on streams of its own; the compute stream waits for events recorded there. An event stands
for everything before it on its stream, so it carries the names of the collectives that the stream had joined by then.
Must not record an event, or look at the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from aorta.instrument.waits import Name

_BEHIND = "_aorta_behind"
"""Attribute of an event: what its stream had joined."""
_MOST = 256
"""Collectives kept per stream: those that nothing which computes ever waits for must not pile up."""


class _Joined:
    """A collective that some stream goes on after; `awaited`: what computes has waited for it."""

    __slots__ = ("awaited", "name")

    def __init__(self, name: Name) -> None:
        self.name, self.awaited = name, False


class StreamOrder:
    """The collectives that streams other than the computing one have joined.

    Args:
        take: id of a stream -> collectives that compiled code has seen it join since the last call.
    """

    def __init__(self, take: Callable[[int], Iterable[Name]] = lambda _stream: ()) -> None:
        self._take = take
        self._behind: dict[int, list[_Joined]] = {}

    def joined(self, stream: int, name: Name) -> None:
        """A stream goes on after a collective."""
        self._add(stream, [_Joined(name)])

    def recorded(self, stream: int, event: Any) -> None:
        """An event was recorded on a stream."""
        setattr(event, _BEHIND, tuple(self._of(stream)))

    def passed_on(self, stream: int, event: Any) -> None:
        """A stream that does not compute waits for an event."""
        if behind := [joined for joined in getattr(event, _BEHIND, ()) if not joined.awaited]:
            known = set(map(id, self._of(stream)))
            self._add(stream, [joined for joined in behind if id(joined) not in known])

    def awaited(self, event: Any = None, stream: int | None = None) -> tuple[Name, ...]:
        """What computes waits for an event, or for a stream: the collectives that it had not waited for before."""
        behind = getattr(event, _BEHIND, ()) if stream is None else self._of(stream)
        fresh = [joined for joined in behind if not joined.awaited]
        for joined in fresh:
            joined.awaited = True
        return tuple(joined.name for joined in fresh)

    def _of(self, stream: int) -> list[_Joined]:
        if taken := self._take(stream):
            self._add(stream, [_Joined(name) for name in taken])
        behind = self._behind.get(stream)
        if behind is None:
            return []
        if any(joined.awaited for joined in behind):
            behind = self._behind[stream] = [joined for joined in behind if not joined.awaited]
        return behind

    def _add(self, stream: int, joined: list[_Joined]) -> None:
        behind = self._behind.setdefault(stream, [])
        behind += joined
        del behind[:-_MOST]
