"""Says why a rank is late, or a side slower: which part of the step differs, and where in the step it lies.

    rank_times(run)           # per rank: compute, idle, wait, aux and exposed time, medians over steps
    because(run, straggler, rank_times(run))
    # rank 1 idles 28 ms more a step between backward and optimizer: code outside timed blocks

A rank is compared with the median of its peers. Waiting and exposed time are what the others suffer, so only compute,
idle and auxiliary time can be a cause. Must not: name a part that does not make up most of the difference, or hold more
than `SAMPLED_STEPS` steps of intervals of one rank at once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, TypeVar

import numpy as np

from aorta.analysis.documents import known
from aorta.analysis.documents.comparison import Comparison
from aorta.analysis.documents.dataset import RankTimes, Straggler
from aorta.analysis.formatting import TEXT
from aorta.analysis.frames import NO_TIME, NOWHERE, Lane
from aorta.analysis.metrics import JOB_STEP
from aorta.analysis.run import RankTables, Run
from aorta.timeline.intervals import Interval, clip, merge, subtract
from aorta.timeline.overlap import NS_PER_MS

SAMPLED_STEPS: Final = 16
"""The last of a rank after warm-up, of which intervals are read again."""
LEAST_SHARE: Final = 0.02
"""Of the step: what differs by less explains nothing that anyone would notice."""
MOST: Final = 0.5
"""Share of a difference from which on a part is named as its reason."""
_COLUMNS: Final = {
    "compute_ms": "compute_ms",
    "idle_ms": "idle_ms",
    "wait_ms": "compute_stall_ms",
    "aux_ms": "aux_ms",
    "exposed_ms": "exposed_comm_ms",
}
_CAUSES: Final = ("compute_ms", "idle_ms", "aux_ms")
_START, _END = "the start of the step", "the end of the step"


def rank_times(run: Run) -> list[RankTimes]:
    """Return one row per rank: medians over the steps used; None where no step has the metric."""
    return [
        RankTimes(rank, *(_median(tables, column) for column in _COLUMNS.values()))
        for rank, tables in run.ranks.items()
    ]


def _median(tables: RankTables, column: str) -> float | None:
    values = tables.steps.column(column)[tables.steps.used]
    values = values[~np.isnan(values)]
    return float(np.median(values)) if len(values) else None


@dataclass(frozen=True)
class SampledStep:
    """One step of a rank, in ns from its start. `ranges` are passes of blocks as (phase, block) and work outside them
    as (name, None), in order of time; `collectives` are those in flight as (kind, group); stalls are no computation.
    """

    global_step: int
    length_ns: int
    computing: list[Interval]
    ranges: list[tuple[int, int, tuple[str, str | None]]]
    collectives: list[tuple[int, int, tuple[str, str]]]

    def idle(self) -> list[Interval]:
        """Return the time in which nothing ran that the record names."""
        window = (0, self.length_ns)
        busy = [(start, end) for start, end, _ in (*self.ranges, *self.collectives)]
        return subtract([window], merge(clip([*busy, *self.computing], window)))


def sampled_steps(tables: RankTables) -> Iterator[SampledStep]:
    """Yield the last steps of a rank after warm-up.

    Raises:
        InputError: the record cannot be read again.
    """
    steps, rows = tables.steps, tables.collectives
    places = np.flatnonzero(steps.used)[-SAMPLED_STEPS:]
    if not len(places):
        return
    spans = tables.details.spans(places)
    for at, place in enumerate(places.tolist()):
        length_ns = int(steps.length_ns[place])
        mine, inside = rows.of_step(place), spans.of_step(at)
        timed = np.flatnonzero((mine.start_ns != NO_TIME) & (mine.end_ns != NO_TIME) & (mine.start_ns < mine.end_ns))
        names = [(name.kind, name.group) for name in mine.names]
        flights = zip(
            mine.start_ns[timed].tolist(), mine.end_ns[timed].tolist(), mine.name[timed].tolist(), strict=True
        )
        window = (0, length_ns)
        computing = inside.of_lanes(Lane.COMPUTE).intervals()
        stalled = inside.of_lanes(Lane.STALL, Lane.HAND_OVER).intervals()
        named = inside.of_lanes(Lane.COMPUTE, Lane.AUX)
        regions = [spans.names[name].region for name in named.name.tolist()]
        ranges = zip(named.start_ns.tolist(), named.end_ns.tolist(), regions, strict=True)
        yield SampledStep(
            int(steps.global_step[place]),
            length_ns,
            subtract(merge(clip(computing, window)), merge(clip(stalled, window))),
            sorted(part for part in ranges if part[2] != NOWHERE and part[0] < part[1]),
            [(start, end, names[name]) for start, end, name in flights],
        )


def idle_places(tables: RankTables) -> dict[tuple[str, str], float]:
    """Return (what came before, what came after) -> idle milliseconds a step there; empty where the source names no
    ranges. Passes of blocks are called by their phase.

    Raises:
        InputError: the record cannot be read again.
    """
    found: Counter[tuple[str, str]] = Counter()
    count = 0
    for step in sampled_steps(tables):
        count += 1
        starts, ends = [start for start, _, _ in step.ranges], sorted((end, name) for _, end, (name, _) in step.ranges)
        for start, end in step.idle() if step.ranges else ():
            before = bisect_right(ends, (start, "\uffff")) - 1
            after = bisect_left(starts, end)
            edges = (
                ends[before][1] if before >= 0 else _START,
                step.ranges[after][2][0] if after < len(starts) else _END,
            )
            found[edges] += end - start
    return {edges: length / count / NS_PER_MS for edges, length in found.items()}


def _regions(tables: RankTables, *, blocks: bool) -> dict[tuple[str, str | None], float]:
    """Return milliseconds a step in each pass of each block, or in work outside the blocks."""
    found: Counter[tuple[str, str | None]] = Counter()
    count = 0
    for step in sampled_steps(tables):
        count += 1
        for start, end, (name, block) in step.ranges:
            if (block is not None) == blocks:
                found[name, block] += end - start
    return {region: length / count / NS_PER_MS for region, length in found.items()}


def because(run: Run, straggler: Straggler, times: Sequence[RankTimes]) -> str | None:
    """Return why a straggler is late: what it does longer than its peers, and where in the step. None where no part of
    the step makes up most of what differs, or nobody is named.

    Args:
        times: `rank_times` of the run.

    Raises:
        InputError: the record cannot be read again.
    """
    rank = straggler.rank
    peers = [peer for peer in straggler.group_ranks if peer != rank and peer in run.ranks]
    if rank is None or rank not in run.ranks or not peers:
        return None
    rows = {row.rank: row for row in times if row.rank in (rank, *peers)}
    longer: dict[str, float] = {}
    for name in _CAUSES:
        own, others = getattr(rows[rank], name), [getattr(rows[peer], name) for peer in peers]
        if own is not None and None not in others:
            longer[name] = own - median(others)
    positive = {name: value for name, value in longer.items() if value > 0}
    step_ms = _median(run.ranks[rank], "window_ms")
    if not positive or step_ms is None:
        return None
    name = max(positive, key=positive.__getitem__)
    most_ms = positive[name]
    if most_ms < LEAST_SHARE * step_ms or most_ms < MOST * sum(positive.values()):
        return None
    middle = sorted(peers, key=lambda peer: getattr(rows[peer], name))[len(peers) // 2]
    said = f"rank {rank} {{}} {TEXT.quantity(most_ms, 'ms')} more a step"
    ours, theirs = run.ranks[rank], run.ranks[middle]
    if name == "idle_ms":
        between = _where(idle_places(ours), idle_places(theirs), most_ms)
        place = "" if between is None else f" between {between[0]} and {between[1]}: code outside timed blocks"
        return said.format("idles") + place
    blocks = name == "compute_ms"
    region = _where(_regions(ours, blocks=blocks), _regions(theirs, blocks=blocks), most_ms)
    if blocks:
        return said.format("computes") + ("" if region is None else f", most of it in {region[0]} of {region[1]}")
    return said.format("spends") + (" on work outside its blocks" if region is None else f" in {region[0]}")


_Key = TypeVar("_Key")


def _where(own: Mapping[_Key, float], others: Mapping[_Key, float], most_ms: float) -> _Key | None:
    """Return the key that has most of a difference; None where none has."""
    longer = {key: value - others.get(key, 0.0) for key, value in own.items()}
    key = max(longer, key=longer.__getitem__, default=None)
    return key if key is not None and longer[key] >= MOST * most_ms else None


_PARTS: Final = {
    "exposed_comm_ms": "exposed communication",
    "compute_ms": "computation",
    "idle_ms": "idle time",
    "aux_ms": "work outside blocks (optimizer, clipping, data)",
}


def slower_side(comparison: Comparison) -> str | None:
    """Return which part of the step makes up most of a step time that is decided to be longer or shorter, from the
    medians of the comparison's table. None where step time is not decided, or no part makes up most of it.
    """
    step = comparison.metrics.get(JOB_STEP)
    if step is None or known(step.verdict) not in ("regression", "improvement") or not step.difference:
        return None
    changes = {
        name: entry.difference
        for name in _PARTS
        if (entry := comparison.metrics.get(name)) is not None and entry.difference is not None
    }
    same = {name: change for name, change in changes.items() if change * step.difference > 0}
    if not same:
        return None
    name = max(same, key=lambda each: abs(same[each]))
    if abs(same[name]) < MOST * abs(step.difference):
        return None
    return (
        f"the step takes {TEXT.quantity(abs(step.difference), 'ms')} {'longer' if step.difference > 0 else 'less'}, "
        f"{_PARTS[name]} {TEXT.quantity(same[name], 'ms', signed=True)} a rank"
    )
