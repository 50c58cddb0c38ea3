"""Steps: collect marks while one runs, read them once they have happened, and hand on finished `Step` lines.

Enters: issued collectives, stalls, block ranges and auxiliary ranges, as marks. Leaves: `telemetry.schema.Step`, in
order, some steps late (R4). Must not: wait for anything inside the loop, or compute a metric itself (that is
`aorta.timeline`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from aorta.instrument.clock import Clock, Mark
from aorta.instrument.collectives import Group, Issued
from aorta.instrument.compute import Range
from aorta.instrument.lanes import Lanes
from aorta.instrument.scalars import Scalar
from aorta.telemetry.clock import to_realtime_ns
from aorta.telemetry.schema import (
    ActiveSegment,
    AuxRange,
    ClockReading,
    Collective,
    ComputeRange,
    Coverage,
    Stall,
    Step,
)
from aorta.timeline.intervals import Interval, clip, intersect, merge
from aorta.timeline.overlap import Unseen, measure_window

MAX_STEPS_LATE = 8
"""Steps that may stay unread for a collective that does not end; then coverage says what is missing."""

FINISH_GRACE_S = 2.0
"""How long the last steps are waited for once the device has nothing left to do."""


@dataclass(frozen=True)
class StepFacts:
    """What the loop knows about a step before it begins."""

    epoch: int
    step: int
    global_step: int
    lr: float
    warmup: bool


@dataclass
class _Open:
    """A step under way, or not yet read."""

    facts: StepFacts
    start: Mark
    issued_before: dict[int, int | None]
    end: Mark | None = None
    issued_after: dict[int, int | None] = field(default_factory=dict)
    collectives: list[Issued] = field(default_factory=list)
    stalls: list[tuple[Mark, Mark]] = field(default_factory=list)
    tails: list[tuple[Mark, Mark]] = field(default_factory=list)
    compute: list[Range] = field(default_factory=list)
    aux: list[Range] = field(default_factory=list)
    loss: Scalar | None = None
    grad_norm: Scalar | None = None


class StepRecorder:
    """One rank's steps.

    Args:
        clock: of the device.
        rank, world_size: of this process.
        groups: process groups seen so far, by name (kept up to date by the tap).
        issued_by_backends: identity of each process group -> how many collectives its backend counted (R8).
        anchor: places MONOTONIC in wall-clock time.
        sink: takes finished steps in order.
        unseen: why collectives are not seen at all (`instrument.mode=off`); None when they are.
    """

    def __init__(
        self,
        clock: Clock,
        rank: int,
        world_size: int,
        groups: Mapping[str, Group],
        issued_by_backends: Callable[[], dict[int, int | None]],
        anchor: ClockReading,
        sink: Callable[[Step], None],
        unseen: Unseen | None = None,
    ) -> None:
        self._clock, self._rank, self._world_size = clock, rank, world_size
        self._groups, self._issued_by_backends = groups, issued_by_backends
        self._anchor, self._sink, self._unseen = anchor, sink, unseen
        self._current: _Open | None = None
        self._unread: deque[_Open] = deque()
        self._lanes: dict[str, Lanes] = {}
        self._spilling: list[tuple[str, Interval]] = []
        self.steps_written = 0

    # --- while a step runs -------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, facts: StepFacts) -> Iterator[None]:
        """One iteration. A step that fails is not recorded."""
        self._clock.new_epoch()
        self._current = _Open(facts, self._clock.mark(), self._issued_by_backends())
        try:
            yield
            done = self._current
            done.end, done.issued_after = self._clock.mark(), self._issued_by_backends()
            self._unread.append(done)
        finally:
            self._current = None
        self._read_what_happened()

    @contextmanager
    def aux(self, name: str) -> Iterator[None]:
        """Work that is neither compute nor communication."""
        step = self._current
        if step is None:
            yield
            return
        span = Range(name, "aux", self._clock.mark())
        step.aux.append(span)
        try:
            yield
        finally:
            span.end = self._clock.mark()

    def on_issue(self, issued: Issued) -> None:
        """A collective is about to be issued."""
        if self._current is not None:
            self._current.collectives.append(issued)

    def on_stall(self, begin: Mark, end: Mark) -> None:
        """The caller stood between these marks, waiting for a collective."""
        if self._current is not None:
            self._current.stalls.append((begin, end))

    def on_range(self, opened: Range) -> None:
        """A block began to compute."""
        if self._current is not None:
            self._current.compute.append(opened)

    def on_backward_tail(self, begin: Mark, end: Mark) -> None:
        """Between the last node of a backward pass and its return: a strategy's ending, which waits for collectives.

        DDP waits on futures in C++, where no handle of ours is asked; what of this stretch coincides with
        communication is a stall.
        """
        if self._current is None:
            return
        self._current.tails.append((begin, end))
        for issued in self._current.collectives:
            # The training thread goes on because they are done; their callbacks may still wait for the interpreter.
            if issued.has_completed is not None and issued.has_completed():
                issued.stamp("future")

    def note(self, loss: Scalar | None, grad_norm: Scalar | None) -> None:
        """Scalars of the current step, read when the step is."""
        if self._current is not None:
            self._current.loss, self._current.grad_norm = loss, grad_norm

    # --- afterwards --------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for the device and write every remaining step. Only after the last step."""
        self._clock.drain()
        # A backend wakes those who wait before it calls back, so the last ends may still be on their way.
        deadline = time.monotonic() + FINISH_GRACE_S
        while self._unread:
            if self._readable(self._unread[0], late=time.monotonic() > deadline):
                self._write(self._unread.popleft())
            else:
                time.sleep(0.001)

    def salvage(self) -> None:
        """Write the remaining steps that can be read; after an error, when the device may never answer."""
        while self._unread and self._readable(self._unread[0], late=True):
            self._write(self._unread.popleft())

    def _read_what_happened(self) -> None:
        while self._unread and self._readable(self._unread[0], late=len(self._unread) > MAX_STEPS_LATE):
            self._write(self._unread.popleft())

    def _readable(self, step: _Open, *, late: bool) -> bool:
        """The step has ended on the device, and so have its collectives, unless it is too late to wait for those."""
        ends = [step.end] if late else [step.end, *(issued.end for issued in step.collectives)]
        return all(end is not None and self._clock.read_ns(end) is not None for end in ends)

    def _write(self, step: _Open) -> None:
        self._sink(self._line(step))
        self.steps_written += 1

    def _line(self, step: _Open) -> Step:
        start_ns, end_ns = self._read(step.start), self._read(step.end)
        assert start_ns is not None  # a step is only written once its end has happened
        assert end_ns is not None
        window = (start_ns, end_ns)
        rows = [self._row(issued, start_ns) for issued in step.collectives]
        comm = self._communication(rows, window)
        compute = self._ranges(step.compute)
        aux = self._ranges(step.aux)
        everywhere = merge(span for spans in comm.values() for span in spans)
        tails = intersect(merge(self._spans(step.tails)), everywhere)
        stalls = merge([*self._spans(step.stalls), *tails])
        overlap = measure_window(
            window,
            compute=[(low, high) for _, low, high in compute],
            comm=comm,
            stalls=stalls,
            aux=[(low, high) for _, low, high in aux],
        )
        coverage = self._coverage(step, rows)
        unseen = self._unseen
        if unseen is None and not coverage.complete:
            unseen = Unseen(f"incomplete coverage: {coverage.reason}")
        metrics, reasons = overlap.metrics(unseen)
        for name, value, why in (
            ("loss", step.loss, "not read in this step: see training.log_interval"),
            ("grad_norm", step.grad_norm, "not computed or not read in this step"),
        ):
            if value is None:
                reasons[name] = why
        per_stream_ms = overlap.per_stream_ms(unseen)
        window_ms = metrics["window_ms"]
        blind = unseen is not None and unseen.compute
        return Step(
            rank=self._rank,
            world_size=self._world_size,
            epoch=step.facts.epoch,
            step=step.facts.step,
            global_step=step.facts.global_step,
            warmup=step.facts.warmup,
            loss=step.loss.read() if step.loss else None,
            lr=step.facts.lr,
            grad_norm=step.grad_norm.read() if step.grad_norm else None,
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
                ActiveSegment(part.start_ns - start_ns, part.end_ns - start_ns, part.streams)
                for part in (() if blind else overlap.segments)
            ],
            collectives=rows,
            compute=[
                ComputeRange(span.block, span.phase, low - start_ns, high - start_ns) for span, low, high in compute
            ],
            stalls=[Stall(low - start_ns, high - start_ns) for low, high in clip(stalls, window)],
            aux=[AuxRange(span.block, low - start_ns, high - start_ns) for span, low, high in aux],
            reasons=reasons,
        )

    def _row(self, issued: Issued, origin_ns: int) -> Collective:
        start_ns, end_ns = self._read(issued.start), self._read(issued.end)
        if end_ns is not None:
            issued.alive = None
        if start_ns is None and end_ns is not None:
            lanes = self._lanes.setdefault(issued.group, Lanes(self._groups[issued.group].lanes))
            start_ns = lanes.start_ns(issued.issue_ns, end_ns)
        return Collective(
            kind=issued.kind,
            group=issued.group,
            seq=issued.seq,
            bytes=issued.bytes,
            dtype=issued.dtype,
            issue_ns=issued.issue_ns - origin_ns,
            start_ns=None if start_ns is None else start_ns - origin_ns,
            end_ns=None if end_ns is None else end_ns - origin_ns,
            end_source=issued.end_source,
        )

    def _communication(self, rows: list[Collective], window: Interval) -> dict[str, list[Interval]]:
        """Kind -> absolute intervals that touch this window, those that began in an earlier step included."""
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

    def _coverage(self, step: _Open, rows: list[Collective]) -> Coverage:
        seen = len(rows)
        if self._unseen is not None:
            return Coverage(seen, self._issued_between(step), complete=False, reason=self._unseen.reason)
        unfinished = sum(row.end_ns is None for row in rows)
        issued = self._issued_between(step)
        if unfinished:
            reason = f"{unfinished} of {seen} collectives had not ended {MAX_STEPS_LATE} steps later"
        elif issued is None:
            reason = "a backend keeps no count of its collectives"
        elif issued != seen:
            reason = f"the backends counted {issued} collectives, {seen} passed the seam"
        else:
            return Coverage(seen, issued, complete=True)
        return Coverage(seen, issued, complete=False, reason=reason)

    @staticmethod
    def _issued_between(step: _Open) -> int | None:
        total = 0
        for group, after in step.issued_after.items():
            before = step.issued_before.get(group, 0)
            if after is None or before is None:
                return None
            total += after - before
        return total

    def _ranges(self, spans: list[Range]) -> list[tuple[Range, int, int]]:
        read = [(span, self._read(span.start), self._read(span.end)) for span in spans]
        return [(span, low, high) for span, low, high in read if low is not None and high is not None]

    def _spans(self, marks: list[tuple[Mark, Mark]]) -> list[Interval]:
        read = [(self._read(begin), self._read(end)) for begin, end in marks]
        return [(low, high) for low, high in read if low is not None and high is not None]

    def _read(self, mark: Mark | None) -> int | None:
        """Read a mark for the last time; its event goes back to the pool once it has happened."""
        if mark is None:
            return None
        value = self._clock.read_ns(mark)
        if value is not None:
            self._clock.release(mark)
        return value
