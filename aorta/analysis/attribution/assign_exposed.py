"""Assigns each nanosecond of a step's exposed communication to one collective.

Takes the exposed spans of one step of one rank and the collectives that touch them, and yields disjoint pieces that
together are exactly the exposed time of `aorta.timeline`.

The rule when several collectives are in flight: an exposed stretch ends when computation resumes, when the last
collective ends, or with the step. A collective that is still in flight at that moment is not what the rank was waiting
for. So each nanosecond goes to a collective that ends inside its stretch; among several of those, to the one that
started first, because the others queue behind it on the link; and to one that outlasts the stretch only where no other
is in flight. Must not: assign a nanosecond twice, or leave one out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from aorta.analysis.attribution.keys import BUBBLE_PART, TRANSFER, UNKNOWN_PART, WAIT
from aorta.timeline.intervals import Interval, intersect, subtract


class CollectiveSpan(NamedTuple):
    """One collective on one rank, in absolute nanoseconds of the rank's clock. `wait_ns` is how long it waited for its
    peers, negative where that is not known.
    """

    start: int
    end: int
    kind: str
    group: str
    bytes: int
    order: int
    wait_ns: int


class AssignedTime(NamedTuple):
    """The exposed time assigned to one collective, as merged spans."""

    row: CollectiveSpan
    spans: list[Interval]


def assigned(exposed: Sequence[Interval], rows: Sequence[CollectiveSpan]) -> Iterator[AssignedTime]:
    """Assign each exposed nanosecond to one collective, by the rule above. `exposed` must be merged and covered by
    `rows`.
    """
    coming = sorted(rows, key=lambda row: (row.start, row.end, row.order))
    live: list[CollectiveSpan] = []
    at = 0
    for stretch in exposed:
        while at < len(coming) and coming[at].start < stretch[1]:
            live.append(coming[at])
            at += 1
        live = [row for row in live if row.end > stretch[0]]
        left = [stretch]
        for row in sorted(
            live, key=lambda row: row.end > stretch[1]
        ):  # a stable sort: equal keys stay ordered by start
            span = [(row.start, row.end)]
            if mine := intersect(left, span):
                yield AssignedTime(row, mine)
                left = subtract(left, span)
            if not left:
                break


def parts(piece: AssignedTime, bubbles: Sequence[Interval] = ()) -> Iterator[tuple[str, list[Interval]]]:
    """Split exposed time into bubbles of a pipeline (merged), and the rest into waiting and transfer. A rank that
    arrives early waits first, for `CollectiveSpan.wait_ns`.
    """
    row, rest = piece.row, piece.spans
    if bubbles and (inside := intersect(rest, bubbles)):
        yield BUBBLE_PART, inside
        rest = subtract(rest, inside)
    if row.wait_ns < 0:
        if rest:
            yield UNKNOWN_PART, rest
        return
    waiting = [(row.start, row.start + row.wait_ns)] if row.wait_ns else []
    for name, spans in ((WAIT, intersect(rest, waiting)), (TRANSFER, subtract(rest, waiting))):
        if spans:
            yield name, spans
