"""Turns the marks of one finished step into its line in the record (`records.schema.Step`).

Must not wait, or compute a metric itself (that is `aorta.timeline`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import msgspec

from aorta.instrument.event_clock import EventClock
from aorta.instrument.in_flight import Group, tail_waits, wait_rows
from aorta.instrument.open_step import OpenStep
from aorta.instrument.step_marks import MarkReader, ReadMarks, Stretch, lead_ms, nearly_all
from aorta.records.clocks import to_realtime_ns
from aorta.records.schema import (
    STALL_CUTOFF_NS,
    ActiveSegment,
    AuxRange,
    ClockReading,
    Collective,
    ComputeRange,
    Copy,
    Coverage,
    Stall,
    StallCause,
    Step,
)
from aorta.timeline.intervals import Interval
from aorta.timeline.overlap import PAIRS, Algebra, Certain, Unseen, copy_rates, measure_lanes

_NOT_READ = "not read in this step: see training.log_interval, or recording.note"
_NOT_THIS_STAGE = "known on the rank with the last stage of the pipeline only, in steps of training.log_interval"
_NO_TRAINING = "a comm_only step trains nothing"


class StepBuilder:
    """Builds the record lines of one rank, in step order: a collective may reach into the next step, and queues outlive
    steps.

    Args:
        groups: process groups seen so far, by name (kept up to date by the interceptor).
        anchor: relates CLOCK_MONOTONIC to wall-clock time.
        algebra: interval arithmetic to measure the window with; all implementations give the same result.
        stall_cutoff_ns: length up to which a backend's call only handed a collective over; None where no call on the
            host can stall what computes.
        no_values: why the loss and the norm of gradients say nothing, and are null; None where they are a training's.
    """

    def __init__(
        self,
        clock: EventClock,
        rank: int,
        world_size: int,
        groups: Mapping[str, Group],
        anchor: ClockReading,
        algebra: Algebra[Iterable[Interval], Any] = PAIRS,
        stall_cutoff_ns: int | None = None,
        no_values: str | None = None,
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self._anchor, self._algebra = anchor, algebra
        self._stall_cutoff_ns, self._no_values = stall_cutoff_ns, no_values
        self._marks = MarkReader(clock, groups)
        self._copying: list[Interval] = []
        self._ahead = (0, 0)

    def line(self, step: OpenStep) -> Step:
        start_ns, end_ns = self._marks.read_ns(step.start), self._marks.read_ns(step.end)
        assert start_ns is not None  # a step is written only after its end
        assert end_ns is not None
        window = (start_ns, end_ns)
        marked = self._marks.read(step, window)
        rows, compute = marked.rows, marked.passes
        aux = self._marks.ranges(step.aux)
        copies, copying, no_copies = self._copies(step, marked, window)
        algebra = self._algebra
        found = [(name, stretch.span) for name, stretch in marked.waits]
        found += tail_waits(marked.tails, step.collectives, rows, {name for name, _ in found}, start_ns)
        stages = self._marks.ranges(step.pipeline)
        groups = {group for group, *_ in stages}
        computing = [(low, high) for _, _, low, high in compute]
        comm = _by_kind((one.kind, [one.possible]) for one in marked.communication)
        blocked = self._blocked(_spans(marked.blocked), _spans(marked.possibly_blocked), comm, window)
        # Inside a long call the thread hands over, whatever is waited for round it.
        handing = algebra.lane(self._longer(step.calls), window)
        stalls = algebra.union([blocked, handing])
        measured = partial(
            measure_lanes,
            algebra,
            window,
            stalls=stalls,
            aux=[(low, high) for _, _, low, high in aux],
            pipeline=[(low, high) for _, _, low, high in stages] if stages else None,
            bubbles=[span for name, span in found if name.group in groups] if stages else None,
            copy=copying,
            tiled=True,
        )
        certain = self._certain(marked, groups, window)
        overlap, _ = measured(compute=computing, comm=comm, certain=certain)
        coverage = self._coverage(step, rows)
        unseen = step.unseen
        if unseen is None and not coverage.complete:
            unseen = Unseen(f"incomplete coverage: {coverage.reason}")
        pace: dict[str, float | None] = {} if step.own_ns is None else {"aorta_ms": sum(step.own_ns.values()) / 1e6}
        host_lead_ms = lead_ms(stretch for _, _, stretch in marked.blocks)
        blind = unseen is not None and unseen.compute
        if host_lead_ms is not None and not blind:
            least, most = overlap.bounds.get("compute_ms", (0.0, 0.0))
            pace |= {"host_lead_ms": host_lead_ms, "undecided_share": (most - least) / most if most else 0.0}
        kernels = None if step.kernels is None or unseen is not None else step.kernels.within(marked, window)
        if kernels is not None:
            assert step.kernels is not None
            by_marks = overlap
            by_kernels = Certain[Any](kernels.compute, kernels.comm, stalls if certain is None else certain.stalls)
            overlap, _ = measured(
                compute=kernels.compute, comm=kernels.comm, of_unknown_kind=kernels.of_unknown_kind, certain=by_kernels
            )
            step.kernels.compare(by_marks, overlap, marked, algebra.pairs(stalls), kernels.compute)
        metrics, reasons = overlap.metrics(unseen)
        if no_copies is not None:
            reasons["copy_ms"] = no_copies
        metrics |= pace
        metrics |= copy_rates(
            (row.direction, row.bytes, (row.start_ns, row.end_ns))
            for row in copies or ()
            if row.start_ns is not None and row.end_ns is not None
        )
        loss = step.loss.read() if step.loss and self._no_values is None else None
        grad_norm = step.grad_norm.read() if step.grad_norm and self._no_values is None else None
        for name, value, why in (
            ("loss", loss, self._no_values or (_NOT_THIS_STAGE if stages else _NOT_READ)),
            ("grad_norm", grad_norm, self._no_values or "not computed or not read in this step"),
            ("lr", step.facts.lr, "unknown: the loop is not AORTA's; see recording.note"),
        ):
            if value is None:
                reasons[name] = _NO_TRAINING if step.facts.phase == "comm_only" else why
            elif not math.isfinite(value):
                reasons[name] = f"was {value}"  # not representable in JSON: written as null
        if step.boundary is not None:
            reasons["boundary"] = step.boundary
        per_stream_ms = overlap.per_stream_ms(unseen)
        undecided = (
            {name: bounds for name, bounds in overlap.undecided.items() if name in metrics} if not unseen else {}
        )
        window_ms = metrics["window_ms"]
        causes: list[tuple[StallCause, Any]] = [("wait", algebra.subtract(blocked, handing)), ("hand_over", handing)]
        stall_rows = [
            Stall(low - start_ns, high - start_ns, why) for why, of in causes for low, high in algebra.pairs(of)
        ]
        stall_rows.sort(key=lambda row: row.start_ns)
        ranges, left_out = ([], {}) if step.user_marks is None else step.user_marks.rows(start_ns)
        reasons |= left_out
        return Step(
            rank=self._rank,
            world_size=self._world_size,
            epoch=step.facts.epoch,
            step=step.facts.step,
            global_step=step.facts.global_step,
            warmup=step.facts.warmup,
            loss=loss,
            lr=step.facts.lr,
            grad_norm=grad_norm,
            start_mono_ns=start_ns,
            end_mono_ns=end_ns,
            t_start_ns=to_realtime_ns(start_ns, self._anchor),
            t_end_ns=to_realtime_ns(end_ns, self._anchor),
            per_stream_ms=per_stream_ms,
            overlap=metrics,
            utilization={
                lane: value / window_ms if value is not None and window_ms else None
                for lane, value in per_stream_ms.items()
            },
            concurrency=dict.fromkeys(("mean", "max")) if unseen or undecided else {**overlap.concurrency()},
            coverage=coverage,
            active_segments=[
                ActiveSegment(low - start_ns, high - start_ns, lanes)
                for low, high, lanes in (() if blind else overlap.tiles)
            ],
            collectives=rows,
            compute=[
                ComputeRange(block, phase, low - start_ns, high - start_ns) for block, phase, low, high in compute
            ],
            stalls=stall_rows,
            aux=[AuxRange(name, low - start_ns, high - start_ns) for name, _, low, high in aux],
            phase=step.facts.phase,
            reasons=reasons,
            waits=msgspec.UNSET if step.unseen is not None else wait_rows(found, start_ns),
            copies=msgspec.UNSET if copies is None else copies,
            bounds=undecided or msgspec.UNSET,
            ranges=ranges or msgspec.UNSET,
            measured_by=msgspec.UNSET if kernels is None else "kernels",
        )

    def _blocked(
        self,
        blocked: list[Interval],
        possibly_blocked: list[Interval],
        comm: Mapping[str, list[Interval]],
        window: Interval,
    ) -> Any:
        algebra = self._algebra
        certain = algebra.lane(blocked, window)
        if not possibly_blocked:
            return certain
        everywhere = algebra.lane([span for spans in comm.values() for span in spans], window)
        return algebra.union([certain, algebra.intersect(algebra.lane(possibly_blocked, window), everywhere)])

    def _certain(self, marked: ReadMarks, stages: set[str], window: Interval) -> Certain[Any] | None:
        """Return what certainly ran; None: all that is possible, as where the host is ahead, or there is no device.

        Args:
            stages: process groups of the stages of a pipeline.
        """
        if not any(stretch.sent_ns is not None for _, _, stretch in marked.blocks) and not any(
            one.certain != [one.possible] for one in marked.communication
        ):
            return None
        pace, algebra = self._marks.pace, self._algebra
        blocks = [(stretch.span, pace.block(stretch)) for _, _, stretch in marked.blocks]
        waits = [(stretch.span, pace.certain_span(stretch)) for stretch in (*marked.blocked, *marked.possibly_blocked)]
        possible = [span for span, _ in blocks], [one.possible for one in marked.communication], [s for s, _ in waits]
        certain = [
            [span for _, spans in parts for span in spans]
            for parts in (blocks, [(None, one.certain) for one in marked.communication], waits)
        ]
        if nearly_all(possible, certain):
            return None
        comm = _by_kind((one.kind, one.certain) for one in marked.communication)
        blocked, possibly_blocked = (
            [span for one in some for span in pace.certain_span(one)]
            for some in (marked.blocked, marked.possibly_blocked)
        )
        # A wait of the compute stream for another one is no computation, whatever it waited for, and no copy is.
        paused = algebra.lane(_spans(marked.gaps), window)
        return Certain(
            algebra.subtract(algebra.lane(certain[0], window), paused),
            comm,
            self._blocked(blocked, possibly_blocked, comm, window),
            [span for name, wait in marked.waits if name.group in stages for span in pace.certain_span(wait)],
        )

    def _longer(self, calls: list[Interval]) -> list[Interval]:
        cutoff_ns = self._stall_cutoff_ns or STALL_CUTOFF_NS
        return [(begin, end) for begin, end in calls if end - begin > cutoff_ns]

    def _copies(
        self, step: OpenStep, marked: ReadMarks, window: Interval
    ) -> tuple[list[Copy] | None, list[Interval] | None, str | None]:
        """Return the rows of the step's copies, the intervals of all copies that touch this window, also of those that
        began in an earlier step, and why these intervals are None, if they are.
        """
        read = marked.copies
        no_copies = step.no_copies if step.unseen is None else step.unseen.reason
        if no_copies is not None:
            self._copying = []
            return None, None, no_copies
        timed = [(low, high) for _, low, high in read if low is not None and high is not None]
        spans = [*self._copying, *timed]
        self._copying = [span for span in spans if span[1] > window[1]]

        def offset(at_ns: int | None) -> int | None:
            return None if at_ns is None else at_ns - window[0]

        rows = [Copy(copied.direction, copied.bytes, offset(low), offset(high)) for copied, low, high in read]
        if step.captured:
            return rows, None, "a CUDA graph was captured, whose replays do not show their copies"
        if untimed := len(read) - len(timed):
            why = f"{untimed} of {len(read)} copies were issued on another device's stream, or had not ended"
            return rows, None, f"{why} when their step was written"
        return rows, spans, None

    def _coverage(self, step: OpenStep, rows: list[Collective]) -> Coverage:
        # Collectives that the backend does not count itself are left out of the comparison.
        seen = sum(issued.counted for issued in step.collectives)
        issued: int | None = 0
        for group, after in step.issued_after.items():
            before = step.issued_before.get(group, 0)
            issued = None if after is None or before is None or issued is None else issued + after - before
        covered = partial(Coverage, outside=step.outside, unwatched=step.unwatched)
        if step.unseen is not None:
            self._ahead = step.ahead_after
            return covered(seen, issued, complete=False, reason=step.unseen.reason)
        unfinished = sum(row.end_ns is None for row in rows)
        untimed = [one.untimed for one in step.collectives if one.untimed is not None]
        if issued is not None and self._accounts_for(step, issued - seen):
            issued = seen
        if step.captured:
            reason = f"{step.captured} collectives were captured into a CUDA graph, whose replays cannot be seen"
        elif untimed:
            reason = f"{len(untimed)} of {len(rows)} collectives could not be timed: {untimed[0]}"
        elif unfinished:
            reason = f"{unfinished} of {len(rows)} collectives had not ended when their step was written"
        elif issued is None:
            reason = "a backend keeps no count of its collectives"
        elif issued != seen:
            reason = f"the backends counted {issued} collectives, AORTA saw {seen}"
        else:
            return covered(seen, issued, complete=True)
        return covered(seen, issued, complete=False, reason=reason)

    def _accounts_for(self, step: OpenStep, more: int) -> bool:
        """Return whether calls of other threads, underway when the step began or ended, explain that the backends
        counted so many `more` than it has. What they leave open is carried over to the step that continues it.
        """
        least, most = (ahead + more for ahead in (self._ahead if step.continues else step.ahead_before))
        low, high = step.ahead_after
        found = max(least, low), min(most, high)
        accounted = found[0] <= found[1]
        self._ahead = found if accounted else step.ahead_after
        return accounted


def _spans(stretches: Iterable[Stretch]) -> list[Interval]:
    return [stretch.span for stretch in stretches]


def _by_kind(spans: Iterable[tuple[str, list[Interval]]]) -> dict[str, list[Interval]]:
    comm: dict[str, list[Interval]] = {}
    for kind, of_one in spans:
        comm.setdefault(kind, []).extend(of_one)
    return comm
