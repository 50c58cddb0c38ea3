"""A collective from its issue to its line in the record, and the process group it belongs to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from aorta.instrument.clock import Mark
from aorta.records.schema import EndSource


class Completion(Protocol):
    """Known without Python (`native.tap`)."""

    def ended(self) -> tuple[int, EndSource] | None:
        """When the collective ended, on the clock of `time.perf_counter_ns`, and who noticed; None until it has."""


@dataclass(slots=True)
class Issued:
    """One collective, while it is under way. `start` is None where it has to be derived from the backend's order.
    `number` counts what all ranks of a group take part in, so it is the same on each; None for send and receive.
    `counted`: the backend's own counter has it. `communicator`: runs one collective after another; None where it does
    not say when this one could begin (a start of None is derived otherwise, sends and receives have one of their own).
    `launch`: those with the same one were launched together.
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
    alive: Any = field(default=None, repr=False)
    has_completed: Callable[[], bool] | None = field(default=None, repr=False)
    completion: Completion | None = field(default=None, repr=False)

    def look(self) -> bool:
        """Whether its end is known, asking the backend's own stamp, if there is one."""
        if self.end is None and self.completion is not None and (ended := self.completion.ended()):
            self.end, self.end_source = ended
            self.completion = None
        return self.end is not None

    def stamp(self, source: EndSource) -> None:
        """It has ended by now, on the host's clock; the first to notice counts. Not for one with a `completion`."""
        if self.end is None:
            self.end, self.end_source = time.perf_counter_ns(), source
            self.has_completed = None

    def on_completion(self, _future: Any) -> None:
        """The backend's future is done."""
        self.stamp("future")


@dataclass(frozen=True)
class Group:
    """A process group that was seen: its global ranks, and how many of its collectives a CPU backend runs at once."""

    ranks: tuple[int, ...]
    lanes: int
