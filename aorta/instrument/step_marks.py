"""Reads the marks of one finished step: what ran when, as far as they tell, and what certainly did (W28).

A block's range holds the time in which the device had nothing to do because the host had not launched it yet. Each mark
also says when the host recorded it, and so had handed over everything before it. Between two marks of a stream the
device is therefore busy from then on, and may have been before:

    host      a  launches ... b
    device       a  |  launched  |  idle or busy  |  ... until b
                    certain: from max(a on the device, b on the host + slack) to b on the device

Where the host is far ahead both marks were recorded before the device reached the first: all is certain.

A collective may reach into the next step, and queues outlive steps, so steps are read in their order. Must not wait, or
measure a window.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from aorta.instrument.compute_ranges import Range
from aorta.instrument.event_clock import EventClock, Mark, on_host
from aorta.instrument.in_flight import Group, InFlight
from aorta.instrument.open_step import Copied, OpenStep, Pass
from aorta.records.schema import Collective
from aorta.records.step_line import GlooWorkers, Name
from aorta.timeline.intervals import Interval, measure
from aorta.timeline.overlap import DECIDED

_NEGLIGIBLE = DECIDED / 10
"""Part of the computation and communication of a step that may be uncertain without a look at its bounds: what a tenth
of the tolerance moves, rounding hides."""

_LONGEST_MARK_NS = 20_000
"""How long a device is taken to write a mark until two have followed each other faster: some microseconds are usual."""


class Stretch(NamedTuple):
    """Time between two marks on one stream. `sent_ns`: when the host recorded the second one; None: both are readings
    of its clock, and all between them is certain.
    """

    start_ns: int
    end_ns: int
    sent_ns: int | None = None

    @property
    def span(self) -> Interval:
        return self.start_ns, self.end_ns


class DevicePace:
    """The marks of one stream, the one that computes, step by step."""

    def __init__(self, bound_ns: int) -> None:
        # What the host hands over reaches an idle device `bound_ns` after, which varies: twice as long is allowed for.
        self._slack_ns = 2 * bound_ns
        self._mark_ns = _LONGEST_MARK_NS
        self._points: list[tuple[int, int]] = []

    def begin(self) -> None:
        self._points.clear()

    def add_mark(self, at_ns: int, sent_ns: int) -> None:
        """Add a mark that the stream reached at `at_ns` and the host had recorded at `sent_ns`."""
        self._points.append((at_ns, sent_ns))

    def update_mark_cost(self) -> None:
        """Update how long the device takes to write a mark, once all marks of a step were added: marks that follow each
        other at once show it. In that time the device does nothing else.
        """
        self._points.sort()
        for (before_ns, _), (at_ns, _) in zip(self._points, self._points[1:], strict=False):
            self._mark_ns = min(self._mark_ns, at_ns - before_ns)

    def block(self, stretch: Stretch) -> list[Interval]:
        """Return when a block certainly computed. Marks of the stream inside it cut it into stretches."""
        if stretch.sent_ns is None:
            return [stretch.span]
        if stretch.sent_ns + self._slack_ns <= stretch.start_ns and not self._mark_ns:
            return [stretch.span]
        first = bisect.bisect_right(self._points, (stretch.start_ns, stretch.sent_ns))
        last = bisect.bisect_left(self._points, (stretch.end_ns, 0))
        found, start_ns = [], stretch.start_ns
        for at_ns, sent_ns in (*self._points[first:last], (stretch.end_ns, stretch.sent_ns)):
            found += self.certain_span(Stretch(start_ns, at_ns, sent_ns))
            start_ns = at_ns
        return found

    def reached_after_recording(self, stretch: Stretch) -> bool:
        """Return whether the device reached the second mark some time after the host had recorded it: what is between
        them ended there, not before.
        """
        return stretch.sent_ns is None or stretch.sent_ns + self._slack_ns < stretch.end_ns

    def marks_ns(self, count: int) -> int:
        return count * self._mark_ns

    def certain_span(self, stretch: Stretch, begins_late: int = 0, ends_early: int = 1) -> list[Interval]:
        """Return when a single thing between two marks certainly ran.

        Args:
            begins_late, ends_early: how many marks the device writes between the first mark and its beginning, and from
                its end until the second mark has been written.
        """
        if stretch.sent_ns is None:
            return [stretch.span]
        begin_ns = max(stretch.start_ns + self.marks_ns(begins_late), stretch.sent_ns + self._slack_ns)
        end_ns = stretch.end_ns - self.marks_ns(ends_early)
        return [(begin_ns, end_ns)] if begin_ns < end_ns else []


def lead_ms(stretches: Iterable[Stretch]) -> float | None:
    """Return how far the host is ahead of the device: the median over the marks that end blocks of the time from the
    host recording it to the device reaching it.
    """
    leads = [stretch.end_ns - stretch.sent_ns for stretch in stretches if stretch.sent_ns is not None]
    return median(leads) / 1e6 if leads else None


def nearly_all(possible: Sequence[Iterable[Interval]], certain: Sequence[Iterable[Interval]]) -> bool:
    """Return whether what is certain is all that is possible, but for less than anybody could see.

    Args:
        possible, certain: intervals of computation, of communication, and of stalls.
    """
    lengths = [measure(spans) for spans in possible]
    missing = sum(lengths) - sum(measure(spans) for spans in certain)
    return missing <= _NEGLIGIBLE * min((length for length in lengths[:2] if length), default=0)


_ROUND_A_COLLECTIVE = (1, 2)
"""Marks that the device writes between the mark before a collective and its beginning, and from its end until the mark
behind it is written: the backend has an event of its own at either end (docs/dev/measuring.md, R2)."""


class Communication(NamedTuple):
    """One collective: between which times it may have run, and when it certainly did; whether on the device."""

    kind: str
    possible: Interval
    certain: list[Interval]
    on_device: bool


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

    def read(self, step: OpenStep, window: Interval) -> ReadMarks:
        self.pace.begin()
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
        self.pace.update_mark_cost()
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
            certain = self.pace.certain_span(Stretch(start_ns, end_ns, sent_ns), *_ROUND_A_COLLECTIVE)
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
        return marked_ns if before_was_late else max(marked_ns, start_ns - self.pace.marks_ns(_ROUND_A_COLLECTIVE[1]))

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
            self.pace.add_mark(at_ns, sent_ns)
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
