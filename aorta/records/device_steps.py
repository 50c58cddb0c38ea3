"""What else the lines of steps on a device say, of many steps at once: copies, what certainly ran, and steps that a
profiler's kernels measure as well.

Must not define a metric, wait, or import torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from aorta.records import ring_file as rf
from aorta.records.device_rows import (
    Communication,
    DevicePace,
    DeviceRows,
    Stretch,
    certain_step,
    lead_ms,
    stretches,
)
from aorta.records.ring_file import Part
from aorta.records.schema import ComputeRange, Copy
from aorta.records.window_kernels import WindowKernels
from aorta.timeline.arrays import Int64, Interval, IntervalArray, intersect, interval_array, merge, subtract, union
from aorta.timeline.overlap import CertainLanes, Overlap


class DeviceBatch:
    """The steps of one device that are taken together.

    Args:
        device: of the rank; it has seen the steps before these.
        paces, own: of each step; `own` are the collectives that were issued in it.

    Attributes:
        copies: of each step its rows, None: not looked at, and why `copy_ms` is null, if so.
        copying: when copies ran, and `not_copying` the steps of which that is not known.
        leads_ms: how far the host was ahead in each step; None: it has no block.
    """

    def __init__(
        self, device: DeviceRows, windows: IntervalArray, paces: list[DevicePace], own: list[list[Communication]]
    ) -> None:
        self._device, self._windows, self._paces = device, windows, paces
        before, ends = [*device.spilling], windows.end.tolist()
        self.touching = [device.touching(some, end_ns) for some, end_ns in zip(own, ends, strict=True)]
        # A collective that began before its step is that step's, and no earlier one's.
        self._communication = [(op, 0) for op in before]
        for begin_ns, some in zip(windows.start.tolist(), own, strict=True):
            self._communication += [(op, begin_ns) for op in some]
        self.copies: list[tuple[list[Copy] | None, str | None]] = []
        self.copying, self.not_copying = interval_array(), set[int]()
        self.leads_ms: list[float | None] = []
        self._certain: CertainLanes | None = None

    def read_copies(self, copies: Part, no_copies: Sequence[str | None], captured: Sequence[int]) -> None:
        spans: list[Interval] = []
        for step, window in enumerate(self._pairs()):
            rows, of_step, why = self._device.copies(
                copies.rows_of(step), window, no_copies[step], captured=captured[step] > 0
            )
            self.copies.append((rows, why))
            if of_step is None:
                self.not_copying.add(step)
            else:
                spans += _clipped(of_step, window)
        self.copying = merge(interval_array(spans))

    def read_certain(
        self,
        blocks: Iterable[Part],
        blocked: Iterable[Part],
        possibly_blocked: Iterable[Part],
        waits: Iterable[Part],
        copies: Part,
        bubbles: Sequence[Sequence[Stretch]],
    ) -> CertainLanes | None:
        """Return what certainly ran; None: in every step all that is possible.

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

        def of(parts: Iterable[Part], step: int) -> list[Stretch]:
            return [stretch for part in parts for stretch in stretches(part.rows_of(step))]

        for step, (pace, window) in enumerate(zip(self._paces, self._pairs(), strict=True)):
            own = of(blocks, step)
            self.leads_ms.append(lead_ms(own))
            stopping = of(blocked, step), of(possibly_blocked, step)
            certain = certain_step(pace, own, self.touching[step], *stopping, bubbles[step], of(paused, step))
            bounded.append(certain is not None)
            for name, spans in (certain or {}).items():
                sure[name] += _clipped(spans, window)
        if any(bounded):
            self._certain = self._lanes(bounded, {name: merge(interval_array(spans)) for name, spans in sure.items()})
        return self._certain

    def _lanes(self, bounded: Sequence[bool], sure: Mapping[str, IntervalArray]) -> CertainLanes:
        """Return the lanes of all steps. `sure`: as of `certain_step`."""
        kinds: dict[str, list[Interval]] = {}
        for op, begin_ns in self._communication:
            kinds.setdefault(op.kind, []).extend(
                (max(low, begin_ns), high) for low, high in op.certain if max(low, begin_ns) < high
            )
        comm = {kind: merge(interval_array(spans)) for kind, spans in kinds.items()}
        possibly = intersect(sure["possibly_blocked"], union([*comm.values()]))
        # A wait of the compute stream for another one is no computation, whatever it waited for, and no copy is.
        compute = subtract(sure["compute"], sure["paused"])
        return CertainLanes(bounded, compute, comm, union([sure["blocked"], possibly]), sure["bubbles"])

    def without_copies(self, measured: list[Overlap]) -> list[Overlap]:
        """Return the steps as measured, without copies where these are not known."""
        return [
            replace(overlap, copy_ns=None) if step in self.not_copying else overlap
            for step, overlap in enumerate(measured)
        ]

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
        (window,) = self._pairs(step)
        passes = [(block.block, block.phase, block.start_ns + window[0], block.end_ns + window[0]) for block in compute]
        running = kernels.within(passes, self.touching[step], window)
        if running is None:
            return None
        ran, comm, unknown = running
        bounded = self._certain is not None and self._certain.bounded[step]
        blocked = self._certain.stalls if self._certain is not None and bounded else stalls
        here = IntervalArray(self._windows.start[step : step + 1], self._windows.end[step : step + 1])
        certain = CertainLanes([True], intersect(ran, here), comm, intersect(blocked, here), interval_array())
        (overlap,) = measure(here, compute=ran, comm=comm, of_unknown_kind=unknown, certain=certain)
        if step in self.not_copying:
            overlap = replace(overlap, copy_ns=None)
        kernels.compare(by_marks, overlap, passes, intersect(stalls, here), ran)
        return overlap

    def _pairs(self, step: int | None = None) -> list[Interval]:
        pairs = zip(self._windows.start.tolist(), self._windows.end.tolist(), strict=True)
        return [pair for index, pair in enumerate(pairs) if step in (None, index)]


def marks_of(rows: np.ndarray, step_of: Int64, steps: int) -> list[list[tuple[int, int]]]:
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


def holding(tails: Part, gaps: Part) -> np.ndarray:
    """Return of each span whether a gap of its step begins in it."""
    spans = tails.columns("a", "b")
    return np.array(
        [
            bool(((gaps.rows_of(step)["a"] >= low) & (gaps.rows_of(step)["a"] <= high)).any())
            for step, (low, high) in zip(tails.step.tolist(), spans, strict=True)
        ],
        bool,
    )


def _clipped(spans: Iterable[Interval], window: Interval) -> list[Interval]:
    low, high = window
    return [(max(start, low), min(end, high)) for start, end in spans if max(start, low) < min(end, high)]
