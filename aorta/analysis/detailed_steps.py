"""Reads the last steps of a rank again, with all their intervals: what the frames of a run do not hold.

    for (before, after), idle_ms in idle_between(detailed_steps(tables)).items(): ...

Must not: hold more than `DETAILED_STEPS` steps of intervals of one rank at once, or say what they mean (`findings`
does).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from aorta.read.frames import NOWHERE, Lane
from aorta.read.run import RankTables
from aorta.timeline.intervals import Interval, clip, merge, subtract
from aorta.timeline.overlap import NS_PER_MS

DETAILED_STEPS: Final = 16
"""The last of a rank after warm-up, of which intervals are read again."""


class DetailedStep(NamedTuple):
    """One step of a rank, in ns from its start. `ranges` are passes of blocks as (phase, block), work outside them and
    copies to the host as (name, None), in order of time; `collectives` are those in flight as (kind, group); stalls are
    no computation.
    """

    global_step: int
    length_ns: int
    computing: list[Interval]
    ranges: list[tuple[int, int, tuple[str, str | None]]]
    collectives: list[tuple[int, int, tuple[str, str]]]


def detailed_steps(tables: RankTables) -> list[DetailedStep]:
    """Return the last steps of a rank after warm-up.

    Raises:
        InputError: the record cannot be read again.
    """
    steps, rows, detailed = tables.steps, tables.collectives, []
    indices = np.flatnonzero(steps.used)[-DETAILED_STEPS:]
    if not len(indices):
        return []
    spans = tables.details.spans(indices)
    for at, index in enumerate(indices.tolist()):
        window = (0, int(steps.length_ns[index]))
        own, inside = rows.of_step(index), spans.of_step(at)
        own = own.take(own.timed & (own.start_ns < own.end_ns))
        names = [(own.names[name].kind, own.names[name].group) for name in own.name.tolist()]
        stalled = merge(clip(inside.of_lanes(Lane.STALL, Lane.HAND_OVER).intervals(), window))
        named = inside.of_lanes(Lane.COMPUTE, Lane.AUX, Lane.COPY_TO_HOST)
        regions = [spans.names[name].region for name in named.name.tolist()]
        ranges: Any = zip(named.start_ns.tolist(), named.end_ns.tolist(), regions, strict=True)
        step = DetailedStep(
            int(steps.global_step[index]),
            window[1],
            subtract(merge(clip(inside.of_lanes(Lane.COMPUTE).intervals(), window)), stalled),
            sorted(part for part in ranges if part[2] != NOWHERE and part[0] < part[1]),
            list(zip(own.start_ns.tolist(), own.end_ns.tolist(), names, strict=True)),
        )
        detailed.append(step)
    return detailed


def idle_between(steps: Sequence[DetailedStep]) -> dict[tuple[str, str], float]:
    """Return (what came before, what came after) -> idle milliseconds a step there, in which nothing ran that the
    record names; empty where the source names no ranges. Passes of blocks are called by their phase.
    """
    idle_ns: Counter[tuple[str, str]] = Counter()
    for step in steps:
        if not step.ranges:
            continue
        window = (0, step.length_ns)
        busy = [(start, end) for start, end, _ in (*step.ranges, *step.collectives)]
        starts, ends = [start for start, _, _ in step.ranges], sorted((end, name) for _, end, (name, _) in step.ranges)
        for start, end in subtract([window], merge(clip([*busy, *step.computing], window))):
            before, after = bisect_right(ends, (start, "\uffff")) - 1, bisect_left(starts, end)
            first = ends[before][1] if before >= 0 else "the start of the step"
            then = step.ranges[after][2][0] if after < len(starts) else "the end of the step"
            idle_ns[first, then] += end - start
    return {edges: length_ns / len(steps) / NS_PER_MS for edges, length_ns in idle_ns.items()}
