"""Adds up the exposed communication of one rank over its steps, by collective and by region of the step.

`accumulate` is what runs once per rank, in parallel on all ranks. It reads one step after another (`steps_of`), covers
each window with regions (`tiled`), and assigns each exposed nanosecond to one collective (`assigned`) and one region.
Its sums are whole nanoseconds that add up exactly.

The rule when several collectives are in flight: an exposed stretch ends when computation resumes, when the last
collective ends, or with the step. A collective that is still in flight at that moment is not what the rank was waiting
for. So each nanosecond goes to a collective that ends inside its stretch; among several of those, to the one that
started first, because the others queue behind it on the link; and to one that outlasts the stretch only where no other
is in flight.

Must not: assign a nanosecond twice or leave one out, hold more than one step of intervals in memory, or trust its own
measurement over the record's: exposed time that the record counts and its rows do not explain gets a key of its own.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from aorta.analysis.attribution.keys import (
    BUBBLE_PART,
    NOWHERE,
    ORDER_LIMIT,
    TRANSFER,
    UNEXPLAINED,
    UNKNOWN_PART,
    WAIT,
    ExposedKey,
    RankTotals,
    Region,
)
from aorta.analysis.tables import NO_TIME, UNKNOWN, Floats, Ints, RankTables
from aorta.timeline.classes import BUBBLE
from aorta.timeline.intervals import Interval, intersect, measure, subtract
from aorta.timeline.overlap import NS_PER_MS, exposure

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
        """Return the region to which exposed time of a collective of that kind belongs here.

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
        return _without_overlap(window, known)
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


def _without_overlap(window: Interval, known: Sequence[tuple[int, int, Region]]) -> list[Tile]:
    """Return the same, in one pass, for ranges that do not overlap, as in most models."""
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


METRICS = ("comm_ms", "exposed_comm_ms", "compute_ms")


@dataclass(frozen=True)
class RankInput:
    """One rank with what only a match across ranks could tell; it can be pickled for another process.

    Attributes:
        waits: wait of each collective in ns, in the order of its rows; negative where it is not known.
        sizes: group name, as this rank uses it -> number of ranks.
    """

    tables: RankTables
    waits: Ints
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, tables: RankTables, waits: Ints, sizes: Mapping[str, int]) -> RankInput:
        """Keep only the columns that attribution reads."""
        metrics = {name: tables.steps.column(name) for name in METRICS}
        return cls(replace(tables, steps=replace(tables.steps, metrics=metrics, losses={})), waits, sizes)

    def size_bytes(self) -> int:
        """Return the bytes that will be read again from disk."""
        return self.tables.details.size_bytes()

    def absolute(self) -> RankInput:
        """Return the same with absolute paths, for workers with another working directory."""
        return replace(self, tables=replace(self.tables, details=self.tables.details.absolute()))


@dataclass(frozen=True)
class StepRows:
    """One step. `used` as in `tables.Steps`. The communication times are those of the tables, `UNKNOWN` where null;
    `regions` are compute ranges and work outside the blocks.
    """

    window: Interval
    used: bool
    comm_ns: int
    exposed_ns: int
    compute_ns: int
    rows: list[CollectiveSpan]
    compute: list[Interval]
    stalls: list[Interval]
    regions: list[tuple[int, int, Region]]
    bubbles: list[Interval] = field(default_factory=list)


