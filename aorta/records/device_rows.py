"""What the rows of a device's ring say: when it computed and communicated as far as marks tell, and what certainly ran
(docs/dev/measuring.md, W28).

A block's range holds the time in which the device had nothing to do because the host had not launched it yet. Each mark
also says when the host recorded it, and so had handed over everything before it. Between two marks of a stream the
device is therefore busy from then on, and may have been before:

    host      a  launches ... b
    device       a  |  launched  |  idle or busy  |  ... until b
                    certain: from max(a on the device, b on the host + slack) to b on the device

Where the host is far ahead both marks were recorded before the device reached the first: all is certain.

A collective may reach into the next step, and queues outlive steps, so steps are taken in their order. Must not wait,
or measure a window.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from numpy.typing import NDArray

from aorta.records import ring_file as rf
from aorta.records.schema import Copy
from aorta.timeline.arrays import Interval
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
    """The marks of one stream, the one that computes, in one step."""

    def __init__(self, bound_ns: int, points: Iterable[tuple[int, int]] = (), mark_ns: int = _LONGEST_MARK_NS) -> None:
        # What the host hands over reaches an idle device `bound_ns` after, which varies: twice as long is allowed for.
        self._bound_ns, self._slack_ns = bound_ns, 2 * bound_ns
        self._points = sorted(points)
        # Marks that follow each other at once show how long the device takes to write one. In that time it does nothing
        # else.
        for (before_ns, _), (at_ns, _) in pairwise(self._points):
            mark_ns = min(mark_ns, at_ns - before_ns)
        self._mark_ns = mark_ns

    def of_next_step(self, points: Iterable[tuple[int, int]]) -> DevicePace:
        """Return the pace of the next step. A mark is when the stream reached it, and when the host had recorded it."""
        return DevicePace(self._bound_ns, points, self._mark_ns)

    def block(self, stretch: Stretch) -> list[Interval]:
        """Return when a block certainly computed. Marks of the stream inside it cut it into stretches."""
        if stretch.sent_ns is None:
            return [stretch.span]
        if stretch.sent_ns + self._slack_ns <= stretch.start_ns and not self._mark_ns:
            return [stretch.span]
        first = bisect.bisect_right(self._points, (stretch.start_ns, stretch.sent_ns))
        last = bisect.bisect_left(self._points, (stretch.end_ns, 0))
        spans, start_ns = [], stretch.start_ns
        for at_ns, sent_ns in (*self._points[first:last], (stretch.end_ns, stretch.sent_ns)):
            spans += self.certain_span(Stretch(start_ns, at_ns, sent_ns))
            start_ns = at_ns
        return spans

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
    lengths, sure = ([sum(end - start for start, end in spans) for spans in lanes] for lanes in (possible, certain))
    missing = sum(lengths) - sum(sure)
    return missing <= _NEGLIGIBLE * min((length for length in lengths[:2] if length), default=0)


ROUND_A_COLLECTIVE = (1, 2)
"""Marks that the device writes between the mark before a collective and its beginning, and from its end until the mark
behind it is written: the backend has an event of its own at either end (docs/dev/measuring.md, R2)."""


class Communication(NamedTuple):
    """One collective: between which times it may have run, and when it certainly did; whether on the device."""

    kind: str
    possible: Interval
    certain: list[Interval]
    on_device: bool


class Ran(NamedTuple):
    """When a collective ran on a device: where its turn came, and its `communication`."""

    start_ns: int
    communication: Communication


def stretches(rows: NDArray[Any]) -> list[Stretch]:
    """Return the time between the marks of each row."""
    columns = (rows[name].tolist() for name in ("a", "b", "b2"))
    return [Stretch(start, end, sent or None) for start, end, sent in zip(*columns, strict=True)]


class DeviceRows:
    """Reads the rows of one rank's device, step by step.

    Args:
        bound_ns: how long an idle device takes to reach what the host has just handed over.

    Attributes:
        spilling: collectives of earlier steps that reach into the next one.
    """

    def __init__(self, bound_ns: int) -> None:
        self._pace = DevicePace(bound_ns)
        self._communicators: dict[str, tuple[int | None, int, int]] = {}
        self._late: set[str] = set()
        self.spilling: list[Communication] = []
        self._copying: list[Interval] = []
        self._counted_launch: int | None = None

    def paces(self, marks: Iterable[Iterable[tuple[int, int]]]) -> list[DevicePace]:
        """Return the pace of each step, of the marks of its compute stream: when it reached each, and when the host
        had recorded it.
        """
        paces = []
        for of_step in marks:
            self._pace = self._pace.of_next_step(of_step)
            paces.append(self._pace)
        return paces

    def counts(self, kind: str, launch: int | None) -> bool:
        """Return whether a backend counts a collective: it counts launches, and a batch is launched once."""
        if launch is None or kind in ("send", "recv"):
            return True
        first, self._counted_launch = launch != self._counted_launch, launch
        return first

    def ran(self, kind: str, communicator: str | None, launch: int | None, stretch: Stretch, pace: DevicePace) -> Ran:
        """Return when a collective between two marks ran. Those of a step are asked about in the order of their issue.

        Args:
            communicator: runs one collective after another; None where it does not determine when this one could
                begin, or is not known.
            launch: collectives with the same value were launched together.
        """
        first_ns, start_ns, end_ns = stretch.start_ns, stretch.start_ns, stretch.end_ns
        if communicator is not None:
            start_ns = self._serialised_start_ns(communicator, launch, start_ns, end_ns)
            first_ns = self._first_ns(communicator, first_ns, stretch._replace(start_ns=start_ns), pace)
        certain = pace.certain_span(stretch._replace(start_ns=start_ns), *ROUND_A_COLLECTIVE)
        on_device = stretch.sent_ns is not None
        return Ran(start_ns, Communication(kind, (first_ns, end_ns), certain, on_device))

    def _serialised_start_ns(self, communicator: str, launch: int | None, start_ns: int, end_ns: int) -> int:
        """Clamp a start to the end of the previous launch: launches of one communicator are serialised."""
        before_launch, before_ns, free_at_ns = self._communicators.get(communicator, (None, 0, 0))
        if launch is None or launch != before_launch:
            before_ns = free_at_ns
        self._communicators[communicator] = (launch, before_ns, max(free_at_ns, end_ns))
        return min(max(start_ns, before_ns), end_ns)

    def _first_ns(self, communicator: str, marked_ns: int, stretch: Stretch, pace: DevicePace) -> int:
        """Return when a collective that was marked at `marked_ns` may have begun, where its turn came at the begin of
        `stretch`: an end mark that the host recorded late lies behind the end of what it marks.
        """
        before_was_late = communicator in self._late
        (self._late.discard if pace.reached_after_recording(stretch) else self._late.add)(communicator)
        if before_was_late:
            return marked_ns
        return max(marked_ns, stretch.start_ns - pace.marks_ns(ROUND_A_COLLECTIVE[1]))

    def touching(self, own: Iterable[Communication], end_ns: int) -> list[Communication]:
        """Return the collectives that touch a step which ended at `end_ns`: its `own`, and those that reach into it."""
        communicated = [*self.spilling, *own]
        self.spilling = [op for op in communicated if op.possible[1] > end_ns]
        return communicated

    def copies(
        self, rows: NDArray[Any], window: Interval, no_copies: str | None, *, captured: bool
    ) -> tuple[list[Copy] | None, list[Interval] | None, str | None]:
        """Return the copies of a step as rows, the intervals of all copies that touch its window, also of those that
        began in an earlier step, and why these intervals are None, if they are.
        """
        if no_copies is not None:
            self._copying = []
            return None, None, no_copies
        copies, timed = [], []
        for flags, size, low, high in zip(*(rows[name].tolist() for name in ("flags", "x", "a", "b")), strict=True):
            start_ns, end_ns = low or None, high or None
            if flags & rf.COMPUTES and not (low and high):
                start_ns = end_ns = None
            if start_ns is not None and end_ns is not None:
                timed.append((start_ns, end_ns))
            offsets = (None if at_ns is None else at_ns - window[0] for at_ns in (start_ns, end_ns))
            copies.append(Copy(rf.DIRECTIONS[flags & rf.DIRECTION], size, *offsets))
        spans = [*self._copying, *timed]
        self._copying = [span for span in spans if span[1] > window[1]]
        if captured:
            return copies, None, "a CUDA graph was captured, whose replays do not show their copies"
        if untimed := len(copies) - len(timed):
            why = f"{untimed} of {len(copies)} copies were issued on another device's stream, or had not ended"
            return copies, None, f"{why} when their step was written"
        return copies, spans, None


def certain_step(
    pace: DevicePace,
    blocks: Sequence[Stretch],
    communication: Sequence[Communication],
    blocked: Sequence[Stretch],
    possibly_blocked: Sequence[Stretch],
    bubbles: Sequence[Stretch],
    paused: Sequence[Stretch],
) -> dict[str, list[Interval]] | None:
    """Return when a step certainly computed (`compute`), and what else is certain under the names of the arguments, in
    nanoseconds of the clock, unmerged; None: all that is possible is, as where the host is ahead.

    Args:
        blocked: what blocked the stream that computes; `possibly_blocked`: as far as it coincides with communication.
        bubbles: waits for another stage of a pipeline.
        paused: between marks of the stream that computes with nothing between them that does.
    """
    if all(block.sent_ns is None for block in blocks) and all(op.certain == [op.possible] for op in communication):
        return None

    def certainly(stretches: Iterable[Stretch]) -> list[Interval]:
        return [span for stretch in stretches for span in pace.certain_span(stretch)]

    sure = {"compute": [span for block in blocks for span in pace.block(block)], "blocked": certainly(blocked)}
    sure |= {"possibly_blocked": certainly(possibly_blocked), "bubbles": certainly(bubbles)}
    possible = [block.span for block in blocks], [op.possible for op in communication]
    waits = [stretch.span for stretch in (*blocked, *possibly_blocked)]
    running = [span for op in communication for span in op.certain]
    if nearly_all((*possible, waits), (sure["compute"], running, sure["blocked"] + sure["possibly_blocked"])):
        return None
    return sure | {"paused": [stretch.span for stretch in paused]}


def launch_of(packed: int) -> int | None:
    """Return the number of the launch that a SPAN was part of; None: it was launched by itself."""
    return (packed >> 32) - 1 if packed >> 32 else None


def communicator_of(packed: int, group: str) -> str | None:
    """Return what runs the collectives of a SPAN one after another; None: nobody knows."""
    which = packed & 0xFFFFFFFF
    if which == rf.UNKNOWN_COMMUNICATOR:
        return None
    return group if which == rf.OF_THE_GROUP else f"{group} {which - rf.OF_A_PEER}"
