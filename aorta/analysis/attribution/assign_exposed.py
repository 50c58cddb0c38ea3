"""One step of one rank -> which collective each exposed nanosecond is put down to.

Enters: the collectives that touch the window, computing, stalls. Leaves: pieces that are disjoint and together are
exactly the exposed time of `aorta.timeline`. Must not: give a nanosecond to two, or to none.

The rule where several collectives are in flight. An exposed stretch ends when computing goes on, when the last
collective ends, or with the window. A collective that is still in flight then is not what was waited for. So each
nanosecond goes to a collective that ends inside its stretch; where several do, to the one that started first, as the
others come after it on a link; and to one that outlasts the stretch only where no other is in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from aorta.analysis.attribution.keys import TRANSFER, UNKNOWN_PART, WAIT
from aorta.timeline.intervals import Interval, intersect, subtract


class CollectiveSpan(NamedTuple):
    """One collective on one rank, absolute nanoseconds. `wait_ns` below 0: not known how long it waited for peers."""

    start: int
    end: int
    kind: str
    group: str
    bytes: int
    order: int
    wait_ns: int


class AssignedTime(NamedTuple):
    """Exposed time of one row, merged spans."""

    row: CollectiveSpan
    spans: list[Interval]


def assigned(exposed: Sequence[Interval], rows: Sequence[CollectiveSpan]) -> Iterator[AssignedTime]:
    """Give each exposed nanosecond to one row, by the rule above. `exposed` is merged and covered by the rows."""
    coming = sorted(rows, key=lambda row: (row.start, row.end, row.order))
    live: list[CollectiveSpan] = []
    at = 0
    for stretch in exposed:
        while at < len(coming) and coming[at].start < stretch[1]:
            live.append(coming[at])
            at += 1
        live = [row for row in live if row.end > stretch[0]]
        left = [stretch]
        for row in sorted(live, key=lambda row: row.end > stretch[1]):  # stable: then by start
            span = [(row.start, row.end)]
            if mine := intersect(left, span):
                yield AssignedTime(row, mine)
                left = subtract(left, span)
            if not left:
                break


def parts(piece: AssignedTime) -> Iterator[tuple[str, list[Interval]]]:
    """Waiting and transfer: a rank that came early waits first, for as long as `CollectiveSpan.wait_ns` says."""
    row = piece.row
    if row.wait_ns < 0:
        yield UNKNOWN_PART, piece.spans
        return
    waiting = [(row.start, row.start + row.wait_ns)] if row.wait_ns else []
    for name, spans in ((WAIT, intersect(piece.spans, waiting)), (TRANSFER, subtract(piece.spans, waiting))):
        if spans:
            yield name, spans
