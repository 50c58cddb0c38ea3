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
from typing import Final

import numpy as np

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

BRINGING: Final = frozenset({"allgather", "broadcast", "scatter", "recv"})
"""Kinds that deliver what the next block computes with; the others carry away what the last one computed."""
BLOCK_STEPS: Final = 256
"""Steps laid on one axis, which bounds the memory of its cells."""
ORDER_LIMIT: Final = 512
"""Collectives of one kind and group are distinguished by their order within a step up to here; later ones are counted
together.
"""
METRICS: Final = ("comm_ms", "exposed_comm_ms", "compute_ms")


def exposed_of(steps: Steps, collectives: Collectives, spans: Spans) -> tuple[Exposed, ExposedSums]:
    """Return the exposed communication of the steps that aggregates use and that know it. A collective that is still
    running when its step ends also counts in the next one, as it does in the record.

    Args:
        spans: of all these steps.

    Raises:
        IntervalError: a collective, a compute range or a stall ends before it starts.
    """
    known = _nanoseconds(steps.column("exposed_comm_ms")) >= 0
    indices = np.flatnonzero(steps.used & known)
    order = _order_in_step(collectives)
    rows, flights = _flights(steps, collectives, order)
    regions: dict[Region, int] = {NOWHERE: 0}
    of_name = [regions.setdefault(name.region, len(regions)) for name in spans.names]
    region = np.array([*of_name, 0])[spans.name]
    computing, leaves = np.zeros(len(regions), np.int64), Counter[Leaf]()
    pieces, measured = [], np.zeros((3, len(steps)), np.int64)
    for first in range(0, len(indices), BLOCK_STEPS):
        block = indices[first : first + BLOCK_STEPS]
        near = flights.rows_of(block[0], block[-1] + 1)
        index = np.searchsorted(block, flights.step[near])
        ours = block[index] == flights.step[near]
        here = near.start + np.flatnonzero(ours)
        own = replace(flights.take(here), step=index[ours])
        of_block = _pieces(steps, block, rows[here], own, spans, region, tuple(regions), computing)
        leaves += of_block[2]
        pieces.append(of_block[0])
        measured[:, block] = of_block[1]
    comm_ns, exposed_ns, compute_ns = (_nanoseconds(steps.column(name))[indices] for name in METRICS)
    seen_comm, seen_exposed, seen_compute = measured[:, indices]
    columns = [np.concatenate(parts) for parts in zip(*pieces, strict=True)] or [np.empty(0, np.int64)] * 5
    names = [name for name in declared(Exposed) if name != "order"]
    of_pieces = dict(zip(names, columns, strict=True))
    of_pieces["order"] = np.minimum(order[of_pieces["row"]], ORDER_LIMIT)
    return Exposed(**of_pieces, regions=tuple(regions)), ExposedSums(
        rank_steps=len(indices),
        left_out=int((steps.used & ~known).sum()),
        window_ns=int(steps.length_ns[indices].sum()),
        comm_ns=int(np.where(comm_ns >= 0, comm_ns, seen_comm).sum()),
        exposed_ns=int(exposed_ns.sum()),
        compute_ns=int(np.where(compute_ns >= 0, compute_ns, seen_compute).sum()),
        unexplained_ns=int((exposed_ns - seen_exposed).sum()),
        computing=Counter({region: total for region, total in zip(regions, computing.tolist(), strict=True) if total}),
        leaves=leaves,
    )


def _nanoseconds(values_ms: Floats) -> Ints:
    """Convert the record's milliseconds back to the whole nanoseconds they were divided from, -1 where they are null;
    rounding is exact below 2**52 ns.
    """
    return np.where(np.isnan(values_ms), UNKNOWN, np.rint(np.nan_to_num(values_ms) * NS_PER_MS)).astype(np.int64)


def _order_in_step(rows: Collectives) -> Ints:
    """Return the number of each collective among those of its step, kind and group, from 0."""
    kinds: dict[tuple[str, str], int] = {}
    kind = np.array([kinds.setdefault((name.kind, name.group), len(kinds)) for name in rows.names] or [0], np.int64)
    return Groups(rows.step, kind[rows.name]).position


def _flights(steps: Steps, rows: Collectives, order: Ints) -> tuple[Ints, Collectives]:
    """Return the collectives in flight in each step, in their turn: who started first. One that outlasts its step is in
    flight in the next, too. First which rows they are.
    """
    timed = np.flatnonzero(rows.timed)
    step = rows.step[timed].astype(np.int64)
    zero_ns = steps.start_mono_ns[step]
    start_ns, end_ns = rows.start_ns[timed] + zero_ns, rows.end_ns[timed] + zero_ns
    turn = _ranked(np.lexsort((order[timed], end_ns, start_ns)))

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


def _ranked(order: Ints) -> Ints:
    """Return the place of each element in an order of indices."""
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order))
    return ranks


