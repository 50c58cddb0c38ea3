"""A collective in flight, from its issue to its line in the record, and the process group it belongs to.

Must not wait for a collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from aorta.instrument.event_clock import Mark
from aorta.records.schema import EndSource

NO_STREAM: Final = "the device has no stream left to time them on"
STACKED_IN_A_BATCH: Final = (
    "they take lists of tensors and were launched together with others, and only the caller's own wait may release the "
    "tensors in which the backend stacks such lists"
)


class Completion(Protocol):
    """The end of a collective as recorded by compiled code (`native.native_interceptor`)."""

    def ended(self) -> tuple[int, EndSource] | None:
        """When the collective ended, on the clock of `time.perf_counter_ns`, and what reported it; None while in
        flight.
        """


@dataclass(slots=True)
class InFlight:
    """One collective in flight.

    Attributes:
        number: counts the collectives that all ranks of a group take part in, so it is the same on each; None for send
            and receive.
        start: None where it has to be derived from the backend's queue order.
        counted: whether the backend's own counter includes it.
        communicator: runs one collective after another; None where it does not determine when this one could begin (a
            start of None is derived otherwise), or is not known.
        launch: collectives with the same value were launched together.
        by_future: a backward pass took its future, and waits for that at its end (DDP).
        untimed: why it can have no end, if so.
        backend_end_ns: when the backend itself was done, where the emulated fabric set `end`.
    """

    kind: str
    group: str
    seq: int
    bytes: int
    dtype: str | None
    issue_ns: int
    number: int | None = None
    start: Mark | None = None
    end: Mark | None = None
    end_source: EndSource | None = None
    waiters: int = 1
    counted: bool = True
    communicator: str | None = None
    launch: int | None = None
    by_future: bool = False
    untimed: str | None = None
    backend_end_ns: int | None = None
    alive: Any = field(default=None, repr=False)
    has_completed: Callable[[], bool] | None = field(default=None, repr=False)
    completion: Completion | None = field(default=None, repr=False)

    def look(self) -> bool:
        """Whether its end is known; queries the backend's own time stamp if there is one."""
        if self.end is None and self.completion is not None and (ended := self.completion.ended()):
            self.end, self.end_source = ended
            self.completion = None
        return self.end is not None

    def stamp(self, source: EndSource, at_ns: int | None = None) -> None:
        """It has ended by now, or by `at_ns`, on the host's clock; the first call counts. Not for a collective with a
        `completion`.
        """
        if self.end is None:
            self.end, self.end_source = time.perf_counter_ns() if at_ns is None else at_ns, source
            self.has_completed = None

    def on_completion(self, _future: Any) -> None:
        """Callback of the backend's future."""
        self.stamp("future")


@dataclass(frozen=True)
class Group:
    """A process group: its global ranks, and how many of its collectives a CPU backend runs at once."""

    ranks: tuple[int, ...]
    lanes: int
