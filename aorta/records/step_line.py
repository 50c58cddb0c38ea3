"""One step's line in the record, of what was measured of it: what a metric is null for, whether all collectives were
seen, who waited for whom.

Must not read a mark or a row, wait, or compute a metric itself (that is `aorta.timeline`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from heapq import heapreplace
from itertools import starmap
from typing import Final, NamedTuple

import msgspec

from aorta.records.clocks import to_realtime_ns
from aorta.records.ring_file import RingFacts
from aorta.records.schema import (
    ActiveSegment,
    AuxRange,
    Collective,
    ComputeRange,
    Copy,
    Coverage,
    Phase,
    Stall,
    Step,
    UserRange,
    Wait,
)
from aorta.timeline.arrays import Interval
from aorta.timeline.overlap import Overlap, Unseen, copy_rates

_NOT_READ = "not read in this step: see training.log_interval, or recording.note"
_NOT_THIS_STAGE = "known on the rank with the last stage of the pipeline only, in steps of training.log_interval"
_NO_TRAINING = "a comm_only step trains nothing"
_STAMPED_LATE_NS: Final = 1_000_000
"""How long after DDP continued the end of a collective may be stamped: the callback may have to wait for a core."""


class StepFacts(NamedTuple):
    """What the loop knows about a step before it begins: fields of `Step`."""

    epoch: int
    step: int
    global_step: int
    lr: float | None
    warmup: bool
    phase: Phase = "train"


class Name(NamedTuple):
    """A collective as rows name it. `kind` is that of a send or a receive, otherwise None."""

    group: str
    seq: int
    kind: str | None = None


def tail_waits(
    tails: Iterable[Interval], issued: Sequence[tuple[Name, int, int]], named: set[Name]
) -> list[tuple[Name, Interval]]:
    """Return DDP's waits at the end of its backward passes.

    DDP waits for its buckets one after another, in the order in which it issued them. It reaches the first when the
    last node has run, to each other one when the one before it has ended; copying gradients back lies between two
    waits and is part of the later one, or behind the last.

    Args:
        tails: the strategy's work at the end of each backward pass, in nanoseconds of the clock.
        issued: name, issue and end of each collective of the step that has ended, and whose future was taken.
        named: what was waited for otherwise; gets what is waited for here.
    """
    waits = []
    for begin_ns, end_ns in tails:
        at_ns = begin_ns
        for name, issue_ns, over_ns in issued:
            if name in named or issue_ns > end_ns:
                continue
            if over_ns > end_ns + _STAMPED_LATE_NS:
                continue  # nobody waited for it here
            named.add(name)
            leave_ns = min(max(at_ns, over_ns), end_ns)
            waits.append((name, (at_ns, leave_ns)))
            at_ns = leave_ns
    return waits


def user_ranges(
    rows: Iterable[tuple[str, int, int, int, int, str | None]], origin_ns: int, left_out: int, most: int
) -> tuple[list[UserRange], dict[str, str]]:
    """Return the rows of ranges that the caller named (name, thread, depth, start_ns, end_ns, error), and the reason
    that says how many more than `most` were left out.
    """
    ranges = [
        UserRange(name, thread, depth, start - origin_ns, end - origin_ns, error)
        for name, thread, depth, start, end, error in sorted(rows, key=lambda row: (row[3], -row[4]))
    ]
    return ranges, {"ranges": f"{left_out} more than {most} in this step are left out"} if left_out else {}


class GlooWorkers:
    """The gloo workers of one group, `count` in number, from which follows when a queued collective really began.

    gloo reports no start time. It runs the collectives of one group first in, first out on a fixed number of worker
    threads, so a start is the later of the issue time and the moment a worker became free (docs/dev/measuring.md,
    section 1). `start_ns` is called in issue order; the worker is busy until `end_ns`.
    """

    def __init__(self, count: int) -> None:
        self._free_at_ns = [0] * max(count, 1)  # a heap

    def start_ns(self, issue_ns: int, end_ns: int) -> int:
        free_at_ns = heapreplace(self._free_at_ns, end_ns)
        return min(max(issue_ns, free_at_ns), end_ns)


class Coverages:
    """Says of each step, in order, whether all of its collectives were seen."""

    def __init__(self) -> None:
        self._ahead = (0, 0)

    def of(
        self,
        unseen: Unseen | None,
        *,
        seen: int,
        issued: int | None,
        unfinished: int,
        total: int,
        untimed: Sequence[str],
        captured: int,
        continues: bool,
        outside: int,
        unwatched: int,
        ahead_before: tuple[int, int],
        ahead_after: tuple[int, int],
    ) -> Coverage:
        """Return the coverage of the next step, by its collectives as they were counted.

        Args:
            seen: by AORTA, of those that the backends count.
            issued: by the backends; None where one keeps no count.
            unfinished, total: rows of the step that have no end, and all of them.
            untimed: why some have none, of each of these.
            captured: collectives captured into CUDA graphs in the run so far.
            continues: it has all that was issued since the step before it ended; `outside`: how many of these are part
                of no step.
            unwatched: issued in backward passes before, or without, a gradient of what is watched.
            ahead_before, ahead_after: how few and how many collectives the backends' counts may be ahead of what was
                recorded by then, as other threads issue some at that moment.
        """
        covered = partial(Coverage, outside=outside, unwatched=unwatched)
        if unseen is not None:
            self._ahead = ahead_after
            return covered(seen, issued, complete=False, reason=unseen.reason)
        if issued is not None:
            # Calls of other threads that were underway when the step began or ended may explain that the backends
            # counted more than it has. What they leave open is carried over to the step that continues it.
            least, most = (ahead + issued - seen for ahead in (self._ahead if continues else ahead_before))
            possible = max(least, ahead_after[0]), min(most, ahead_after[1])
            accounted = possible[0] <= possible[1]
            self._ahead, issued = (possible, seen) if accounted else (ahead_after, issued)
        if captured:
            reason = f"{captured} collectives were captured into a CUDA graph, whose replays cannot be seen"
        elif untimed:
            reason = f"{len(untimed)} of {total} collectives could not be timed: {untimed[0]}"
        elif unfinished:
            reason = f"{unfinished} of {total} collectives had not ended when their step was written"
        elif issued is None:
            reason = "a backend keeps no count of its collectives"
        elif issued != seen:
            reason = f"the backends counted {issued} collectives, AORTA saw {seen}"
        else:
            return covered(seen, issued, complete=True)
        return covered(seen, issued, complete=False, reason=reason)


def step_line(
    of_rank: RingFacts,
    facts: StepFacts,
    window: Interval,
    overlap: Overlap,
    unseen: Unseen | None,
    coverage: Coverage,
    *,
    loss: float | None,
    grad_norm: float | None,
    pace: Mapping[str, float | None],
    stages: bool,
    no_copies: str | None,
    copies: list[Copy] | None,
    boundary: str | None,
    left_out: Mapping[str, str],
    collectives: list[Collective],
    compute: list[ComputeRange],
    stalls: list[Stall],
    aux: list[AuxRange],
    waits: list[Wait] | msgspec.UnsetType,
    ranges: list[UserRange] | msgspec.UnsetType,
    by_kernels: bool = False,
    drawn: int | msgspec.UnsetType = msgspec.UNSET,
) -> Step:
    """Return the line of one step.

    Args:
        pace: further metrics that are known.
        stages: it ran stages of a pipeline.
        no_copies: why `copy_ms` is null, if so; `copies`: None: they were not looked at.
        left_out: reasons of what was left out.
        by_kernels: a profiler's kernels say when it computed and communicated.

    Others are fields of `Step` as they are.
    """
    start_ns, end_ns = window
    if unseen is None and not coverage.complete:
        unseen = Unseen(f"incomplete coverage: {coverage.reason}")
    blind = unseen is not None and unseen.compute
    metrics, reasons = overlap.metrics(unseen)
    passed_over = unseen is not None and unseen.everything
    if no_copies is not None and not passed_over:
        reasons["copy_ms"] = no_copies
    metrics |= pace
    if copies:
        metrics |= copy_rates(
            (row.direction, row.bytes, (row.start_ns, row.end_ns))
            for row in copies
            if row.start_ns is not None and row.end_ns is not None
        )
    if of_rank.no_values is not None:
        loss = grad_norm = None
    for name, value, why in (
        ("loss", loss, of_rank.no_values or (_NOT_THIS_STAGE if stages else _NOT_READ)),
        ("grad_norm", grad_norm, of_rank.no_values or "not computed or not read in this step"),
        ("lr", facts.lr, "unknown: the loop is not AORTA's; see recording.note"),
    ):
        if value is None:
            reasons[name] = _NO_TRAINING if facts.phase == "comm_only" else why
        elif not math.isfinite(value):
            reasons[name] = f"was {value}"  # not representable in JSON: written as null
    if boundary is not None:
        reasons["boundary"] = boundary
    per_stream_ms = overlap.per_stream_ms(unseen)
    undecided = {name: bounds for name, bounds in overlap.undecided.items() if name in metrics} if not unseen else {}
    window_ms = metrics["window_ms"]
    reasons |= left_out
    return Step(
        rank=of_rank.rank,
        world_size=of_rank.world_size,
        **facts._asdict(),
        loss=loss,
        grad_norm=grad_norm,
        start_mono_ns=start_ns,
        end_mono_ns=end_ns,
        t_start_ns=to_realtime_ns(start_ns, of_rank.anchor),
        t_end_ns=to_realtime_ns(end_ns, of_rank.anchor),
        per_stream_ms=per_stream_ms,
        overlap=metrics,
        utilization={
            lane: value / window_ms if value is not None and window_ms else None
            for lane, value in per_stream_ms.items()
        },
        concurrency={}
        if passed_over
        else dict.fromkeys(("mean", "max"))
        if unseen or undecided
        else {**overlap.concurrency()},
        coverage=coverage,
        active_segments=[] if blind else list(starmap(ActiveSegment, overlap.tiles)),
        reasons=reasons,
        copies=msgspec.UNSET if copies is None else copies,
        bounds=undecided or msgspec.UNSET,
        measured_by="kernels" if by_kernels else msgspec.UNSET,
        collectives=collectives,
        compute=compute,
        stalls=stalls,
        aux=aux,
        waits=waits,
        ranges=ranges,
        drawn=drawn,
    )
