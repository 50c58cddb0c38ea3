"""Adds up the exposed communication of one rank over its steps, by collective and by region of the step.

`accumulate` is what runs once per rank, in parallel on all ranks. Its sums are whole nanoseconds that add up exactly.
Must not: trust its own measurement over the record's; exposed time that the record counts and its rows do not explain
gets a key of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from aorta.analysis.attribution.assign_exposed import CollectiveSpan, assigned, parts
from aorta.analysis.attribution.keys import NOWHERE, ORDER_LIMIT, UNEXPLAINED, UNKNOWN_PART, ExposedKey, RankTotals
from aorta.analysis.attribution.step_regions import overlaid, tiled
from aorta.analysis.attribution.step_rows import RankInput, StepRows, steps_of
from aorta.timeline.intervals import measure
from aorta.timeline.overlap import exposure

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


def _take(found: RankTotals, step: StepRows, rows: list[CollectiveSpan], sizes: Mapping[str, int]) -> None:
    lanes = exposure(step.window, [(row.start, row.end) for row in rows], step.compute, step.stalls)
    tiles = tiled(step.window, step.regions)
    for piece in assigned(lanes.exposed, rows):
        row = piece.row
        order = min(row.order, ORDER_LIMIT)
        for part, spans in parts(piece, step.bubbles):
            for tile, length in overlaid(tiles, spans):
                phase, block = tile.region(row.kind)
                key = ExposedKey(row.kind, row.group, sizes.get(row.group), row.bytes, order, phase, block, part)
                found.exposed[key] += length
    for tile, length in overlaid(tiles, lanes.working):
        found.computing[tile.inside or NOWHERE] += length
    if missing := step.exposed_ns - measure(lanes.exposed):
        found.exposed[_UNEXPLAINED] += missing
    sums = found.sums
    sums.rank_steps += 1
    sums.window_ns += step.window[1] - step.window[0]
    sums.comm_ns += step.comm_ns if step.comm_ns >= 0 else measure(lanes.comm)
    sums.exposed_ns += step.exposed_ns
    sums.compute_ns += step.compute_ns if step.compute_ns >= 0 else measure(lanes.working)
