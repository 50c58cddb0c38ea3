"""Measures the steps of a trace, device by device, with the same definition as for records (`aorta.timeline`).

Takes a `Trace` and gives, per rank and device, the `Overlap` of each step and of the whole trace. Must not: define a
metric, or put two devices into one union (W15).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aorta.analysis.load.interval_table import (
    KIND_CODE,
    NO_WINDOWS,
    NULL,
    IntervalClass,
    Intervals,
    Trace,
    places,
    step_of,
    windows,
)
from aorta.timeline.arrays import MERGED_COLUMNS, Int64, Spans, cut, merge, tile, union
from aorta.timeline.classes import COMPUTE, COPY, TRACE_LANES, UNKNOWN_KIND
from aorta.timeline.intervals import Interval
from aorta.timeline.kernel_names import doubtful
from aorta.timeline.overlap import Overlap, either, measure_lanes

DOUBTED: Final = "kernels that are counted as computation have names that may communicate: {bounds}; see the notes"


@dataclass(frozen=True)
class DeviceTimeline:
    """One device of one rank. `lanes` holds merged spans by lane of the timeline; a lane that the source does not
    observe is missing. `doubted` are kernels that are counted as computation and may communicate, `certain` the others.
    """

    rank: int
    device: int
    rows: Intervals
    lanes: Mapping[str, Spans]
    steps: Int64
    windows: Spans
    doubted: Spans
    certain: Spans

    @property
    def whole(self) -> Interval:
        """From the first start to the last end of any interval of known class."""
        known = [lane for lane in self.lanes.values() if len(lane.start)]
        if not known:
            return 0, 0
        return min(int(lane.start[0]) for lane in known), max(int(lane.end[-1]) for lane in known)

    def measure(self, window: Interval) -> Overlap:
        """Measure one window on this device. Kernels that may communicate are read both ways, which gives bounds."""
        lanes = self.lanes
        measured = _measure(lanes, window, lanes[COMPUTE], lanes.get(UNKNOWN_KIND))
        if not len(cut(self.doubted, window).start):
            return measured
        of_unknown_kind = union([self.doubted, lanes.get(UNKNOWN_KIND, self.doubted)])
        return either(measured, _measure(lanes, window, self.certain, of_unknown_kind), DOUBTED)

    def segments(self, window: Interval) -> tuple[Spans, Int64]:
        """Tile the window by the set of active lanes; the bits of a mask follow `classes.TRACE_LANES`."""
        places = {TRACE_LANES.index(name): cut(lane, window) for name, lane in self.lanes.items()}
        return tile(window, places)


def _measure(lanes: Mapping[str, Spans], window: Interval, compute: Spans, of_unknown_kind: Spans | None) -> Overlap:
    measured, _ = measure_lanes(
        MERGED_COLUMNS,
        window,
        compute=compute,
        comm={kind: lanes[kind] for kind in KIND_CODE if kind in lanes},
        of_unknown_kind=of_unknown_kind,
        aux=None,  # no trace tells auxiliary work apart
        copy=lanes.get(COPY),
    )
    return measured


def by_launch(trace: Trace) -> Trace:
    """Return the trace with the steps that its devices ran, where these lag behind the marks of the host.

    Where most time of the devices was launched in another step than it ran in, each step is what it launched, from the
    first start to the last end. Where launches are not known and most time lies outside of the steps, there are none.
    """
    table, marks = trace.intervals, trace.windows
    if not len(marks) or not len(table):
        return trace
    linked = table.launch_ns != NULL
    launched = np.where(linked, step_of(table.rank, table.launch_ns, marks), NULL)
    length = np.maximum(table.end_ns - table.start_ns, 0)
    later = (launched != NULL) & (launched != table.step)
    outside = ~linked & (table.step == NULL) & (table.device != NULL) & (table.start_ns >= marks.start_ns.min())
    total = int(length[table.device != NULL].sum())
    if not (later.any() or outside.any()):
        return trace
    note = f"{trace.path}: {int(later.sum())} of {int(linked.sum())} kernels ran outside of the step that launched them"
    if length[later].sum() * 2 > total:
        known = np.flatnonzero(launched != NULL)
        known = known[np.lexsort((launched[known], table.rank[known]))]
        first = np.flatnonzero(
            (np.diff(launched[known], prepend=NULL) != 0) | (np.diff(table.rank[known], prepend=NULL) != 0)
        )
        start, end = np.minimum.reduceat(table.start_ns[known], first), np.maximum.reduceat(table.end_ns[known], first)
        steps = windows(table.rank[known][first], launched[known][first], start, end)
        note += ": each step is what it launched, from its first start to its last end"
        return replace(trace, intervals=replace(table, step=launched), windows=steps, notes=(*trace.notes, note))
    if length[outside].sum() * 2 > total:
        note = (
            "launches are not known, and most time of the device lies outside of the steps: the whole trace is measured"
        )
        return replace(
            trace,
            intervals=replace(table, step=np.full(len(table), NULL)),
            windows=NO_WINDOWS,
            notes=(*trace.notes, note),
        )
    return (
        replace(trace, notes=(*trace.notes, f"{note}; steps are cut where the host marked them"))
        if later.any()
        else trace
    )


def device_timelines(trace: Trace) -> Iterator[DeviceTimeline]:
    """Yield every device of every rank that has rows of a known class, by rank, then device."""
    known = trace.intervals.take(trace.intervals.cls != IntervalClass.UNKNOWN)
    for rank, device, chosen in places(known):
        rows = known.take(chosen)
        mine = trace.windows.rank == rank
        marks = Spans(trace.windows.start_ns[mine], trace.windows.end_ns[mine])
        doubts, lanes = doubted(rows), _lanes(rows, trace)
        computes = rows.cls == IntervalClass.COMPUTE
        certain = _lane(rows, computes & ~doubts) if doubts.any() else lanes[COMPUTE]
        yield DeviceTimeline(rank, device, rows, lanes, trace.windows.step[mine], marks, _lane(rows, doubts), certain)


def doubted(rows: Intervals) -> NDArray[np.bool_]:
    """Return which rows of a device are counted as computation, and have a name that may communicate."""
    may = np.array([*map(doubtful, rows.names), False], bool)  # the last for rows without a name
    found: NDArray[np.bool_] = may[rows.name] & (rows.cls == IntervalClass.COMPUTE) & (rows.device != NULL)
    return found


def _lanes(rows: Intervals, trace: Trace) -> dict[str, Spans]:
    lanes = {COMPUTE: _lane(rows, rows.cls == IntervalClass.COMPUTE)}
    communicates = rows.cls == IntervalClass.COMM
    for kind, code in KIND_CODE.items():
        of_kind = communicates & (rows.kind == code)
        if of_kind.any():
            lanes[kind] = _lane(rows, of_kind)
    unknown = communicates & (rows.kind == NULL)
    if unknown.any():
        lanes[UNKNOWN_KIND] = _lane(rows, unknown)
    copies = rows.cls == IntervalClass.COPY
    if trace.copies_observed or copies.any():
        lanes[COPY] = _lane(rows, copies)
    return lanes


def _lane(rows: Intervals, chosen: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Spans:
    return merge(Spans(rows.start_ns[chosen], rows.end_ns[chosen]))