def steps_of(given: RankInput) -> Iterator[StepRows]:
    """Yield every step of a rank.

    Raises:
        InputError: the intervals of a step can no longer be read.
    """
    steps = given.tables.steps
    comm_ns, exposed_ns, compute_ns = (_nanoseconds(steps.column(name)).tolist() for name in METRICS)
    starts, ends, used = steps.start_mono_ns.tolist(), steps.end_mono_ns.tolist(), steps.used.tolist()
    for at, inside in enumerate(given.tables.details.steps()):
        zero = starts[at]
        blocks = [
            (zero + part.start_ns, zero + part.end_ns, Region(part.phase, part.block)) for part in inside.compute or ()
        ]
        beside = [(zero + part.start_ns, zero + part.end_ns, Region(part.name, None)) for part in inside.aux or ()]
        yield StepRows(
            (zero, ends[at]),
            used[at],
            comm_ns[at],
            exposed_ns[at],
            compute_ns[at],
            rows=_rows(given, at, zero),
            compute=[(zero + start, zero + end) for start, end in inside.computing()],
            stalls=[(zero + part.start_ns, zero + part.end_ns) for part in inside.stalls or ()],
            regions=[*blocks, *beside],
            bubbles=[(zero + start, zero + end) for start, end in inside.lane(BUBBLE)],
        )


def _rows(given: RankInput, at: int, zero: int) -> list[CollectiveSpan]:
    rows = given.tables.steps.rows_of(at, at + 1)
    mine, waits = given.tables.collectives.take(rows), given.waits[rows]
    orders: Counter[tuple[str, str]] = Counter()
    found: list[CollectiveSpan] = []
    for name, start, end, wait in zip(
        mine.name.tolist(), mine.start_ns.tolist(), mine.end_ns.tolist(), waits.tolist(), strict=True
    ):
        kind, group, size, _, _ = mine.names[name]
        if NO_TIME not in (start, end):
            found.append(CollectiveSpan(zero + start, zero + end, kind, group, size, orders[kind, group], wait))
        orders[kind, group] += 1
    return found


def _nanoseconds(values_ms: Floats) -> Ints:
    """Convert the record's milliseconds back to the whole nanoseconds they were divided from; rounding is exact below
    2**52 ns.
    """
    return np.where(np.isnan(values_ms), UNKNOWN, np.rint(np.nan_to_num(values_ms) * NS_PER_MS)).astype(np.int64)


_UNEXPLAINED: Final = ExposedKey(UNEXPLAINED, "", None, -1, 0, None, None, UNKNOWN_PART)


def accumulate(given: RankInput) -> RankTotals:
    """Add up the steps after warm-up whose exposed communication is known. A collective that is still running when its
    step ends also counts in the next one, as it does in the record.

    Raises:
        InputError: the record cannot be read again.
    """
    found = RankTotals()
    spilling: list[CollectiveSpan] = []
    for step in steps_of(given):
        rows = [*spilling, *step.rows]
        spilling = [row for row in rows if row.end > step.window[1]]
        if not step.used:
            continue
        if step.exposed_ns < 0:
            found.sums.left_out += 1
            continue
        _take(found, step, rows, given.sizes)
    return found


def _take(totals: RankTotals, step: StepRows, rows: list[CollectiveSpan], sizes: Mapping[str, int]) -> None:
    lanes = exposure(step.window, [(row.start, row.end) for row in rows], step.compute, step.stalls)
    tiles = tiled(step.window, step.regions)
    for piece in assigned(lanes.exposed, rows):
        row = piece.row
        order = min(row.order, ORDER_LIMIT)
        for part, spans in parts(piece, step.bubbles):
            for tile, length in overlaid(tiles, spans):
                phase, block = tile.region(row.kind)
                key = ExposedKey(row.kind, row.group, sizes.get(row.group), row.bytes, order, phase, block, part)
                totals.exposed[key] += length
    for tile, length in overlaid(tiles, lanes.working):
        totals.computing[tile.inside or NOWHERE] += length
    if missing := step.exposed_ns - measure(lanes.exposed):
        totals.exposed[_UNEXPLAINED] += missing
    sums = totals.sums
    sums.rank_steps += 1
    sums.window_ns += step.window[1] - step.window[0]
    sums.comm_ns += step.comm_ns if step.comm_ns >= 0 else measure(lanes.comm)
    sums.exposed_ns += step.exposed_ns
    sums.compute_ns += step.compute_ns if step.compute_ns >= 0 else measure(lanes.working)
