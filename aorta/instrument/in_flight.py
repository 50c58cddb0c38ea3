"""A collective in flight, from its issue to its line in the record, the process group it belongs to, and waits for it.

A wait on the host is bracketed where it happens. DDP waits in C++, on futures, where nothing can be bracketed: only the
whole of it is (`compute_ranges.BlockRanges`), and the waits inside follow from the order in which DDP waits, which is
that of issue. Must not wait for a collective, or read a mark.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from aorta.instrument.event_clock import Mark
from aorta.records.progress_file import NOWHERE
from aorta.records.schema import Collective, EndSource, Wait
from aorta.timeline.intervals import Interval

NO_STREAM: Final = "the device has no stream left to time them on"
STACKED_IN_A_BATCH: Final = (
    "they take lists of tensors and were launched together with others, and only the caller's own wait may release the "
    "tensors in which the backend stacks such lists"
)


class Completion(Protocol):
    """The end of a collective as recorded by compiled code (`native.native_interceptor`)."""

    def ended(self) -> tuple[int, EndSource] | None:
        """Return when the collective ended, on the clock of `time.perf_counter_ns`, and what reported it; None while in
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
        noted: its index in the rank's progress file.
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
    noted: int = NOWHERE
    alive: Any = field(default=None, repr=False)
    has_completed: Callable[[], bool] | None = field(default=None, repr=False)
    completion: Completion | None = field(default=None, repr=False)

    def look(self) -> bool:
        """Return whether its end is known; queries the backend's own time stamp if there is one."""
        if self.end is None and self.completion is not None and (ended := self.completion.ended()):
            self.end, self.end_source = ended
            self.completion = None
        return self.end is not None

    def stamp(self, source: EndSource, at_ns: int | None = None) -> None:
        """Stamp its end: now, or `at_ns` of the host's clock; the first call counts. Not for a `completion`."""
        if self.end is None:
            self.end, self.end_source = time.perf_counter_ns() if at_ns is None else at_ns, source
            self.has_completed = None


@dataclass(frozen=True)
class Group:
    """A process group: its global ranks, and how many of its collectives a CPU backend runs at once."""

    ranks: tuple[int, ...]
    lanes: int


_STAMPED_LATE_NS = 1_000_000
"""How long after DDP continued the end of a collective may be stamped: the callback may have to wait for a core."""


class Name(NamedTuple):
    """A collective as rows name it. `kind` is that of a send or a receive, otherwise None."""

    group: str
    seq: int
    kind: str | None = None


class Waited(NamedTuple):
    """One wait of what computes, between two marks. `blocked`: the collective had not ended when it began, as far as
    the host knows (a device may always have to wait). `over`: it returned, and did not fail.
    """

    of: Name
    begin: Mark
    end: Mark
    blocked: bool = True
    over: bool = True


def name_of(issued: InFlight) -> Name:
    """Return the name of a collective."""
    return Name(issued.group, issued.seq, None if issued.number is not None else issued.kind)


def tail_waits(
    tails: Iterable[Interval], issued: Sequence[InFlight], rows: Sequence[Collective], named: set[Name], origin_ns: int
) -> list[tuple[Name, Interval]]:
    """Return DDP's waits at the end of its backward passes.

    DDP waits for its buckets one after another, in the order in which it issued them. It reaches the first when the
    last node has run, to each other one when the one before it has ended; copying gradients back lies between two
    waits and is part of the later one, or behind the last.

    Args:
        tails: the strategy's work at the end of each backward pass, in nanoseconds of the clock.
        issued, rows: the collectives of the step, and their rows in the same order.
        named: what was waited for otherwise; gets what is waited for here.
        origin_ns: start of the step.
    """
    found = []
    for begin_ns, end_ns in tails:
        at_ns = begin_ns
        for flight, row in zip(issued, rows, strict=True):
            name = name_of(flight)
            if not flight.by_future or name in named or row.end_ns is None or flight.issue_ns > end_ns:
                continue
            over_ns = row.end_ns + origin_ns
            if over_ns > end_ns + _STAMPED_LATE_NS:
                continue  # nobody waited for it here
            named.add(name)
            leave_ns = min(max(at_ns, over_ns), end_ns)
            found.append((name, (at_ns, leave_ns)))
            at_ns = leave_ns
    return found


def wait_rows(waits: Iterable[tuple[Name, Interval]], origin_ns: int) -> list[Wait]:
    """Return the rows of a step, in order of time."""
    ordered = sorted(waits, key=lambda wait: wait[1])
    return [
        Wait(name.group, name.seq, begin_ns - origin_ns, end_ns - origin_ns, name.kind)
        for name, (begin_ns, end_ns) in ordered
    ]
