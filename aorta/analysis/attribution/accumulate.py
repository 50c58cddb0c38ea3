"""Adds up the exposed communication of one rank over its steps, by collective and by region of the step.

`accumulate` is what runs once per rank, in parallel on all ranks. It lays many steps on one axis, cuts it at every edge
of anything, and assigns each exposed cell to one collective and one region. Its sums are whole nanoseconds that add up
exactly.

The rule when several collectives are in flight: an exposed stretch ends when computation resumes, when the last
collective ends, or with the step. A collective that is still in flight at that moment is not what the rank was waiting
for. So each nanosecond goes to a collective that ends inside its stretch; among several of those, to the one that
started first, because the others queue behind it on the link; and to one that outlasts the stretch only where no other
is in flight.

Must not: assign a nanosecond twice or leave one out, hold more than `BLOCK_STEPS` steps of intervals in memory, or
trust its own measurement over the record's: exposed time that the record counts and its rows do not explain gets a key
of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from aorta.analysis.load.collective_costs import MOST_COUNTED, ordinals
from aorta.analysis.step_intervals import StepLanes, StepPart
from aorta.analysis.tables import NO_TIME, UNKNOWN, Bools, Floats, Ints, RankTables
from aorta.timeline.arrays import Spans, refuse_inverted
from aorta.timeline.overlap import NS_PER_MS

BRINGING: Final = frozenset({"allgather", "broadcast", "scatter", "recv"})
"""Kinds that deliver what the next block computes with; the others carry away what the last one computed."""
BLOCK_STEPS: Final = 256
METRICS: Final = ("comm_ms", "exposed_comm_ms", "compute_ms")
_UNEXPLAINED: Final = ExposedKey(UNEXPLAINED, "", None, -1, 0, None, None, UNKNOWN_PART)


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


def accumulate(given: RankInput) -> RankTotals:
    """Add up the steps after warm-up whose exposed communication is known. A collective that is still running when its
    step ends also counts in the next one, as it does in the record.

    Raises:
        InputError: the record cannot be read again.
        IntervalError: a collective, a compute range or a stall ends before it starts.
    """
    totals = RankTotals()
    steps = given.tables.steps
    known = _nanoseconds(steps.column("exposed_comm_ms")) >= 0
    totals.sums.left_out = int((steps.used & ~known).sum())
    places = np.flatnonzero(steps.used & known)
    flights = _flights(given)
    for first in range(0, len(places), BLOCK_STEPS):
        block = places[first : first + BLOCK_STEPS]
        _add(totals, given, block, given.tables.details.lanes_of(block), _of_steps(flights, block))
    return totals


def _nanoseconds(values_ms: Floats) -> Ints:
    """Convert the record's milliseconds back to the whole nanoseconds they were divided from; rounding is exact below
    2**52 ns.
    """
    return np.where(np.isnan(values_ms), UNKNOWN, np.rint(np.nan_to_num(values_ms) * NS_PER_MS)).astype(np.int64)


class Flights(NamedTuple):
    """Collectives in flight, a row a step and collective, by step: one that outlasts its step is in flight in the next,
    too. Times are on the rank's clock.

    Attributes:
        order: number of the collective among those of its step, kind and group, from 0.
        turn: its place in the order of the rule: who started first.
        name: code of kind, group and bytes in `names`.
        wait_ns: negative where it is not known.
    """

    step: Ints
    start_ns: Ints
    end_ns: Ints
    order: Ints
    turn: Ints
    name: Ints
    wait_ns: Ints

    def take(self, chosen: Ints | Bools | slice) -> Flights:
        """Select rows."""
        return Flights(*(column[chosen] for column in self))


def _flights(given: RankInput) -> Flights:
    """Return what was in flight in each step of a rank."""
    steps, rows = given.tables.steps, given.tables.collectives
    step = np.repeat(np.arange(len(steps)), steps.row_counts)
    timed = np.flatnonzero((rows.start_ns != NO_TIME) & (rows.end_ns != NO_TIME))
    kinds: dict[tuple[str, str], int] = {}
    kind = np.array([kinds.setdefault((name.kind, name.group), len(kinds)) for name in rows.names], np.int64)
    order = ordinals(step, kind[rows.name])[timed] % MOST_COUNTED
    step = step[timed]
    zero_ns = steps.start_mono_ns[step]
    start_ns, end_ns = rows.start_ns[timed] + zero_ns, rows.end_ns[timed] + zero_ns
    turn = _ranked(np.lexsort((order, end_ns, start_ns)))

    at = np.arange(len(timed))
    found = [(step, at)]
    while len(at):
        outlasts = (end_ns[at] > steps.end_mono_ns[step]) & (step + 1 < len(steps))
        at, step = at[outlasts], step[outlasts] + 1
        # Of those that outlast this step as well, only the first in turn can be what the rank waits for.
        whole = end_ns[at] > steps.end_mono_ns[step]
        first = np.full(len(steps), len(timed))
        np.minimum.at(first, step[whole], turn[at[whole]])
        kept = ~whole | (turn[at] == first[step])
        found.append((step[kept], at[kept]))
    step, at = (np.concatenate(column) for column in zip(*found, strict=True))
    by_step = np.argsort(step, kind="stable")
    step, at = step[by_step], at[by_step]
    return Flights(
        step,
        start_ns[at],
        end_ns[at],
        order[at],
        turn[at],
        rows.name[timed[at]].astype(np.int64),
        given.waits[timed[at]],
    )


def _of_steps(flights: Flights, places: Ints) -> Flights:
    """Return the flights of some steps; their `step` is then an index into `places`."""
    first, last = np.searchsorted(flights.step, [places[0], places[-1] + 1])
    mine = flights.take(slice(int(first), int(last)))
    at = np.searchsorted(places, mine.step)
    return mine._replace(step=at).take(places[at] == mine.step)


def _ranked(order: Ints) -> Ints:
    """Return the place of each element in an order of indices."""
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return place


class Axis:
    """Windows of steps side by side, a nanosecond apart, cut into cells at every edge of what is placed in them."""

    def __init__(self, length_ns: Ints) -> None:
        self.length_ns = length_ns
        self.zero_ns = np.cumsum(length_ns + 1) - length_ns - 1
        self._edges = [self.zero_ns, self.zero_ns + length_ns]

    def place(self, part: StepPart) -> tuple[Spans, Bools]:
        """Return intervals on the axis, cut at their windows, and which of them are not empty there."""
        zero, length = self.zero_ns[part.step], self.length_ns[part.step]
        start, end = zero + np.clip(part.start_ns, 0, length), zero + np.clip(part.end_ns, 0, length)
        kept = start < end
        placed = Spans(start[kept], end[kept])
        self._edges += placed
        return placed, kept

    def cut(self) -> None:
        """Make the cells, when everything is placed: their `edges`, their lengths, and the step of each."""
        edges = np.sort(np.concatenate(self._edges))
        self.edges = edges[np.diff(edges, prepend=-1) > 0]
        self.cell_ns = np.diff(self.edges)
        self.step = np.searchsorted(self.zero_ns, self.edges[:-1], side="right") - 1

    def cells(self, placed: Spans) -> Spans:
        """Return the first cell of each interval, and the one behind its last."""
        return Spans(np.searchsorted(self.edges, placed.start), np.searchsorted(self.edges, placed.end))

    def covered(self, placed: Spans) -> Bools:
        """Return which cells lie in any of these intervals."""
        opened, closed = (np.bincount(edge, minlength=len(self.edges)) for edge in self.cells(placed))
        inside: Bools = np.cumsum(opened - closed)[:-1] > 0
        return inside


def _first_covering(cells: int, ranges: Spans, order: Ints) -> Ints:
    """Return for each of so many cells the index of the range of cells that covers it and comes first in `order`; -1
    where none does. Each range is the union of two whose length is a power of two, which are halved until they are
    cells: linear in ranges and in cells, times the logarithm of the longest.
    """
    count, place = ranges.end - ranges.start, _ranked(order)
    best = np.full(cells, len(count))
    level = np.where(count > 0, np.frexp(count)[1] - 1, -1)
    for power in range(int(level.max(initial=-1)), -1, -1):
        mine = np.flatnonzero(level == power)
        np.minimum.at(best, ranges.start[mine], place[mine])
        np.minimum.at(best, ranges.end[mine] - (1 << power), place[mine])
        if half := (1 << power) >> 1:
            best[half:] = np.minimum(best[half:], best[:-half])
    first: Ints = np.append(order, -1)[best]
    return first


def _owners(cells: Spans, turn: Ints, outlasting: Bools, exposed: Bools) -> Ints:
    """Return to which collective each exposed cell belongs, by the rule above: an index into these columns.

    Args:
        cells: those that each collective covers in its window, at least one.
        outlasting: whether it is still in flight when its window ends.
    """
    number, last, by_turn = np.arange(len(exposed)), cells.end - 1, np.argsort(turn)
    stretch = np.maximum.accumulate(np.where(exposed, 0, number + 1))  # the first cell of the stretch of each cell
    ends = exposed[last] & ~outlasting
    ending = np.where(
        ends, np.maximum(cells.start, stretch[last]), cells.end
    )  # from here on it ends inside its stretch
    inside = _first_covering(len(exposed), Spans(ending, cells.end), by_turn)
    return np.where(inside >= 0, inside, _first_covering(len(exposed), Spans(cells.start, ending), by_turn))


def _places(innermost: Ints, step: Ints, bringing: Bools, cells: Ints) -> Ints:
    """Return the range to which exposed time in some cells belongs: the innermost round it; between two ranges of a
    step the later one for kinds in `BRINGING`, the earlier one for any other, and the only one where there is just one;
    -1 without any.
    """
    number = np.arange(len(innermost))
    before = np.maximum.accumulate(np.where(innermost >= 0, number, -1))
    after = np.minimum.accumulate(np.where(innermost >= 0, number, len(number))[::-1])[::-1]
    marked, steps = np.append(innermost, -1), np.append(step, -1)
    earlier, later = (
        np.where(steps[neighbour] == step[cells], marked[neighbour], -1) for neighbour in (before[cells], after[cells])
    )
    first, second = np.where(bringing, later, earlier), np.where(bringing, earlier, later)
    return np.where(first >= 0, first, second)


def _add(totals: RankTotals, given: RankInput, places: Ints, lanes: StepLanes, flights: Flights) -> None:
    """Add the steps at `places`; `lanes` and `flights` are theirs."""
    steps, names = given.tables.steps, given.tables.collectives.names
    zero_ns = steps.start_mono_ns[places]
    axis = Axis(steps.length_ns[places])
    parts = [StepPart(flights.step, *(edge - zero_ns[flights.step] for edge in (flights.start_ns, flights.end_ns)))]
    parts += [lanes.compute, lanes.stalls, lanes.bubbles]
    for spans in parts:
        refuse_inverted(spans.start_ns, spans.end_ns)
    (comm, kept), (compute, _), (stalls, _), (bubbles, _) = map(axis.place, parts)
    ranges, ranges_kept = axis.place(lanes.ranges)
    axis.cut()
    flights, begun_ns, ended_ns = flights.take(kept), parts[0].start_ns[kept], parts[0].end_ns[kept]

    working = axis.covered(compute) & ~axis.covered(stalls)
    communicating = axis.covered(comm)
    exposed = communicating & ~working
    innermost = _first_covering(len(exposed), axis.cells(ranges), np.lexsort((ranges.end, -ranges.start)))
    outlasting = ended_ns > axis.length_ns[flights.step]
    cells = np.flatnonzero(exposed)
    owner = _owners(axis.cells(comm), flights.turn, outlasting, exposed)[cells]
    mine, length_ns = flights.take(owner), axis.cell_ns[cells]
    bringing = np.array([name.kind in BRINGING for name in names], bool)[mine.name]
    region = np.append(lanes.region[ranges_kept], len(lanes.regions))
    where = region[_places(innermost, axis.step, bringing, cells)]

    passed_ns = axis.edges[cells] - axis.zero_ns[mine.step] - begun_ns[owner]
    waited_ns = np.clip(mine.wait_ns - passed_ns, 0, length_ns)
    in_bubble = axis.covered(bubbles)[cells]
    unknown = ~in_bubble & (mine.wait_ns < 0)
    known = ~in_bubble & ~unknown
    lengths = {WAIT: waited_ns * known, TRANSFER: (length_ns - waited_ns) * known}
    lengths |= {BUBBLE_PART: length_ns * in_bubble, UNKNOWN_PART: length_ns * unknown}
    order = np.minimum(mine.order, ORDER_LIMIT)
    packed = (mine.name * (ORDER_LIMIT + 1) + order) * (len(lanes.regions) + 1) + where
    keys, number = np.unique(packed, return_inverse=True)
    regions = [*lanes.regions, NOWHERE]
    for part, of_cells in lengths.items():
        for key, total in zip(keys.tolist(), _sums(number, of_cells, len(keys)), strict=True):
            if total:
                rest, place = divmod(key, len(regions))
                name = names[rest // (ORDER_LIMIT + 1)]
                size, nth = given.sizes.get(name.group), rest % (ORDER_LIMIT + 1)
                phase, block = regions[place]
                totals.exposed[ExposedKey(name.kind, name.group, size, name.bytes, nth, phase, block, part)] += total
    worked = _sums(region[innermost[working]], axis.cell_ns[working], len(regions))
    totals.computing.update({Region(*regions[place]): total for place, total in enumerate(worked) if total})

    def measured(lane: Bools) -> Ints:
        """Return the length of a lane in each step."""
        return np.array(_sums(axis.step[lane], axis.cell_ns[lane], len(places)), np.int64)

    comm_ns, exposed_ns, compute_ns = (_nanoseconds(steps.column(name))[places] for name in METRICS)
    if (missing := exposed_ns - measured(exposed)).any():
        totals.exposed[_UNEXPLAINED] += int(missing.sum())
    sums = totals.sums
    sums.rank_steps += len(places)
    sums.window_ns += int(axis.length_ns.sum())
    sums.comm_ns += int(np.where(comm_ns >= 0, comm_ns, measured(communicating)).sum())
    sums.exposed_ns += int(exposed_ns.sum())
    sums.compute_ns += int(np.where(compute_ns >= 0, compute_ns, measured(working)).sum())


def _sums(codes: Ints, values: Ints, size: int) -> list[int]:
    """Return the sum of the values of each code."""
    found = np.zeros(size, np.int64)
    np.add.at(found, codes, values)
    sums: list[int] = found.tolist()
    return sums
