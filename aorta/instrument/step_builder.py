"""Turns the marks of one finished step into its line in the record (`records.schema.Step`).

Must not wait, or compute a metric itself (that is `aorta.timeline`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from aorta.instrument.compute_ranges import Range
from aorta.instrument.event_clock import EventClock, Mark, on_host
from aorta.instrument.gloo_workers import GlooWorkers
from aorta.instrument.gradient_order import gradient_rows
from aorta.instrument.in_flight import Group, InFlight
from aorta.instrument.open_step import OpenStep, Pass
from aorta.instrument.user_marks import MarksOfStep
from aorta.instrument.waits import tail_waits, wait_rows
from aorta.records.clocks import to_realtime_ns
from aorta.records.schema import (
    STALL_CUTOFF_NS,
    ActiveSegment,
    AuxRange,
    BucketReady,
    ClockReading,
    Collective,
    ComputeRange,
    Copy,
    Coverage,
    ExpertTokens,
    Stall,
    StallCause,
    Step,
)
from aorta.timeline.intervals import Interval
from aorta.timeline.overlap import AT_CUTOFFS, PAIRS, Algebra, Unseen, copy_rates, measure_lanes

_NOT_READ = "not read in this step: see training.log_interval, or recording.note"
_NOT_THIS_STAGE = "known on the rank with the last stage of the pipeline only, in steps of training.log_interval"
_NO_TRAINING = "a comm_only step trains nothing"


class StepBuilder:
    """Builds the record lines of one rank, in step order: a collective may reach into the next step, and queues outlive
    steps.

    Args:
        clock: the clock that took the marks.
        rank, world_size: of this process.
        groups: process groups seen so far, by name (kept up to date by the interceptor).
        anchor: relates CLOCK_MONOTONIC to wall-clock time.
        algebra: interval arithmetic to measure the window with; all implementations give the same result.
        stall_cutoff_ns: length up to which a backend's call only handed a collective over; None where no call on the
            host can stall what computes.
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
    ) -> None:
        self._clock, self._rank, self._world_size = clock, rank, world_size
        self._groups, self._anchor, self._algebra = groups, anchor, algebra
        self._stall_cutoff_ns = stall_cutoff_ns
        self._lanes: dict[str, GlooWorkers] = {}
        self._communicators: dict[str, tuple[int | None, int, int]] = {}
        self._spilling: list[tuple[str, Interval]] = []
        self._copying: list[Interval] = []

    def line(self, step: OpenStep) -> Step:
        """The step's line; its marks are returned to the clock."""
        start_ns, end_ns = self._read(step.start), self._read(step.end)
        assert start_ns is not None  # a step is written only after its end
        assert end_ns is not None
        window = (start_ns, end_ns)
        rows = [self._row(issued, start_ns) for issued in step.collectives]
        comm = self._communication(rows, window)
        compute = [*self._ranges(step.compute), *step.passes]
        aux = self._ranges(step.aux)
        copies, copying, no_copies = self._copies(step, window)
        algebra = self._algebra
        waits = [(wait, span) for wait in step.waits if (span := self._span(wait.begin, wait.end)) is not None]
        stream_waits = [
            (of, span) for begin, end, of in step.stream_waits if (span := self._span(begin, end)) is not None
        ]
        tails = self._spans(step.tails)
        found = [(wait.of, span) for wait, span in waits if wait.over]
        found += [(name, span) for of, span in stream_waits for name in of]
        found += tail_waits(tails, step.collectives, rows, {name for name, _ in found}, start_ns)
        blocked = algebra.lane([*self._spans(step.stalls), *(span for wait, span in waits if wait.blocked)], window)
        # A strategy that waits in intercepted calls after the backward pass does other work between them.
        begun = [span[0] for _, span in stream_waits]
        maybe = [tail for tail in tails if not any(tail[0] <= begin <= tail[1] for begin in begun)]
        maybe += [span for _, span in stream_waits]
        if maybe:
            everywhere = algebra.lane([span for spans in comm.values() for span in spans], window)
            blocked = algebra.union([blocked, algebra.intersect(algebra.lane(maybe, window), everywhere)])
        computing = [(low, high) for _, _, low, high in compute]
        stalls = self._with_calls(blocked, step.calls, window)
        stages = self._ranges(step.pipeline)
        groups = {group for group, *_ in stages}
        overlap, _ = measure_lanes(
            algebra,
            window,
            compute=computing,
            comm=comm,
            stalls=stalls,
            aux=[(low, high) for _, _, low, high in aux],
            pipeline=[(low, high) for _, _, low, high in stages] if stages else None,
            bubbles=[span for name, span in found if name.group in groups] if stages else None,
            copy=copying,
            tiled=True,
        )
        coverage = self._coverage(step, rows)
        unseen = step.unseen
        if unseen is None and not coverage.complete:
            unseen = Unseen(f"incomplete coverage: {coverage.reason}")
        metrics, reasons = overlap.metrics(unseen)
        if no_copies is not None:
            reasons["copy_ms"] = no_copies
        metrics |= copy_rates(
            (row.direction, row.bytes, (row.start_ns, row.end_ns))
            for row in copies or ()
            if row.start_ns is not None and row.end_ns is not None
        )
        for name, factor in AT_CUTOFFS.items() if self._stall_cutoff_ns is not None else ():
            if (why := reasons.get("overlap_ratio")) is not None:
                metrics[name], reasons[name] = None, why
                continue
            elsewhere = self._with_calls(blocked, step.calls, window, factor)
            # Mostly no call lies between the cut-offs, and nothing is measured twice.
            metrics[name] = (
                overlap.overlap_ratio
                if algebra.pairs(elsewhere) == algebra.pairs(stalls)
                else measure_lanes(algebra, window, compute=computing, comm=comm, stalls=elsewhere)[0].overlap_ratio
            )
        loss = step.loss.read() if step.loss else None
        grad_norm = step.grad_norm.read() if step.grad_norm else None
        for name, value, why in (
            ("loss", loss, _NOT_THIS_STAGE if stages else _NOT_READ),
            ("grad_norm", grad_norm, "not computed or not read in this step"),
            ("lr", step.facts.lr, "unknown: the loop is not AORTA's; see recording.note"),
        ):
            if value is None:
                reasons[name] = _NO_TRAINING if step.facts.phase == "comm_only" else why
            elif not math.isfinite(value):
                reasons[name] = f"was {value}"  # not representable in JSON: written as null
        per_stream_ms = overlap.per_stream_ms(unseen)
        window_ms = metrics["window_ms"]
        blind = unseen is not None and unseen.compute
        line = Step(
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
            concurrency=dict.fromkeys(("mean", "max")) if unseen else {**overlap.concurrency()},
            coverage=coverage,
            active_segments=[
                ActiveSegment(low - start_ns, high - start_ns, lanes)
                for low, high, lanes in (() if blind else overlap.tiles)
            ],
            collectives=rows,
            compute=[
                ComputeRange(block, phase, low - start_ns, high - start_ns) for block, phase, low, high in compute
            ],
            stalls=self._stall_rows(blocked, step.calls, window),
            aux=[AuxRange(name, low - start_ns, high - start_ns) for name, _, low, high in aux],
            phase=step.facts.phase,
            reasons=reasons,
            waits=msgspec.UNSET if step.unseen is not None else wait_rows(found, start_ns),
            ready=self._ready_rows(step, rows, start_ns) or msgspec.UNSET,
            gradient_order=gradient_rows(step.gradients, compute) or msgspec.UNSET,
            experts=_expert_rows(step) or msgspec.UNSET,
            copies=msgspec.UNSET if copies is None else copies,
        )
        return line if step.user_marks is None else _with_user_marks(line, step.user_marks)

    def _with_calls(self, blocked: Any, calls: list[Interval], window: Interval, factor: float = 1) -> Any:
        """The stalls of a step: those of waiting, and calls of backends longer than `factor` times the cut-off."""
        longer = self._longer(calls, factor)
        return self._algebra.union([blocked, self._algebra.lane(longer, window)]) if longer else blocked

    def _longer(self, calls: list[Interval], factor: float = 1) -> list[Interval]:
        cutoff_ns = (self._stall_cutoff_ns or STALL_CUTOFF_NS) * factor
        return [(begin, end) for begin, end in calls if end - begin > cutoff_ns]

    def _stall_rows(self, blocked: Any, calls: list[Interval], window: Interval) -> list[Stall]:
        """The stalls of a step with their causes: inside a long call the thread hands over, whatever is waited for
        round it.
        """
        algebra, origin_ns = self._algebra, window[0]
        handing = algebra.lane(self._longer(calls), window)
        causes: list[tuple[StallCause, Any]] = [("wait", algebra.subtract(blocked, handing)), ("hand_over", handing)]
        rows = [
            Stall(low - origin_ns, high - origin_ns, cause)
            for cause, spans in causes
            for low, high in algebra.pairs(spans)
        ]
        return sorted(rows, key=lambda row: row.start_ns)

    def _ready_rows(self, step: OpenStep, rows: list[Collective], origin_ns: int) -> list[BucketReady]:
        """When buckets were ready, each with the all-reduce that took it; these come in the order of the buckets."""
        found, later = [], iter(rows)
        # All are read, also those that no all-reduce took: a mark that is not read is lost to the clock.
        for mark, size_bytes, at_ns in [(mark, size, self._read(mark)) for mark, size in step.ready]:
            for row in later:
                if row.kind != "allreduce" or row.bytes != size_bytes:
                    continue
                if not on_host(mark) or at_ns is None or row.issue_ns + origin_ns >= at_ns:
                    break
            else:
                break
            if at_ns is not None:
                found.append(BucketReady(row.group, row.seq, at_ns - origin_ns))
        return found

    def _row(self, issued: InFlight, origin_ns: int) -> Collective:
        issue_ns, start_ns, end_ns = issued.issue_ns, self._read(issued.start), self._read(issued.end)
        if end_ns is not None:
            issued.alive = None
            if start_ns is None:
                start_ns = self._lanes_of(issued.group).start_ns(issue_ns, end_ns)
            elif issued.communicator is not None:
                start_ns = self._in_turn(issued.communicator, issued.launch, start_ns, end_ns)
            end_ns -= origin_ns
        return Collective(
            issued.kind,
            issued.group,
            issued.seq,
            issued.bytes,
            issued.dtype,
            issue_ns - origin_ns,
            None if start_ns is None else start_ns - origin_ns,
            end_ns,
            issued.end_source,
            None if issued.backend_end_ns is None else issued.backend_end_ns - origin_ns,
        )

    def _in_turn(self, communicator: str, launch: int | None, start_ns: int, end_ns: int) -> int:
        """When a launch could begin: a communicator runs one after another, on whatever streams, and queues the
        others.
        """
        before_launch, before_ns, free_at_ns = self._communicators.get(communicator, (None, 0, 0))
        if launch is None or launch != before_launch:
            before_ns = free_at_ns
        self._communicators[communicator] = (launch, before_ns, max(free_at_ns, end_ns))
        return min(max(start_ns, before_ns), end_ns)

    def _lanes_of(self, group: str) -> GlooWorkers:
        if group not in self._lanes:
            self._lanes[group] = GlooWorkers(self._groups[group].lanes)
        return self._lanes[group]

    def _communication(self, rows: list[Collective], window: Interval) -> dict[str, list[Interval]]:
        """Kind -> absolute intervals that touch this window, including those that began in an earlier step."""
        spans = self._spilling + [
            (row.kind, (window[0] + row.start_ns, window[0] + row.end_ns))
            for row in rows
            if row.start_ns is not None and row.end_ns is not None
        ]
        self._spilling = [(kind, span) for kind, span in spans if span[1] > window[1]]
        comm: dict[str, list[Interval]] = {}
        for kind, span in spans:
            comm.setdefault(kind, []).append(span)
        return comm

    def _copies(self, step: OpenStep, window: Interval) -> tuple[list[Copy] | None, list[Interval] | None, str | None]:
        """The rows of the step's copies, the intervals of copies that touch this window, including those that began in
        an earlier step, and why these are not known; None where they are not, or for a reason that there is not.
        """
        read = [(copied, self._read(copied.start), self._read(copied.end)) for copied in step.copies]
        no_copies = step.no_copies if step.unseen is None else step.unseen.reason
        if no_copies is not None:
            self._copying = []
            return None, None, no_copies
        timed = [(low, high) for _, low, high in read if low is not None and high is not None]
        spans = [*self._copying, *timed]
        self._copying = [span for span in spans if span[1] > window[1]]
        origin_ns = window[0]
        rows = [
            Copy(
                copied.direction,
                copied.bytes,
                None if low is None else low - origin_ns,
                None if high is None else high - origin_ns,
            )
            for copied, low, high in read
        ]
        if step.captured:
            return rows, None, "a CUDA graph was captured, whose replays do not show their copies"
        if untimed := len(read) - len(timed):
            why = f"{untimed} of {len(read)} copies were issued on another device's stream, or had not ended"
            return rows, None, f"{why} when their step was written"
        return rows, spans, None

    def _coverage(self, step: OpenStep, rows: list[Collective]) -> Coverage:
        # Collectives that the backend does not count itself are left out of the comparison.
        seen = sum(issued.counted for issued in step.collectives)
        if step.unseen is not None:
            return Coverage(seen, self._issued_between(step), complete=False, reason=step.unseen.reason)
        unfinished = sum(row.end_ns is None for row in rows)
        issued = self._issued_between(step)
        if step.captured:
            reason = f"{step.captured} collectives were captured into a CUDA graph, whose replays cannot be seen"
        elif unfinished:
            reason = f"{unfinished} of {len(rows)} collectives had not ended when their step was written"
        elif issued is None:
            reason = "a backend keeps no count of its collectives"
        elif issued != seen:
            reason = f"the backends counted {issued} collectives, AORTA saw {seen}"
        else:
            return Coverage(seen, issued, complete=True)
        return Coverage(seen, issued, complete=False, reason=reason)

    @staticmethod
    def _issued_between(step: OpenStep) -> int | None:
        total = 0
        for group, after in step.issued_after.items():
            before = step.issued_before.get(group, 0)
            if after is None or before is None:
                return None
            total += after - before
        return total

    def _ranges(self, spans: list[Range]) -> list[Pass]:
        read = [(span.block, span.phase, self._read(span.start), self._read(span.end)) for span in spans]
        return [(block, phase, low, high) for block, phase, low, high in read if low is not None and high is not None]

    def _spans(self, marks: list[tuple[Mark, Mark]]) -> list[Interval]:
        return [span for begin, end in marks if (span := self._span(begin, end)) is not None]

    def _span(self, begin: Mark, end: Mark) -> Interval | None:
        low, high = self._read(begin), self._read(end)
        return None if low is None or high is None else (low, high)

    def _read(self, mark: Mark | None) -> int | None:
        """Read a mark for the last time."""
        if mark is None or on_host(mark):
            return None if mark is None else int(mark)
        value = self._clock.read_ns(mark)
        if value is None:
            self._clock.forget(mark)
        else:
            self._clock.release(mark)
        return value


def _expert_rows(step: OpenStep) -> list[ExpertTokens]:
    read = [(block, counts.read()) for block, counts in step.experts]
    return [ExpertTokens(block, numbers[:-1], numbers[-1]) for block, numbers in read]


def _with_user_marks(line: Step, marks: MarksOfStep) -> Step:
    ranges, counters, left_out = marks.rows(line.start_mono_ns)
    return msgspec.structs.replace(
        line, ranges=ranges or msgspec.UNSET, counters=counters or msgspec.UNSET, reasons={**line.reasons, **left_out}
    )
