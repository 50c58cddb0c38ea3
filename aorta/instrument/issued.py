"""A collective from its issue to its line in the record, and the process group it belongs to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aorta.instrument.clock import Mark
from aorta.telemetry.schema import EndSource


@dataclass(slots=True)
class Issued:
    """One collective, while it is under way. `start` is None where it has to be derived from the backend's order.
    `number` counts what all ranks of a group take part in, so it is the same on each; None for send and receive.
    `counted`: the backend's own counter has it.
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
    alive: Any = field(default=None, repr=False)
    has_completed: Callable[[], bool] | None = field(default=None, repr=False)

    def stamp(self, source: EndSource) -> None:
        """It has ended by now, on the host's clock; the first to notice counts."""
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
