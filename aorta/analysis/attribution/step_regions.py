"""Divides a step into regions: inside a pass of a block, or between two of them.

Takes the window of a step and the ranges of blocks and of work outside the blocks, and returns tiles that cover the
window without gaps. Must not: know about communication, except which of its kinds deliver the input of what comes next.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from aorta.analysis.attribution.keys import NOWHERE, Region
from aorta.timeline.intervals import Interval

BRINGING: Final = frozenset({"allgather", "broadcast", "scatter", "recv"})
"""Kinds that deliver what the next block computes with; the others carry away what the last one computed."""


class Tile(NamedTuple):
    """A stretch of the window, inside one range or between two. Between two, `inside` is None and `before` and `after`
    are the nearest ranges on either side.
    """

    start: int
    end: int
    inside: Region | None
    before: Region | None
    after: Region | None

    def region(self, kind: str) -> Region:
        """The region to which exposed time of a collective of that kind belongs here.

        Inside a range it is that range (a stall always lies inside one). Between two it is the later one for the kinds
        in `BRINGING`, the earlier one for any other, and the only one where there is just one.
        """
        first, second = (self.after, self.before) if kind in BRINGING else (self.before, self.after)
        return self.inside or first or second or NOWHERE


def tiled(window: Interval, ranges: Iterable[tuple[int, int, Region]]) -> list[Tile]:
    """Cover the window with tiles. Where ranges nest, the innermost counts: the one that began last."""
    inward = [(max(start, window[0]), min(end, window[1]), place) for start, end, place in ranges]
    known = sorted((part for part in inward if part[0] < part[1]), key=lambda part: part[:2])
    if all(left[1] <= right[0] for left, right in pairwise(known)):
        return _apart(window, known)
    edges = sorted({*window, *(part[0] for part in known), *(part[1] for part in known)})
    inside: list[tuple[int, int, Region | None]] = []
    active: list[tuple[int, int, int]] = []  # latest start first; ended ones are removed lazily
    coming = 0
    for at, until in pairwise(edges):
        while coming < len(known) and known[coming][0] <= at:
            heapq.heappush(active, (-known[coming][0], coming, known[coming][1]))  # among equal starts the shortest
            coming += 1
        while active and active[0][2] <= at:
            heapq.heappop(active)
        place = known[active[0][1]][2] if active else None
        if inside and inside[-1][2] == place:
            inside[-1] = (inside[-1][0], until, place)
        else:
            inside.append((at, until, place))
    return _with_neighbours(inside)


def _apart(window: Interval, known: Sequence[tuple[int, int, Region]]) -> list[Tile]:
    """The same, in one pass, for ranges that do not overlap, as in most models."""
    found: list[Tile] = []
    at, before = window[0], None
    for start, end, place in known:
        if at < start:
            found.append(Tile(at, start, None, before, place))
        found.append(Tile(start, end, place, before, None))
        at, before = end, place
    if at < window[1]:
        found.append(Tile(at, window[1], None, before, None))
    return found


def _with_neighbours(inside: Sequence[tuple[int, int, Region | None]]) -> list[Tile]:
    after: list[Region | None] = []
    nearest: Region | None = None
    for _, _, place in reversed(inside):
        after.append(nearest)
        nearest = place or nearest
    found: list[Tile] = []
    nearest = None
    for (start, end, place), following in zip(inside, reversed(after), strict=True):
        found.append(Tile(start, end, place, nearest, following))
        nearest = place or nearest
    return found


def overlaid(tiles: Sequence[Tile], spans: Sequence[Interval]) -> Iterator[tuple[Tile, int]]:
    """Yield the tiles touched by sorted, disjoint spans inside the window, each with the nanoseconds of overlap. Linear
    time.
    """
    at = 0
    for start, end in spans:
        while tiles[at].end <= start:
            at += 1
        place = at
        while place < len(tiles) and tiles[place].start < end:
            yield tiles[place], min(end, tiles[place].end) - max(start, tiles[place].start)
            place += 1
