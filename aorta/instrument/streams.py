"""Streams, as the instrumentation needs them: which is current, one of our own per process group, and ordering.

`DeviceStreams` is CUDA/HIP. A CPU has no streams: gloo runs collectives on threads of its own, so nothing has to be
moved there. Must not: synchronise with the host.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Streams(Protocol):
    """What `collectives` asks of a device's streams."""

    def current(self) -> Any:
        """The caller's stream."""

    def of_group(self, group: str) -> Any:
        """Our stream for one process group.

        One a group, because a communicator runs its collectives in order anyway: on one stream a collective's start
        event waits for the end of the one before it, which is the definition of its start.
        """

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Make `stream` current for a `with` block."""


class DeviceStreams:
    """CUDA/HIP streams.

    Args:
        device: whose streams. priority: of our own streams (lower is more urgent).
    """

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._device, self._priority = device, priority
        self._of_group: dict[str, torch.cuda.Stream] = {}

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def of_group(self, group: str) -> torch.cuda.Stream:
        stream = self._of_group.get(group)
        if stream is None:
            stream = torch.cuda.Stream(self._device, priority=self._priority)  # type: ignore[no-untyped-call]
            self._of_group[group] = stream
        return stream

    def use(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)
