"""Cuts the exposed communication of one rank into pieces: which collective, and where in its step.

`exposed_of` lays many steps on one axis, cuts it at every edge of anything, and assigns each exposed cell to one
collective and one region; cells that follow each other and differ in neither are one piece. Pieces are whole
nanoseconds that add up exactly; how much of one is waiting, only a match across ranks can tell.

The rule when several collectives are in flight: an exposed stretch ends when computation resumes, when the last
collective ends, or with the step. A collective that is still in flight at that moment is not what the rank was waiting
for. So each nanosecond goes to a collective that ends inside its stretch; among several of those, to the one that
started first, because the others queue behind it on the link; and to one that outlasts the stretch only where no other
is in flight.

Must not: assign a nanosecond twice or leave one out, or trust its own measurement over the record's: exposed time that
the record counts and its rows do not explain is summed apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from aorta.read.frames import (
    NOWHERE,
    UNKNOWN,
    Bools,
    Collectives,
    Exposed,
    Floats,
    Groups,
    Ints,
    Lane,
    Numbered,
    Region,
    Spans,
    Steps,
    declared,
)
from aorta.read.run import ExposedSums, Leaf
from aorta.timeline.arrays import IntervalArray, refuse_inverted
from aorta.timeline.overlap import NS_PER_MS

_Rows = TypeVar("_Rows", Collectives, Spans)
BRINGING: Final = frozenset({"allgather", "broadcast", "scatter", "recv"})
"""Kinds that deliver what the next block computes with; the others carry away what the last one computed."""
BLOCK_STEPS: Final = 256
"""Steps laid on one axis, which bounds the memory of its cells."""
ORDER_LIMIT: Final = 512
"""Collectives of one kind and group are distinguished by their order within a step up to here; later ones are counted
together.
"""


def exposed_of(steps: Steps, collectives: Collectives, spans: Spans) -> tuple[Exposed, ExposedSums]:
    """Return the exposed communication of the steps that aggregates use and that know it. A collective that is still
    running when its step ends also counts in the next one, as it does in the record.

    Args:
        spans: of all these steps.

    Raises:
        IntervalError: a collective, a compute range or a stall ends before it starts.
    """
    exposed_ns, compute_ns = (_nanoseconds(steps.column(name)) for name in ("exposed_comm_ms", "compute_ms"))
    known = exposed_ns >= 0
    indices = np.flatnonzero(steps.used & known)
    kinds, regions = Numbered(), Numbered({NOWHERE: 0})
    kind = np.array([kinds[name.kind, name.group] for name in collectives.names] or [0], np.int64)
    order = Groups(collectives.step, kind[collectives.name]).position
    rows, flights = _flights(steps, collectives, order)
    region = np.array([*(regions[name.region] for name in spans.names), 0])[spans.name]
    computing, leaves = np.zeros(len(regions), np.int64), Counter[Leaf]()
    pieces: list[tuple[npt.NDArray[Any], ...]] = [(np.empty(0, np.int64),) * 7]
    for first in range(0, len(indices), BLOCK_STEPS):
        block = indices[first : first + BLOCK_STEPS]
        flight, in_flight = _in_steps(flights, block)
        span, inside = _in_steps(spans, block)
        length_ns = steps.length_ns[block]
        of_block, rest = _pieces(length_ns, rows[flight], in_flight, inside, region[span], tuple(regions), computing)
        pieces.append(of_block)
        leaves += rest
    *columns, seen_exposed, seen_compute = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
    names = [name for name in declared(Exposed) if name != "order"]
    of_pieces: dict[str, Any] = dict(zip(names, columns, strict=True))
    of_pieces["order"] = np.minimum(order[of_pieces["row"]], ORDER_LIMIT)
    exposed_ns, compute_ns = exposed_ns[indices], compute_ns[indices]
    return Exposed(**of_pieces, regions=tuple(regions)), ExposedSums(
        rank_steps=len(indices),
        left_out=int((steps.used & ~known).sum()),
        window_ns=int(steps.length_ns[indices].sum()),
        exposed_ns=int(exposed_ns.sum()),
        compute_ns=int(np.where(compute_ns >= 0, compute_ns, seen_compute).sum()),
        unexplained_ns=int((exposed_ns - seen_exposed).sum()),
        computing=Counter({region: total for region, total in zip(regions, computing.tolist(), strict=True) if total}),
        leaves=leaves,
    )


def _in_steps(rows: _Rows, steps: Ints) -> tuple[Ints, _Rows]:
    """Return which rows belong to some steps, and these rows; `step` of them is an index into `steps`."""
    near = rows.rows_of(steps[0], steps[-1] + 1)
    index = np.searchsorted(steps, rows.step[near])
    chosen = steps[index] == rows.step[near]
    here = near.start + np.flatnonzero(chosen)
    return here, replace(rows.take(here), step=index[chosen])


def _nanoseconds(values_ms: Floats) -> Ints:
    """Convert the record's milliseconds back to the whole nanoseconds they were divided from, -1 where they are null;
    rounding is exact below 2**52 ns.
    """
    return np.where(np.isnan(values_ms), UNKNOWN, np.rint(np.nan_to_num(values_ms) * NS_PER_MS)).astype(np.int64)


def _flights(steps: Steps, rows: Collectives, order: Ints) -> tuple[Ints, Collectives]:
    """Return the collectives in flight in each step, in their turn: who started first. One that outlasts its step is in
    flight in the next, too. First which rows they are.
    """
    timed = np.flatnonzero(rows.timed)
    step = rows.step[timed].astype(np.int64)
    zero_ns = steps.start_mono_ns[step]
    start_ns, end_ns = rows.start_ns[timed] + zero_ns, rows.end_ns[timed] + zero_ns
    turn = np.argsort(np.lexsort((order[timed], end_ns, start_ns)))  # the place of each in that order

    indices = np.arange(len(timed))
    in_flight = [(step, indices)]
    while len(indices):
        outlasts = (end_ns[indices] > steps.end_mono_ns[step]) & (step + 1 < len(steps))
        indices, step = indices[outlasts], step[outlasts] + 1
        # Of those that outlast this step as well, only the first in turn can be what the rank waits for.
        whole = end_ns[indices] > steps.end_mono_ns[step]
        first = np.full(len(steps), len(timed))
        np.minimum.at(first, step[whole], turn[indices[whole]])
        kept = ~whole | (turn[indices] == first[step])
        in_flight.append((step[kept], indices[kept]))
    step, indices = (np.concatenate(parts) for parts in zip(*in_flight, strict=True))
    by_turn = np.lexsort((turn[indices], step))
    step, indices = step[by_turn], indices[by_turn]
    row, zero_ns = timed[indices], steps.start_mono_ns[step]
    began_ns, ended_ns = start_ns[indices] - zero_ns, end_ns[indices] - zero_ns
    return row, replace(rows.take(row), step=step, start_ns=began_ns, end_ns=ended_ns)


class _Axis:
    """Windows of steps side by side, a nanosecond apart, cut into cells at every edge of what is placed in them."""

    def __init__(self, length_ns: Ints) -> None:
        self.length_ns = length_ns
        self.zero_ns = np.cumsum(length_ns + 1) - length_ns - 1
        self._edges = [self.zero_ns, self.zero_ns + length_ns]

    def place(self, rows: Collectives | Spans) -> tuple[IntervalArray, Bools]:
        """Return rows as intervals on the axis, cut at their windows, and which of them are not empty there."""
        zero, length = self.zero_ns[rows.step], self.length_ns[rows.step]
        start, end = zero + np.clip(rows.start_ns, 0, length), zero + np.clip(rows.end_ns, 0, length)
        kept = start < end
        placed = IntervalArray(start[kept], end[kept])
        self._edges += placed
        return placed, kept

    def cut(self) -> None:
        """Make the cells, when everything is placed: their `edges`, their lengths, and the step of each."""
        edges = np.sort(np.concatenate(self._edges), kind="stable")  # of runs that are sorted, or nearly
        self.edges = edges[np.diff(edges, prepend=-1) > 0]
        self.cell_ns = np.diff(self.edges)
        self.step = np.searchsorted(self.zero_ns, self.edges[:-1], side="right") - 1

    def cells(self, placed: IntervalArray) -> IntervalArray:
        """Return the first cell of each interval, and the one behind its last."""
        return IntervalArray(np.searchsorted(self.edges, placed.start), np.searchsorted(self.edges, placed.end))

    def covered(self, placed: IntervalArray) -> Bools:
        """Return which cells lie in any of these intervals."""
        opened, closed = (np.bincount(edge, minlength=len(self.edges)) for edge in self.cells(placed))
        inside: Bools = np.cumsum(opened - closed)[:-1] > 0
        return inside


def _first_covering(cells: int, ranges: IntervalArray, order: Ints) -> Ints:
    """Return for each of so many cells the index of the range of cells that covers it and comes first in `order`; -1
    where none does. Each range is the union of two whose length is a power of two, which are halved until they are
    cells: linear in ranges and in cells, times the logarithm of the longest.
    """
    count, ranked = ranges.end - ranges.start, np.argsort(order)
    best = np.full(cells, len(count))
    level = np.where(count > 0, np.frexp(count)[1] - 1, -1)
    for power in range(int(level.max(initial=-1)), -1, -1):
        of_level = np.flatnonzero(level == power)
        np.minimum.at(best, ranges.start[of_level], ranked[of_level])
        np.minimum.at(best, ranges.end[of_level] - (1 << power), ranked[of_level])
        if half := (1 << power) >> 1:
            best[half:] = np.minimum(best[half:], best[:-half])
    first: Ints = np.append(order, -1)[best]
    return first


def _owners(cells: IntervalArray, outlasting: Bools, exposed: Bools) -> Ints:
    """Return to which collective each exposed cell belongs, by the rule above: an index into these columns.

    Args:
        cells: those that each collective covers in its window, at least one; collectives of a step are in their turn.
        outlasting: whether it is still in flight when its window ends.
    """
    number, last, by_turn = np.arange(len(exposed)), cells.end - 1, np.arange(len(cells.end))
    stretch = np.maximum.accumulate(np.where(exposed, 0, number + 1))  # the first cell of the stretch of each cell
    ends = exposed[last] & ~outlasting
    ending = np.where(
        ends, np.maximum(cells.start, stretch[last]), cells.end
    )  # from here on it ends inside its stretch
    inside = _first_covering(len(exposed), IntervalArray(ending, cells.end), by_turn)
    return np.where(inside >= 0, inside, _first_covering(len(exposed), IntervalArray(cells.start, ending), by_turn))


def _innermost(axis: _Axis, ranges: IntervalArray) -> Ints:
    """Return for each cell the index of the range that covers it and began last; -1 where none does."""
    return _first_covering(len(axis.cell_ns), axis.cells(ranges), np.lexsort((ranges.end, -ranges.start)))


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


def _pieces(
    length_ns: Ints,
    rows: Ints,
    flights: Collectives,
    spans: Spans,
    region: Ints,
    regions: tuple[Region, ...],
    computing: Ints,
) -> tuple[tuple[npt.NDArray[Any], ...], Counter[Leaf]]:
    """Cut steps of these lengths.

    Args:
        flights: the collectives in flight in these steps; `rows`: which they are.
        region: of each of `spans`, an index into `regions`.
        computing: by region, to which the time computed there is added.

    Returns:
        The columns of `Exposed` but for `order`, and how long each step was exposed, and computed; and what the rest of
        the steps is.
    """

    def of_lanes(*lanes: Lane) -> IntervalArray:
        chosen = spans.of_lanes(*lanes)
        refuse_inverted(chosen.start_ns, chosen.end_ns)
        return axis.place(chosen)[0]

    def with_regions(chosen: Bools) -> tuple[IntervalArray, Ints]:
        placed, kept = axis.place(spans.take(chosen))
        return placed, region[chosen][kept]

    refuse_inverted(flights.start_ns, flights.end_ns)
    axis, lane = _Axis(length_ns), spans.lane
    comm, kept = axis.place(flights)
    compute, stalls = of_lanes(Lane.COMPUTE), of_lanes(Lane.STALL, Lane.HAND_OVER)
    bubbles, outside = of_lanes(Lane.BUBBLE), of_lanes(Lane.AUX)
    copies = of_lanes(Lane.COPY, Lane.COPY_TO_HOST)
    named = ((lane == Lane.COMPUTE) | (lane == Lane.AUX)) & (region != 0)
    ranges, range_region = with_regions(named)
    edges, edge_region = with_regions(named | (lane == Lane.COPY_TO_HOST))  # idle time lies between these
    loop_ranges, loop_region = with_regions(lane == Lane.RANGE)
    axis.cut()
    rows, flights = rows[kept], flights.take(kept)

    stalled, in_bubble = axis.covered(stalls), axis.covered(bubbles)
    working = axis.covered(compute) & ~stalled
    communicating = axis.covered(comm)
    exposed = communicating & ~working
    innermost = _innermost(axis, ranges)
    outlasting = flights.end_ns > axis.length_ns[flights.step]
    cells = np.flatnonzero(exposed)
    owner = _owners(axis.cells(comm), outlasting, exposed)[cells]
    bringing = np.array([name.kind in BRINGING for name in flights.names] or [False], bool)[flights.name]
    range_region = np.append(range_region, 0)  # the last for cells that nothing covers
    where = range_region[_places(innermost, axis.step, bringing[owner], cells)]
    np.add.at(computing, range_region[innermost[working]], axis.cell_ns[working])

    from_ns = axis.edges[cells] - axis.zero_ns[flights.step[owner]] - flights.start_ns[owner]
    alike = np.stack([cells - np.arange(len(cells)), owner, where, in_bubble[cells]])
    start = np.flatnonzero(np.append(True, (np.diff(alike, axis=1) != 0).any(axis=0))[: len(cells)])
    to_ns = from_ns[start] + (np.add.reduceat(axis.cell_ns[cells], start) if len(start) else start)
    exposed_ns, compute_ns = np.zeros((2, len(length_ns)), np.int64)
    np.add.at(exposed_ns, axis.step[exposed], axis.cell_ns[exposed])
    np.add.at(compute_ns, axis.step[working], axis.cell_ns[working])
    columns = (
        *(rows[owner][start], where[start], from_ns[start], to_ns, in_bubble[cells][start]),
        *(exposed_ns, compute_ns),
    )

    # The nanosecond between two windows is in none.
    rest = (axis.edges[:-1] < axis.zero_ns[axis.step] + axis.length_ns[axis.step]) & ~exposed
    leaves, words = Counter[Leaf](), [region.phase or "" for region in regions]
    phase = range_region[innermost]
    # A range of the loop tells what a step does there, unless the model computes in it: then its edges tell more.
    computed, cells_of = np.append(0, np.cumsum(working)), axis.cells(loop_ranges)
    narrow = computed[cells_of.end] == computed[cells_of.start]
    in_loop = _innermost(axis, IntervalArray(*(times[narrow] for times in loop_ranges)))
    of_loop = np.append(loop_region[narrow], 0)[in_loop]
    for leaf, covered, word in (
        (Leaf("computation", hides=True), working & communicating, phase),
        (Leaf("computation"), working, phase),
        (Leaf("outside blocks"), axis.covered(outside) & ~stalled, phase),
        (Leaf("copies"), axis.covered(copies), np.zeros_like(phase)),
        (Leaf("bubble"), in_bubble, np.zeros_like(phase)),
        (Leaf("range"), of_loop != 0, of_loop),
    ):
        own = np.flatnonzero(covered & rest)
        rest[own] = False
        for code, sum_ns in _sums(word[own], axis.cell_ns[own]):
            leaves[leaf._replace(name=words[code])] += sum_ns
    leaves += _idle(axis, np.flatnonzero(rest), edges, [words[index] for index in edge_region.tolist()])
    return columns, leaves


def _sums(key: Ints, values: Ints) -> Iterator[tuple[int, int]]:
    groups = Groups(key)
    yield from zip(key[groups.first].tolist(), groups.reduce(np.add, values).tolist(), strict=True)


def _idle(axis: _Axis, cells: Ints, ranges: IntervalArray, names: Sequence[str]) -> Counter[Leaf]:
    """Return the nanoseconds of idle cells by what ran before and after in the same step: the range that ended last,
    and the one that begins next.
    """
    numbered = Numbered({"start": 0, "end": 1})
    number = np.array([*map(numbered.__getitem__, names), 0], np.int64)
    opened, closed = (np.append(np.argsort(edge, kind="stable"), -1) for edge in ranges)
    before = closed[np.searchsorted(ranges.end[closed[:-1]], axis.edges[cells], side="right") - 1]
    after = opened[np.searchsorted(ranges.start[opened[:-1]], axis.edges[cells + 1], side="left")]
    step = np.append(np.searchsorted(axis.zero_ns, ranges.start, side="right") - 1, -1)
    first = np.where(step[before] == axis.step[cells], number[before], 0)
    then = np.where(step[after] == axis.step[cells], number[after], 1)
    known = list(numbered)
    return Counter(
        {
            Leaf("idle", f"{known[pair // len(known)]} .. {known[pair % len(known)]}"): total
            for pair, total in _sums(first * len(known) + then, axis.cell_ns[cells])
        }
    )
