"""What a device certainly ran between two of its marks (docs/dev/measuring.md, W28).

A block's range holds the time in which the device had nothing to do because the host had not launched it yet. Each mark
also says when the host recorded it, and so had handed over everything before it. Between two marks of a stream the
device is therefore busy from then on, and may have been before:

    host      a  launches ... b
    device       a  |  launched  |  idle or busy  |  ... until b
                    certain: from max(a on the device, b on the host + slack) to b on the device

Where the host is far ahead both marks were recorded before the device reached the first: all is certain. Must not read
a mark, or know a metric.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

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
        """As it is without knowing when the host launched what."""
        return self.start_ns, self.end_ns


class DevicePace:
    """The marks of one stream, the one that computes, step by step.

    Args:
        bound_ns: of the clock (`EventClock.bound_ns`). What the host hands over reaches an idle device this long after;
            how long that takes varies, so twice as long is allowed for.
    """

    def __init__(self, bound_ns: int) -> None:
        self._slack_ns = 2 * bound_ns
        self._mark_ns = _LONGEST_MARK_NS
        self._points: list[tuple[int, int]] = []

    def begin(self) -> None:
        """Begin the next step."""
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
        """Return how long the device takes to write so many marks."""
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
