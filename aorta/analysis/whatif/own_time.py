"""The own time of a rank as one axis: what it would have taken without waiting.

Every operation and every end of a span has a place on it. Changes that stretch, shrink or move a rank's own work are
made here, and written back as time before operations. Must not know about collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from aorta.analysis.tables import Bools, Ints
from aorta.analysis.whatif.program import Column, ProgramSpans, StepProgram, compact


@dataclass(frozen=True)
class OwnTime:
    """A step in own time since its BEGIN, nanoseconds.

    Attributes:
        at_ns: of each operation, shape (operations, ranks); 0 at BEGIN.
        begin_ns, end_ns: of each span.
    """

    at_ns: Ints
    begin_ns: Ints
    end_ns: Ints


def own_time(step: StepProgram) -> OwnTime:
    """The step on the axis of own time."""
    host = step.host_ns.astype(np.int64)
    host[0] = 0
    at_ns = np.cumsum(host, axis=0)
    spans = step.spans
    last = len(at_ns) - 1

    def place(after: Column, offset: Column) -> Ints:
        # No further than the operation behind it: the span ended there when it was recorded, too.
        found: Ints = at_ns[after, spans.rank] + offset
        behind: Ints = at_ns[np.minimum(after + 1, last), spans.rank]
        return np.where(after < last, np.minimum(found, behind), found)

    return OwnTime(
        at_ns,
        place(spans.begin_after, spans.begin_ns),
        place(spans.end_after, spans.end_ns),
    )


def with_own_time(step: StepProgram, own: OwnTime) -> StepProgram:
    """The same operations at other own times, which keep their order."""
    host = np.diff(own.at_ns, axis=0, prepend=0)
    host[0] = step.host_ns[0]
    spans = step.spans

    def offset(at_ns: Ints, after: Column) -> Ints:
        since: Ints = at_ns - own.at_ns[after, spans.rank]
        return np.maximum(since, 0)

    moved = ProgramSpans(
        spans.rank,
        spans.name,
        spans.begin_after,
        compact(offset(own.begin_ns, spans.begin_after)),
        spans.end_after,
        compact(offset(own.end_ns, spans.end_after)),
    )
    return replace(step, host_ns=compact(host), spans=moved)


def stretched(step: StepProgram, chosen: Bools, factor: float) -> StepProgram:
    """The own time inside some spans made `factor` times as long.

    Args:
        chosen: which spans, one element each.
    """
    own = own_time(step)
    ranks = step.host_ns.shape[1]
    starts, stops = _by_rank(step.spans.rank[chosen], own.begin_ns[chosen], own.end_ns[chosen], ranks)
    moved = _moved_by(starts, stops, factor)
    everyone = np.arange(ranks)
    return with_own_time(
        step,
        OwnTime(
            own.at_ns + moved(everyone[None, :], own.at_ns),
            own.begin_ns + moved(step.spans.rank, own.begin_ns),
            own.end_ns + moved(step.spans.rank, own.end_ns),
        ),
    )


def _by_rank(rank: Column, begin: Ints, end: Ints, ranks: int) -> tuple[Ints, Ints]:
    """Spans of each rank as a row, shape (ranks, most spans of one), without overlap; empty ones behind the others."""
    order = np.lexsort((begin, rank))
    rank, begin, end = rank[order], begin[order], end[order]
    counts = np.bincount(rank, minlength=ranks)
    place = np.arange(len(rank)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts, stops = (np.zeros((ranks, int(counts.max(initial=0))), np.int64) for _ in range(2))
    starts[rank, place], stops[rank, place] = begin, end
    reach = np.maximum.accumulate(stops, axis=1)
    if starts.shape[1] > 1:
        starts[:, 1:] = np.maximum(starts[:, 1:], reach[:, :-1])
    return starts, np.maximum(stops, starts)


def _moved_by(starts: Ints, stops: Ints, factor: float) -> Callable[[Column, Ints], Ints]:
    """By how much a moment of a rank moves when its spans become `factor` times as long."""

    def moved(rank: Column, at_ns: Ints) -> Ints:
        inside = np.zeros(at_ns.shape, np.int64)
        for number in range(starts.shape[1]):
            begin, end = starts[rank, number], stops[rank, number]
            inside += np.clip(at_ns - begin, 0, end - begin)
        further: Ints = np.rint(inside * (factor - 1)).astype(np.int64)
        return further

    return moved
