"""The steps of one rank -> an `OfRank`: what an engine's processes do, one record at a time.

Enters: looks at steps, in order. Leaves: sums in whole nanoseconds that add up. Must not: believe its own measure over
the record's; where the rows do not explain what the record counts, the difference is a cell of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from aorta.analysis.attribution.cells import NOWHERE, ORDER_LIMIT, UNKNOWN_PART, UNTOLD, Cell, OfRank
from aorta.analysis.attribution.charging import Row, charged, exposure, parts
from aorta.analysis.attribution.looks import Look, RankSource, looks_of_record
from aorta.analysis.attribution.places import overlaid, tiled
from aorta.timeline.intervals import measure

_UNTOLD: Final = Cell(UNTOLD, "", None, -1, 0, None, None, UNKNOWN_PART)


def tally_record(source: RankSource) -> OfRank:
    """Read one record.

    Raises:
        InputError: it cannot be read again.
    """
    return tally(looks_of_record(source), source.sizes)


def tally(looks: Iterable[Look], sizes: Mapping[str, int]) -> OfRank:
    """Add up the steps after warm-up whose exposed communication is known. A collective that reaches into the next
    step counts there too, as it does in the record.
    """
    found = OfRank()
    spilling: list[Row] = []
    for look in looks:
        rows = [*spilling, *look.rows]
        spilling = [row for row in rows if row.end > look.window[1]]
        if not look.used:
            continue
        if look.exposed_ns < 0:
            found.sums.left_out += 1
            continue
        _take(found, look, rows, sizes)
    return found


def _take(found: OfRank, look: Look, rows: list[Row], sizes: Mapping[str, int]) -> None:
    lanes = exposure(look.window, rows, look.compute, look.stalls)
    tiles = tiled(look.window, look.ranges)
    for piece in charged(lanes.exposed, rows):
        row = piece.row
        order = min(row.order, ORDER_LIMIT)
        for part, spans in parts(piece):
            for tile, length in overlaid(tiles, spans):
                place = tile.place(row.kind)
                cell = Cell(row.kind, row.group, sizes.get(row.group), row.bytes, order, *place, part)
                found.cells[cell] += length
    for tile, length in overlaid(tiles, lanes.working):
        found.computing[tile.inside or NOWHERE] += length
    if missing := look.exposed_ns - measure(lanes.exposed):
        found.cells[_UNTOLD] += missing
    sums = found.sums
    sums.rank_steps += 1
    sums.window_ns += look.window[1] - look.window[0]
    sums.comm_ns += look.comm_ns if look.comm_ns >= 0 else measure(lanes.comm)
    sums.exposed_ns += look.exposed_ns
    sums.compute_ns += look.compute_ns if look.compute_ns >= 0 else measure(lanes.working)
