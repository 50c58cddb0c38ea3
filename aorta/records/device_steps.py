"""What the rows of a device's ring say of steps, many at once: when it computed and communicated as far as marks tell,
what certainly ran (docs/dev/measuring.md, W28), its copies, and what a profiler's kernels say of a step as well.

A block's range holds the time in which the device had nothing to do because the host had not launched it yet. Each mark
also says when the host recorded it, and so had handed over everything before it. Between two marks of a stream the
device is therefore busy from then on, and may have been before:

    host      a  launches ... b
    device       a  |  launched  |  idle or busy  |  ... until b
                    certain: from max(a on the device, b on the host + slack) to b on the device

Where the host is far ahead both marks were recorded before the device reached the first: all is certain.

A collective may reach into the next step, and queues outlive steps, so steps are taken in their order. Must not define
a metric, wait, or import torch.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aorta.records import ring_file as rf
from aorta.records.ring_file import Part
from aorta.records.schema import ComputeRange, Copy
from aorta.timeline.arrays import (
    Int64,
    Interval,
    IntervalArray,
    intersect,
    interval_array,
    merge,
    pairs,
    subtract,
    union,
)
from aorta.timeline.overlap import DECIDED, CertainLanes, Overlap

if TYPE_CHECKING:  # which reads `Communication`
    from aorta.records.window_kernels import WindowKernels

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


def stretches(rows: NDArray[Any]) -> list[Stretch]:
    """Return the time between the marks of each row."""
    columns = (rows[name].tolist() for name in ("a", "b", "b2"))
    return [Stretch(start, end, sent or None) for start, end, sent in zip(*columns, strict=True)]


class DeviceSteps:
    """Reads the steps of one rank's device: `begin`, `ran` for each of their collectives, copies, what is certain.

    Args:
        bound_ns: how long an idle device takes to reach what the host has just handed over.

    Attributes:
        paces: of each step that is read.
        own: when the collectives that were issued in each step ran; for whoever calls `ran` to add.
        copies: of each step its rows, None: not looked at, and why `copy_ms` is null, if so.
        copying: when copies ran, where that is known.
        leads_ms: how far the host was ahead in each step; None: it has no block.
    """

    def __init__(self, bound_ns: int) -> None:
        self._pace = DevicePace(bound_ns)
        self._communicators: dict[str, tuple[int | None, int, int]] = {}
        self._late: set[str] = set()
        self._counted_launch: int | None = None
        # Collectives and copies of earlier steps that reach into the next one.
        self._spilling: list[Communication] = []
        self._copying: list[Interval] = []

    def begin(self, windows: IntervalArray, marks: Iterable[Iterable[tuple[int, int]]]) -> None:
        """Begin to read further steps. `marks`: of each, those of the stream that computes (`marks_of`)."""
        self._windows, self._spans = windows, pairs(windows)
        self.paces: list[DevicePace] = []
        for of_step in marks:
            self._pace = self._pace.of_next_step(of_step)
            self.paces.append(self._pace)
        self.own: list[list[Communication]] = [[] for _ in self._spans]

    def counts(self, kind: str, launch: int | None) -> bool:
        """Return whether a backend counts a collective: it counts launches, and a batch is launched once."""
        if launch is None or kind in ("send", "recv"):
            return True
        first, self._counted_launch = launch != self._counted_launch, launch
        return first

    def ran(
        self, kind: str, communicator: str | None, launch: int | None, stretch: Stretch, pace: DevicePace
    ) -> tuple[int, Communication]:
        """Return when the turn of a collective between two marks came, and when it ran. Those of a step are asked about
        in the order of their issue.

        Args:
            communicator: runs one collective after another; None where it does not determine when this one could
                begin, or is not known.
            launch: collectives with the same value were launched together.
        """
        first_ns, start_ns, end_ns = stretch.start_ns, stretch.start_ns, stretch.end_ns
        if communicator is not None:
            # Launches of one communicator are serialised.
            before_launch, before_ns, free_at_ns = self._communicators.get(communicator, (None, 0, 0))
            if launch is None or launch != before_launch:
                before_ns = free_at_ns
            self._communicators[communicator] = launch, before_ns, max(free_at_ns, end_ns)
            start_ns = min(max(start_ns, before_ns), end_ns)
            # An end mark that the host recorded late lies behind the end of what it marks.
            before_was_late = communicator in self._late
            is_late = not pace.reached_after_recording(stretch._replace(start_ns=start_ns))
            (self._late.add if is_late else self._late.discard)(communicator)
            if not before_was_late:
                first_ns = max(first_ns, start_ns - pace.marks_ns(ROUND_A_COLLECTIVE[1]))
        certain = pace.certain_span(stretch._replace(start_ns=start_ns), *ROUND_A_COLLECTIVE)
        return start_ns, Communication(kind, (first_ns, end_ns), certain, stretch.sent_ns is not None)

    def read_copies(self, copies: Part, no_copies: Sequence[str | None], captured: Sequence[int]) -> None:
        """Read copies. Those that began in an earlier step, and reach into a later one, ran in that, too.

        Args:
            no_copies: of each step why its copies are not looked at, if so.
            captured: how many collectives were captured into CUDA graphs by then.
        """
        self.copies: list[tuple[list[Copy] | None, str | None]] = []
        ran: list[Interval] = []
        for step, window in enumerate(self._spans):
            if (why := no_copies[step]) is not None:
                self._copying = []
                self.copies.append((None, why))
                continue
            rows, timed = [], []
            columns = (copies.rows_of(step)[name].tolist() for name in ("flags", "x", "a", "b"))
            for flags, size, low, high in zip(*columns, strict=True):
                if low and high:
                    timed.append((low, high))
                is_known = (low and high) or not flags & rf.COMPUTES
                offsets = (at_ns - window[0] if at_ns and is_known else None for at_ns in (low, high))
                rows.append(Copy(rf.DIRECTIONS[flags & rf.DIRECTION], size, *offsets))
            spans = [*self._copying, *timed]
            self._copying = [span for span in spans if span[1] > window[1]]
            if captured[step] > 0:
                why = "a CUDA graph was captured, whose replays do not show their copies"
            elif untimed := len(rows) - len(timed):
                why = (
                    f"{untimed} of {len(rows)} copies were issued on another device's stream, or had not ended when "
                    "their step was written"
                )
            else:
                ran += clip(spans, window)
            self.copies.append((rows, why))
        self.copying = merge(interval_array(ran))

    def read_certain(
        self,
        blocks: Iterable[Part],
        blocked: Iterable[Part],
        possibly_blocked: Iterable[Part],
        waits: Iterable[Part],
        copies: Part,
        bubbles: Sequence[Sequence[Stretch]],
    ) -> CertainLanes | None:
        """Return what certainly ran; None: in every step all that is possible, as where the host is ahead.

        Args:
            blocked: what blocked the stream that computes; `possibly_blocked`: as far as that coincides with
                communication.
            waits: all in which it did nothing else.
            bubbles: of each step, waits for another stage of a pipeline.
        """
        computing = copies.where(
            ((copies.rows["flags"] & rf.COMPUTES) != 0) & (copies.rows["a"] != 0) & (copies.rows["b"] != 0)
        )
        paused, bounded, sure = [*waits, computing], [], defaultdict[str, list[Interval]](list)
        # A collective that began before its step is that step's, and no earlier one's.
        communication = [(op, 0) for op in self._spilling]
        self._touching: list[list[Communication]] = []
        self.leads_ms: list[float | None] = []

        def of(parts: Iterable[Part], step: int) -> list[Stretch]:
            return [stretch for part in parts for stretch in stretches(part.rows_of(step))]

        for step, (pace, window, own) in enumerate(zip(self.paces, self._spans, self.own, strict=True)):
            communication += [(op, window[0]) for op in own]
            touching = [*self._spilling, *own]
            self._touching.append(touching)
            self._spilling = [op for op in touching if op.possible[1] > window[1]]
            computed, stopped, maybe = of(blocks, step), of(blocked, step), of(possibly_blocked, step)
            self.leads_ms.append(lead_ms(computed))
            if all(block.sent_ns is None for block in computed) and all(op.certain == [op.possible] for op in touching):
                bounded.append(False)
                continue
            certain = {"compute": [span for block in computed for span in pace.block(block)]}
            for name, of_name in (("blocked", stopped), ("possibly_blocked", maybe), ("bubbles", bubbles[step])):
                certain[name] = [span for stretch in of_name for span in pace.certain_span(stretch)]
            stalls = [stretch.span for stretch in (*stopped, *maybe)]
            possible = [block.span for block in computed], [op.possible for op in touching], stalls
            running = [span for op in touching for span in op.certain]
            known = certain["compute"], running, certain["blocked"] + certain["possibly_blocked"]
            bounded.append(not nearly_all(possible, known))
            if bounded[-1]:
                certain["paused"] = [stretch.span for stretch in of(paused, step)]
                for name, spans in certain.items():
                    sure[name] += clip(spans, window)
        self._certain: CertainLanes | None = None
        if any(bounded):
            kinds = defaultdict[str, list[Interval]](list)
            for op, begin_ns in communication:
                kinds[op.kind] += clip(op.certain, (begin_ns, op.possible[1]))
            comm = {kind: merge(interval_array(spans)) for kind, spans in kinds.items()}
            lanes = {name: merge(interval_array(spans)) for name, spans in sure.items()}
            possibly = intersect(lanes["possibly_blocked"], union([*comm.values()]))
            # A wait of the compute stream for another one is no computation, whatever it waited for, and no copy is.
            compute = subtract(lanes["compute"], lanes["paused"])
            self._certain = CertainLanes(bounded, compute, comm, union([lanes["blocked"], possibly]), lanes["bubbles"])
        return self._certain

    def without_copies(self, step: int, overlap: Overlap) -> Overlap:
        """Return a step as measured, without copies where these are not known."""
        return overlap if self.copies[step][1] is None else replace(overlap, copy_ns=None)

    def by_kernels(
        self,
        step: int,
        kernels: WindowKernels,
        by_marks: Overlap,
        compute: Sequence[ComputeRange],
        stalls: IntervalArray,
        measure: Callable[..., list[Overlap]],
    ) -> Overlap | None:
        """Return a step measured by its kernels, and compare both; None: it is measured by its marks alone.

        Args:
            compute: the passes of its blocks; `stalls`: of all steps.
            measure: `measure_windows`, with the lanes of which kernels say nothing.
        """
        window = self._spans[step]
        passes = [(block.block, block.phase, block.start_ns + window[0], block.end_ns + window[0]) for block in compute]
        running = kernels.within(passes, self._touching[step], window)
        if running is None:
            return None
        ran, comm, unknown = running
        bounded = self._certain is not None and self._certain.bounded[step]
        blocked = self._certain.stalls if self._certain is not None and bounded else stalls
        here = IntervalArray(self._windows.start[step : step + 1], self._windows.end[step : step + 1])
        certain = CertainLanes([True], intersect(ran, here), comm, intersect(blocked, here), interval_array())
        (overlap,) = measure(here, compute=ran, comm=comm, of_unknown_kind=unknown, certain=certain)
        overlap = self.without_copies(step, overlap)
        kernels.compare(by_marks, overlap, passes, intersect(stalls, here), ran)
        return overlap


def marks_of(rows: NDArray[Any], step_of: Int64, steps: int) -> list[list[tuple[int, int]]]:
    """Return the marks of the stream that computes, by step: when it reached each and when the host had recorded it.

    Args:
        step_of: of each row; -1: it is of none.
    """
    computing = np.isin(rows["kind"], (rf.PASS, rf.COMPUTE, rf.WAIT, rf.GAP, rf.TAIL, rf.STALL))
    computing |= (rows["kind"] == rf.COPY) & ((rows["flags"] & rf.COMPUTES) != 0)
    computing &= step_of >= 0
    marks: list[list[tuple[int, int]]] = [[] for _ in range(steps)]
    for passed_at, sent in (("a", "a2"), ("b", "b2")):
        passed = computing & (rows[passed_at] != 0) & (rows[sent] != 0)
        columns = (step_of[passed], rows[passed_at][passed], rows[sent][passed])
        for step, at_ns, sent_ns in zip(*(column.tolist() for column in columns), strict=True):
            marks[step].append((at_ns, sent_ns))
    return marks


def holding(tails: Part, gaps: Part) -> NDArray[Any]:
    """Return of each span whether a gap of its step begins in it."""
    spans = zip(tails.step.tolist(), tails.columns("a", "b"), strict=True)
    held = [any(low <= begin <= high for begin in gaps.rows_of(step)["a"].tolist()) for step, (low, high) in spans]
    return np.array(held, bool)


def clip(spans: Iterable[Interval], window: Interval) -> list[Interval]:
    """Return the parts of spans inside a window."""
    low, high = window
    return [(max(start, low), min(end, high)) for start, end in spans if max(start, low) < min(end, high)]
