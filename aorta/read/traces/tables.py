"""Reads one unit of traces and reduces it to what a report needs of each device, small enough to be sent between
processes.

`read_trace_tables(unit)` measures all steps of a device at once, and the whole trace as one window, with the definition
that records are measured with (`aorta.timeline`). Must not: let the interval table leave the process, invent what a
trace does not say, define a metric, or put two devices into one union (W15).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from aorta.documents.dataset import SlowdownEntry
from aorta.read.frames import (
    KIND_METRICS,
    KINDS_KNOWN,
    Floats,
    Groups,
    Lane,
    SpanName,
    SpanRows,
    Spans,
    Steps,
    of_unused_kind,
)
from aorta.read.run import CoverageFacts, Details, RankTables, Source, StepIntervals
from aorta.read.traces.collective_costs import END_SOURCE, CostPart, collectives_in, parts_of
from aorta.read.traces.files import TraceFiles, read_unit
from aorta.read.traces.health import TraceFacts, check_rows, doubted
from aorta.read.traces.interval_table import (
    KIND_CODE,
    NO_WINDOWS,
    NULL,
    IntervalClass,
    Intervals,
    Trace,
    by_device,
    step_of,
    windows,
)
from aorta.read.traces.kernels import KernelFacts, kernel_facts, slowdowns
from aorta.records.schema import ActiveSegment
from aorta.timeline.arrays import Int64, IntervalArray, covered_ns, measure_windows, merge, ranges, tile_windows, union
from aorta.timeline.classes import COMPUTE, COPY, KINDS, TRACE_LANES, UNKNOWN_KIND
from aorta.timeline.overlap import DECIDED, Overlap, Unseen, either

WHOLE_STEP: Final = 0
"""Step number of the single window of a trace that marks no steps."""
SHOWN_SLOWDOWNS: Final = 200
DOUBTED: Final = "kernels that are counted as computation have names that may communicate: {bounds}; see the notes"
Metrics: TypeAlias = tuple[dict[str, float | None], dict[str, str]]


@dataclass(frozen=True)
class TraceDetails(Details):
    """Details of a trace. Rows of `segments` are (step, start, end, mask) in ns on its clock, step after step. Windows
    of steps may overlap, so time alone does not tell whose a segment is.
    """

    segments: Int64
    start_ns: Int64
    end_ns: Int64

    def step(self, place: int) -> StepIntervals:
        """Return which lanes were active when, in one step."""
        start = int(self.start_ns[place])
        first, last = np.searchsorted(self.segments[:, 0], [place, place + 1])
        rows = self.segments[first:last, 1:].tolist()
        segments = [ActiveSegment(low - start, high - start, mask) for low, high, mask in rows]
        return StepIntervals(int(self.end_ns[place]) - start, TRACE_LANES, segments)

    def spans(self, places: npt.NDArray[np.intp]) -> Spans:
        """Return when it computed in some steps; a trace has no blocks and tells of no stalls."""
        computes = self.segments[self.segments[:, 3] >> TRACE_LANES.index(COMPUTE) & 1 != 0]
        step, rows = ranges(*(np.searchsorted(computes[:, 0], places, side=side) for side in ("left", "right")))
        start, end = computes[rows, 1:3].T - self.start_ns[places][step]
        spans = SpanRows()
        spans.add(Lane.COMPUTE, step, SpanName("compute", ""), start, end)
        return spans.frame()


@dataclass(frozen=True)
class DeviceTables:
    """One device of one process, in the steps of one trace or of several windows of the process.

    Attributes:
        tables: its rank and world size are what the trace states (`UNKNOWN`, 0 where it does not).
        whole: the whole trace measured as one window, as `summary.json` has it.
    """

    device: int
    tables: RankTables
    whole: dict[str, Any]
    busy_ns: int


@dataclass(frozen=True)
class TraceTables:
    """What is kept of one trace; its process may have used several devices. `slowdowns_left_out`: those beyond the
    first `SHOWN_SLOWDOWNS`.
    """

    devices: list[DeviceTables]
    facts: TraceFacts
    kernels: KernelFacts
    parts: list[CostPart]
    slowdowns: list[SlowdownEntry]
    slowdowns_left_out: int


def read_trace_tables(unit: TraceFiles) -> list[TraceTables]:
    """Read one unit and measure its traces.

    Raises:
        InputError: it cannot be read.
    """
    return list(map(_tables, read_unit(unit)))


def _tables(trace: Trace) -> TraceTables:
    trace, facts = check_rows(by_launch(trace))
    # Without computation in the table, hidden communication and slowdowns cannot be computed.
    slow = [] if trace.compute_unseen else slowdowns(trace)
    return TraceTables(
        devices=[_device(trace, timeline) for timeline in device_timelines(trace)],
        facts=facts,
        kernels=kernel_facts(trace),
        parts=[] if trace.compute_unseen else parts_of(trace),
        slowdowns=slow[:SHOWN_SLOWDOWNS],
        slowdowns_left_out=len(slow[SHOWN_SLOWDOWNS:]),
    )


def by_launch(trace: Trace) -> Trace:
    """Return the trace with the steps that its devices ran, where these lag behind the marks of the host.

    Where most time of the devices was launched in another step than it ran in, each step is what it launched, from the
    first start to the last end. Where launches are not known and most time lies outside of the steps, there are none.
    """
    table, marks = trace.intervals, trace.windows
    if not len(marks) or not len(table):
        return trace
    linked = table.launch_ns != NULL
    launched = np.where(linked, step_of(table.launch_ns, marks), NULL)
    length = np.maximum(table.end_ns - table.start_ns, 0)
    later = (launched != NULL) & (launched != table.step)
    outside = ~linked & (table.step == NULL) & (table.device != NULL) & (table.start_ns >= marks.start_ns.min())
    total = int(length[table.device != NULL].sum())
    if not (later.any() or outside.any()):
        return trace
    note = f"{trace.path}: {int(later.sum())} of {int(linked.sum())} kernels ran outside of the step that launched them"
    step, steps = table.step, marks
    if length[later].sum() * 2 > total:
        known = table.take(launched != NULL)
        own = Groups(launched[launched != NULL])
        start, end = own.reduce(np.minimum, known.start_ns), own.reduce(np.maximum, known.end_ns)
        step, steps = launched, windows(launched[launched != NULL][own.first], start, end)
        note += ": each step is what it launched, from its first start to its last end"
    elif length[outside].sum() * 2 > total:
        step, steps = np.full(len(table), NULL), NO_WINDOWS
        note = "launches are unknown, and most device time is outside of the steps: the whole trace is measured"
    elif later.any():
        note += "; steps are cut where the host marked them"
    else:
        return trace
    return replace(trace, intervals=replace(table, step=step), windows=steps, notes=(*trace.notes, note))


@dataclass(frozen=True)
class DeviceTimeline:
    """One device. `lanes` holds merged spans by lane of the timeline; a lane that the source does not observe is
    missing. `doubted` are kernels that are counted as computation and may communicate, `certain` the others. `whole`:
    one window, from the first start to the last end of any interval of known class.
    """

    device: int
    rows: Intervals
    lanes: Mapping[str, IntervalArray]
    doubted: IntervalArray
    certain: IntervalArray
    whole: IntervalArray

    def measure(self, window: IntervalArray) -> list[Overlap]:
        """Measure windows on this device. Kernels that may communicate are read both ways, which gives bounds."""
        comm = {kind: self.lanes[kind] for kind in KIND_CODE if kind in self.lanes}
        unknown, copy = self.lanes.get(UNKNOWN_KIND), self.lanes.get(COPY)
        measured = measure_windows(window, compute=self.lanes[COMPUTE], comm=comm, of_unknown_kind=unknown, copy=copy)
        if not len(self.doubted.start):
            return measured
        may_communicate = union([self.doubted, self.doubted if unknown is None else unknown])
        others = measure_windows(window, compute=self.certain, comm=comm, of_unknown_kind=may_communicate, copy=copy)
        in_doubt = covered_ns(window, self.doubted) > 0
        return [
            either(one, other, DOUBTED) if doubt else one
            for one, other, doubt in zip(measured, others, in_doubt, strict=True)
        ]


def device_timelines(trace: Trace) -> Iterator[DeviceTimeline]:
    """Yield every device that has rows of a known class."""
    known = trace.intervals.take(trace.intervals.cls != IntervalClass.UNKNOWN)
    for device, rows in by_device(known):
        computes, communicates, copies = (
            rows.cls == cls for cls in (IntervalClass.COMPUTE, IntervalClass.COMM, IntervalClass.COPY)
        )
        chosen = {COMPUTE: computes}
        for kind, code in (*KIND_CODE.items(), (UNKNOWN_KIND, NULL)):
            if (of_kind := communicates & (rows.kind == code)).any():
                chosen[kind] = of_kind
        if trace.copies_observed or copies.any():
            chosen[COPY] = copies
        lanes = {name: merge(rows.take(of).spans) for name, of in chosen.items()}
        doubts = doubted(rows)
        unsure, certain = (merge(rows.take(of).spans) for of in (doubts, computes & ~doubts))
        start = min((lane.start[0] for lane in lanes.values() if len(lane.start)), default=0)
        end = max((lane.end[-1] for lane in lanes.values() if len(lane.end)), default=0)
        yield DeviceTimeline(device, rows, lanes, unsure, certain, IntervalArray(np.array([start]), np.array([end])))


def _device(trace: Trace, timeline: DeviceTimeline) -> DeviceTables:
    # The steps in order of their numbers, each once; without any, the whole trace.
    numbers, first = np.unique(trace.windows.step, return_index=True)
    window = IntervalArray(trace.windows.start_ns[first], trace.windows.end_ns[first])
    marked = bool(len(numbers))
    if not marked:
        numbers, window = np.array([WHOLE_STEP], np.int64), timeline.whole
    *measured, whole = timeline.measure(IntervalArray(*map(np.append, window, timeline.whole)))
    unseen = Unseen(trace.unseen, trace.compute_unseen) if trace.unseen else None
    lost = Counter(trace.lost.tolist())
    ran = Counter(timeline.rows.step[timeline.rows.cls != IntervalClass.COPY].tolist())
    in_all = lost.total(), ran.total()
    values, why_null = _metrics(whole, unseen, *in_all)
    of_steps = [
        _metrics(overlap, unseen, *((lost[step], ran[step]) if marked else in_all))
        for overlap, step in zip(measured, numbers.tolist(), strict=True)
    ]
    reasons: dict[tuple[tuple[str, str], ...], int] = {}
    codes = [reasons.setdefault(tuple(said.items()), len(reasons)) for _, said in of_steps]
    place, tiles, masks = tile_windows(window, {TRACE_LANES.index(name): lane for name, lane in timeline.lanes.items()})
    collectives = collectives_in(trace, timeline.rows, numbers if marked else None, window.start)
    return DeviceTables(
        device=timeline.device,
        tables=RankTables(
            source=Source(
                path=trace.path,
                format=trace.format,
                rank=trace.rank,
                world_size=trace.world_size or 0,
                lanes=TRACE_LANES,
                timer=trace.format,
                instrument_mode=trace.format,
                groups=trace.group_ranks,
                host=trace.host,
                platform=trace.platform,
                device=str(timeline.device) if timeline.device != NULL else None,
                backend=trace.backend,
            ),
            steps=Steps(
                global_step=numbers,
                warmup=np.zeros(len(numbers), bool),
                start_mono_ns=window.start,
                end_mono_ns=window.end,
                t_start_ns=window.start,
                t_end_ns=window.end,
                reason=np.array(codes, np.int64),
                reasons=tuple(map(dict, reasons)),
                metrics=_columns([metrics for metrics, _ in of_steps]),
            ),
            collectives=collectives,
            details=TraceDetails(np.stack([place, *tiles, masks], axis=1), window.start, window.end),
            covered=CoverageFacts(end_sources={END_SOURCE: len(collectives)}),
        ),
        whole={
            "start_ns": int(timeline.whole.start[0]),
            "end_ns": int(timeline.whole.end[0]),
            "metrics": values,
            "null_reasons": why_null,
        },
        busy_ns=whole.window_ns - whole.idle_ns,
    )


def _columns(measured: Sequence[Mapping[str, float | None]]) -> dict[str, Floats]:
    """Return metric -> a value a step."""
    names = dict.fromkeys(name for values in measured for name in values)
    columns = {
        name: np.array([np.nan if (value := values.get(name)) is None else value for values in measured], np.float64)
        for name in names
    }
    unused = of_unused_kind([columns[name] for name in KINDS_KNOWN])
    for name in names.keys() & KIND_METRICS:
        absent = np.array([name not in values for values in measured])
        columns[name][absent] = unused[absent]
    return columns


def _metrics(overlap: Overlap, unseen: Unseen | None, lost: int, ran: int) -> Metrics:
    """Return the metrics of a window, and why some are null. Where launches lack their kernels, what rests on
    computation has only a bound, unless they are too few to matter (`DECIDED`).
    """
    values, reasons = overlap.metrics(unseen)
    if lost <= DECIDED * (lost + ran):
        return values, reasons
    why = f"{lost} launches have no kernel in the trace"
    known = {"window_ms", "copy_ms", "comm_ms", *(f"{kind}_ms" for kind in KINDS)}
    for name, value in values.items():
        if name not in known and value is not None:
            end = "at most" if name.startswith(("idle", "exposed")) else "at least"
            unit = " ms" if name.endswith("_ms") else ""
            # More computation may have hidden more; of a quotient of the two nothing is known.
            reasons[name] = why if name == "overlap_over_compute" else f"{why}: it is {end} {value:.4g}{unit}"
            values[name] = None
    return values, reasons
