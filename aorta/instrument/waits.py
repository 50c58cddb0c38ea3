"""Waits for collectives: how the interceptors report them, and their rows in the record.

A wait on the host is bracketed where it happens. DDP waits in C++, on futures, where nothing can be bracketed: only the
whole of it is (`backward_end`), and the waits inside follow from the order in which DDP waits, which is that of issue.
Must not wait for anything, or read a mark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from aorta.instrument.event_clock import Mark
from aorta.instrument.in_flight import InFlight
from aorta.records.schema import Collective, Wait
from aorta.timeline.intervals import Interval

_STAMPED_LATE_NS = 1_000_000
"""How long after DDP went on the end of a collective may be stamped: the callback may have to wait for a core."""


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
    """Name of a collective."""
    return Name(issued.group, issued.seq, None if issued.number is not None else issued.kind)


def tail_waits(
    tails: Iterable[Interval], issued: Sequence[InFlight], rows: Sequence[Collective], named: set[Name], origin_ns: int
) -> list[tuple[Name, Interval]]:
    """DDP's waits at the end of its backward passes.

    DDP waits for its buckets one after another, in the order in which it issued them. It comes to the first when the
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


def wait_rows(found: Iterable[tuple[Name, Interval]], origin_ns: int) -> list[Wait]:
    """The rows of a step, in order of time."""
    ordered = sorted(found, key=lambda wait: wait[1])
    return [
        Wait(name.group, name.seq, begin_ns - origin_ns, end_ns - origin_ns, name.kind)
        for name, (begin_ns, end_ns) in ordered
    ]
