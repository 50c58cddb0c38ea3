"""Turns the marks of one finished step into its line in the record (`records.schema.Step`).

Must not wait, or compute a metric itself (that is `aorta.timeline`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from aorta.instrument.event_clock import EventClock
from aorta.instrument.in_flight import Group, name_of
from aorta.instrument.open_step import OpenStep
from aorta.instrument.step_marks import MarkReader, ReadMarks
from aorta.records.device_rows import Stretch, lead_ms, nearly_all
from aorta.records.schema import (
    STALL_CUTOFF_NS,
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
from aorta.records.step_line import Bucket, Counted, Coverages, MeasuredStep, StepLines, tail_waits, wait_rows
from aorta.timeline.intervals import Interval
from aorta.timeline.overlap import PAIRS, Algebra, Certain, Unseen, measure_lanes


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
        self._algebra, self._stall_cutoff_ns = algebra, stall_cutoff_ns
        self._lines, self._coverages = StepLines(rank, world_size, anchor, no_values), Coverages()
        self._marks = MarkReader(clock, groups)
        self._copying: list[Interval] = []

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
        if marked.tails:
            ends = [None if row.end_ns is None else row.end_ns + start_ns for row in rows]
            buckets = [
                Bucket(name_of(flight), flight.by_future, flight.issue_ns, over_ns)
                for flight, over_ns in zip(step.collectives, ends, strict=True)
            ]
            found += tail_waits(marked.tails, buckets, {name for name, _ in found})
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
        kernels = (
            None
            if step.kernels is None or unseen is not None
            else step.kernels.within(marked.passes, marked.communication, window)
        )
        if kernels is not None:
            assert step.kernels is not None
            by_marks = overlap
            by_kernels = Certain[Any](kernels.compute, kernels.comm, stalls if certain is None else certain.stalls)
            overlap, _ = measured(
                compute=kernels.compute, comm=kernels.comm, of_unknown_kind=kernels.of_unknown_kind, certain=by_kernels
            )
            step.kernels.compare(by_marks, overlap, marked.passes, algebra.pairs(stalls), kernels.compute)
        causes: list[tuple[StallCause, Any]] = [("wait", algebra.subtract(blocked, handing)), ("hand_over", handing)]
        stall_rows = [
            Stall(low - start_ns, high - start_ns, why) for why, of in causes for low, high in algebra.pairs(of)
        ]
        stall_rows.sort(key=lambda row: row.start_ns)
        ranges, left_out = ([], {}) if step.user_marks is None else step.user_marks.rows(start_ns)
        return self._lines.line(
            MeasuredStep(
                step.facts,
                window,
                overlap,
                unseen,
                coverage,
                rows,
                [ComputeRange(block, phase, low - start_ns, high - start_ns) for block, phase, low, high in compute],
                stall_rows,
                [AuxRange(name, low - start_ns, high - start_ns) for name, _, low, high in aux],
                None if step.unseen is not None else wait_rows(found, start_ns),
                loss=step.loss.read() if step.loss else None,
                grad_norm=step.grad_norm.read() if step.grad_norm else None,
                pace=pace,
                stages=bool(stages),
                no_copies=no_copies,
                copies=copies,
                boundary=step.boundary,
                ranges=ranges,
                left_out=left_out,
                by_kernels=kernels is not None,
            )
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
        counted = Counted(
            seen=seen,
            issued=issued,
            unfinished=sum(row.end_ns is None for row in rows),
            total=len(rows),
            continues=step.continues,
            ahead_before=step.ahead_before,
            ahead_after=step.ahead_after,
            outside=step.outside,
            unwatched=step.unwatched,
            captured=step.captured,
            untimed=[one.untimed for one in step.collectives if one.untimed is not None],
        )
        return self._coverages.of(counted, step.unseen)


def _spans(stretches: Iterable[Stretch]) -> list[Interval]:
    return [stretch.span for stretch in stretches]


def _by_kind(spans: Iterable[tuple[str, list[Interval]]]) -> dict[str, list[Interval]]:
    comm: dict[str, list[Interval]] = {}
    for kind, of_one in spans:
        comm.setdefault(kind, []).extend(of_one)
    return comm
