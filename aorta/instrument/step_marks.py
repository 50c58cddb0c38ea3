"""Reads the marks of one finished step: what ran when, as far as they tell, and what certainly did (W28,
`records.device_rows`).

A collective may reach into the next step, and queues outlive steps, so steps are read in their order. Must not wait, or
measure a window.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from aorta.instrument.compute_ranges import Range
from aorta.instrument.event_clock import EventClock, Mark, on_host
from aorta.instrument.in_flight import Group, InFlight
from aorta.instrument.open_step import Copied, OpenStep, Pass
from aorta.records.device_rows import ROUND_A_COLLECTIVE, Communication, DevicePace, Stretch
from aorta.records.schema import Collective
from aorta.records.step_line import GlooWorkers, Name
from aorta.timeline.intervals import Interval


class ReadMarks(NamedTuple):
    """The marks of one step, in nanoseconds of the clock.

    Attributes:
        rows: of the collectives issued in the step; `communication`: of those that touch it.
        passes: of all blocks; `blocks`: the stretches of those that a device marked.
        waits: for collectives, those that returned; `blocked`: all that blocked what computes; `possibly_blocked`:
            those that did as far as they coincide with communication; `tails`: of those, the ends of backward passes.
        gaps: between marks of the compute stream that have nothing that computes between them: a wait, or a copy.
        copies: with their times; None where a mark could not be taken, or is not known yet.
    """

    rows: list[Collective]
    communication: list[Communication]
    passes: list[Pass]
    blocks: list[tuple[str, str, Stretch]]
    waits: list[tuple[Name, Stretch]]
    blocked: list[Stretch]
    possibly_blocked: list[Stretch]
    tails: list[Interval]
    gaps: list[Stretch]
    copies: list[tuple[Copied, int | None, int | None]]


class MarkReader:
    """Reads the marks of one rank's steps, and returns them to the clock. `groups` is kept up to date by the
    interceptor.
    """

    def __init__(self, clock: EventClock, groups: Mapping[str, Group]) -> None:
        self._clock, self._groups = clock, groups
        self._lanes: dict[str, GlooWorkers] = {}
        self._communicators: dict[str, tuple[int | None, int, int]] = {}
        self._late: set[str] = set()
        self._spilling: list[Communication] = []
        self.pace = DevicePace(clock.bound_ns)
        self._points: list[tuple[int, int]] = []

    def read(self, step: OpenStep, window: Interval) -> ReadMarks:
        self._points = []
        blocks = [
            (span.block, span.phase, stretch)
            for span in step.compute
            if (stretch := self.stretch(span.start, span.end)) is not None
        ]
        waits = [(wait, stretch) for wait in step.waits if (stretch := self.stretch(wait.begin, wait.end)) is not None]
        stream_waits = [
            (of, stretch) for begin, end, of in step.stream_waits if (stretch := self.stretch(begin, end)) is not None
        ]
        tails, stalls = self._stretches(step.tails), self._stretches(step.stalls)
        copies = [self._copy(copied) for copied in step.copies]
        self.pace = self.pace.of_next_step(self._points)
        rows = []
        for issued in step.collectives:
            row, communication = self._row(issued, window[0])
            rows.append(row)
            if communication is not None:
                self._spilling.append(communication)
        communicated = self._spilling
        self._spilling = [one for one in communicated if one.possible[1] > window[1]]
        # A strategy that waits in intercepted calls after the backward pass does other work between them.
        begun = [stretch.start_ns for _, stretch in stream_waits]
        possibly_blocked = [tail for tail in tails if not any(tail.start_ns <= begin <= tail.end_ns for begin in begun)]
        gaps = [stretch for _, stretch in stream_waits]
        found = [(wait.of, stretch) for wait, stretch in waits if wait.over]
        found += [(name, stretch) for of, stretch in stream_waits for name in of]
        return ReadMarks(
            rows,
            communicated,
            [(block, phase, *stretch.span) for block, phase, stretch in blocks],
            blocks,
            found,
            [*stalls, *(stretch for wait, stretch in waits if wait.blocked)],
            possibly_blocked + gaps,
            [tail.span for tail in tails],
            [*gaps, *(stretch for _, stretch in waits), *(between for _, between in copies if between is not None)],
            [timed for timed, _ in copies],
        )

    def _copy(self, copied: Copied) -> tuple[tuple[Copied, int | None, int | None], Stretch | None]:
        if not copied.computes:
            return (copied, self.read_ns(copied.start), self.read_ns(copied.end)), None
        between = self.stretch(copied.start, copied.end)
        return (copied, *((None, None) if between is None else between.span)), between

    def _row(self, issued: InFlight, origin_ns: int) -> tuple[Collective, Communication | None]:
        issue_ns, communication = issued.issue_ns, None
        sent_ns = None if issued.end is None else self._clock.sent_ns(issued.end)
        start_ns, end_ns = self.read_ns(issued.start), self.read_ns(issued.end)
        if end_ns is not None:
            issued.alive = None
            if start_ns is None:
                if issued.group not in self._lanes:
                    self._lanes[issued.group] = GlooWorkers(self._groups[issued.group].lanes)
                first_ns = start_ns = self._lanes[issued.group].start_ns(issue_ns, end_ns)
            elif issued.communicator is not None:
                marked_ns = start_ns
                start_ns = self._serialised_start_ns(issued.communicator, issued.launch, start_ns, end_ns)
                first_ns = self._first_ns(issued.communicator, marked_ns, start_ns, Stretch(start_ns, end_ns, sent_ns))
            else:
                first_ns = start_ns
            certain = self.pace.certain_span(Stretch(start_ns, end_ns, sent_ns), *ROUND_A_COLLECTIVE)
            communication = Communication(issued.kind, (first_ns, end_ns), certain, sent_ns is not None)
            end_ns -= origin_ns
        row = Collective(
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
        return row, communication

    def _serialised_start_ns(self, communicator: str, launch: int | None, start_ns: int, end_ns: int) -> int:
        """Clamp a start to the end of the previous launch: launches of one communicator are serialised."""
        before_launch, before_ns, free_at_ns = self._communicators.get(communicator, (None, 0, 0))
        if launch is None or launch != before_launch:
            before_ns = free_at_ns
        self._communicators[communicator] = (launch, before_ns, max(free_at_ns, end_ns))
        return min(max(start_ns, before_ns), end_ns)

    def _first_ns(self, communicator: str, marked_ns: int, start_ns: int, stretch: Stretch) -> int:
        """Return when a collective that was marked at `marked_ns` may have begun, where its turn came at `start_ns`: an
        end mark that the host recorded late lies behind the end of what it marks.
        """
        before_was_late = communicator in self._late
        (self._late.discard if self.pace.reached_after_recording(stretch) else self._late.add)(communicator)
        return marked_ns if before_was_late else max(marked_ns, start_ns - self.pace.marks_ns(ROUND_A_COLLECTIVE[1]))

    def ranges(self, spans: Iterable[Range]) -> list[Pass]:
        read = [(span.block, span.phase, self.read_ns(span.start), self.read_ns(span.end)) for span in spans]
        return [(block, phase, low, high) for block, phase, low, high in read if low is not None and high is not None]

    def stretch(self, begin: Mark | None, end: Mark | None) -> Stretch | None:
        """Return the time between two marks of the stream that computes; None: one of them was not taken, or lost."""
        low, high = self._passed(begin), self._passed(end)
        return None if low is None or high is None else Stretch(low[0], *high)

    def _stretches(self, marks: Iterable[tuple[Mark, Mark]]) -> list[Stretch]:
        return [stretch for begin, end in marks if (stretch := self.stretch(begin, end)) is not None]

    def _passed(self, mark: Mark | None) -> tuple[int, int | None] | None:
        if mark is None or on_host(mark):
            return None if mark is None else (int(mark), None)
        sent_ns, at_ns = self._clock.sent_ns(mark), self.read_ns(mark)
        if at_ns is None:
            return None
        if sent_ns is not None:
            self._points.append((at_ns, sent_ns))
        return at_ns, sent_ns

    def read_ns(self, mark: Mark | None) -> int | None:
        """Read a mark for the last time."""
        if mark is None or on_host(mark):
            return None if mark is None else int(mark)
        value = self._clock.read_ns(mark)
        if value is None:
            self._clock.forget(mark)
        else:
            self._clock.release(mark)
        return value