class _Axis:
    """Windows of steps side by side, a nanosecond apart, cut into cells at every edge of what is placed in them."""

    def __init__(self, length_ns: Ints) -> None:
        self.length_ns = length_ns
        self.zero_ns = np.cumsum(length_ns + 1) - length_ns - 1
        self._edges = [self.zero_ns, self.zero_ns + length_ns]

    def place(self, step: Ints, start_ns: Ints, end_ns: Ints) -> tuple[IntervalArray, Bools]:
        """Return intervals on the axis, cut at their windows, and which of them are not empty there."""
        zero, length = self.zero_ns[step], self.length_ns[step]
        start, end = zero + np.clip(start_ns, 0, length), zero + np.clip(end_ns, 0, length)
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
    count, ranked = ranges.end - ranges.start, _ranked(order)
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
    steps: Steps,
    indices: Ints,
    rows: Ints,
    flights: Collectives,
    spans: Spans,
    region: Ints,
    regions: tuple[Region, ...],
    computing: Ints,
) -> tuple[tuple[Ints | Bools, ...], Ints, Counter[Leaf]]:
    """Cut the steps at `places`.

    Args:
        flights: the collectives in flight in these steps; `rows`: which they are.
        region: of each of `spans`, an index into `regions`.
        computing: by region, to which the time computed there is added.

    Returns:
        The columns of `Exposed` but for `order`; a row each, how long each step communicated, was exposed, and
        computed; and what the rest of the steps is.
    """
    near = spans.rows_of(indices[0], indices[-1] + 1)
    index = np.searchsorted(indices, spans.step[near])
    here = indices[index] == spans.step[near]
    lane, of_step = spans.lane[near][here], index[here]
    span_start, span_end, region = spans.start_ns[near][here], spans.end_ns[near][here], region[near][here]

    def lanes(*wanted: Lane) -> tuple[Ints, Ints, Ints]:
        chosen = np.isin(lane, wanted)
        refuse_inverted(span_start[chosen], span_end[chosen])
        return of_step[chosen], span_start[chosen], span_end[chosen]

    refuse_inverted(flights.start_ns, flights.end_ns)
    axis = _Axis(steps.length_ns[indices])
    comm, kept = axis.place(flights.step, flights.start_ns, flights.end_ns)
    compute, stalls, bubbles, outside, copies = (
        axis.place(*lanes(*wanted))[0]
        for wanted in (
            (Lane.COMPUTE,),
            (Lane.STALL, Lane.HAND_OVER),
            (Lane.BUBBLE,),
            (Lane.AUX,),
            (Lane.COPY, Lane.COPY_TO_HOST),
        )
    )
    named = ((lane == Lane.COMPUTE) | (lane == Lane.AUX)) & (region != 0)
    ranges, ranges_kept = axis.place(of_step[named], span_start[named], span_end[named])
    edging = named | (lane == Lane.COPY_TO_HOST)  # idle time lies between these
    edges, edges_kept = axis.place(of_step[edging], span_start[edging], span_end[edging])
    of_loop = lane == Lane.RANGE
    loop_ranges, loop_kept = axis.place(of_step[of_loop], span_start[of_loop], span_end[of_loop])
    loop_region = region[of_loop][loop_kept]
    axis.cut()
    rows, flights = rows[kept], flights.take(kept)

    stalled = axis.covered(stalls)
    working = axis.covered(compute) & ~stalled
    communicating = axis.covered(comm)
    exposed = communicating & ~working
    innermost = _innermost(axis, ranges)
    outlasting = flights.end_ns > axis.length_ns[flights.step]
    cells = np.flatnonzero(exposed)
    owner = _owners(axis.cells(comm), outlasting, exposed)[cells]
    bringing = np.array([name.kind in BRINGING for name in flights.names] or [False], bool)[flights.name]
    edge_region = region[edging][edges_kept]
    region = np.append(region[named][ranges_kept], 0)  # the last for cells that nothing covers
    row = rows[owner]
    where = region[_places(innermost, axis.step, bringing[owner], cells)]
    in_bubble = axis.covered(bubbles)[cells]
    np.add.at(computing, region[innermost[working]], axis.cell_ns[working])

    from_ns = axis.edges[cells] - axis.zero_ns[flights.step[owner]] - flights.start_ns[owner]
    alike = np.stack([cells - np.arange(len(cells)), owner, where, in_bubble])
    start = np.flatnonzero(np.append(True, (np.diff(alike, axis=1) != 0).any(axis=0))[: len(cells)])
    length_ns = np.add.reduceat(axis.cell_ns[cells], start) if len(start) else start
    times = np.zeros((3, len(indices)), np.int64)
    for total, seen in zip(times, (communicating, exposed, working), strict=True):
        np.add.at(total, axis.step[seen], axis.cell_ns[seen])
    from_ns = from_ns[start]
    # The nanosecond between two windows is in none.
    rest = (axis.edges[:-1] < axis.zero_ns[axis.step] + axis.length_ns[axis.step]) & ~exposed
    leaves, words = Counter[Leaf](), [region.phase or "" for region in regions]
    phase = np.where(innermost >= 0, region[innermost], 0)
    for leaf, covered in (
        (Leaf("computation", hides=True), working & communicating),
        (Leaf("computation"), working),
        (Leaf("outside blocks"), axis.covered(outside) & ~stalled),
        (Leaf("copies"), axis.covered(copies)),
        (Leaf("bubble"), axis.covered(bubbles)),
    ):
        own = np.flatnonzero(covered & rest)
        rest[own] = False
        word = phase if leaf.part in ("computation", "outside blocks") else np.zeros_like(phase)
        for code, sum_ns in _sums(word[own], axis.cell_ns[own]):
            leaves[leaf._replace(name=words[code])] += sum_ns
    if len(loop_ranges.start):
        # Such a range tells what a step does there, unless the model computes in it: then its edges tell more.
        computed, cells_of = np.append(0, np.cumsum(working)), axis.cells(loop_ranges)
        narrow = computed[cells_of.end] == computed[cells_of.start]
        word = np.append(loop_region[narrow], 0)[_innermost(axis, IntervalArray(*(of[narrow] for of in loop_ranges)))]
        own = np.flatnonzero((word != 0) & rest)
        rest[own] = False
        for code, sum_ns in _sums(word[own], axis.cell_ns[own]):
            leaves[Leaf("range", words[code])] += sum_ns
    leaves += _idle(axis, np.flatnonzero(rest), edges, [words[index] for index in edge_region.tolist()])
    return (row[start], where[start], from_ns, from_ns + length_ns, in_bubble[start]), times, leaves


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
