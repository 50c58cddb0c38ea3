"""Reads one unit of traces and reduces it to what a report needs of each device, small enough to be sent between
processes.

`read_trace_tables(unit)` measures all steps of a device at once, and the whole trace as one window, with the definition
that records are measured with (`aorta.timeline`); `join_devices` puts the windows of one process together, and
`DeviceTables.as_rank` makes the tables of a rank of them. Must not: let the interval table leave the process, invent
what a trace does not say, define a metric, or put two devices into one union (W15).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from aorta.analysis.documents.dataset import SlowdownEntry
from aorta.analysis.frames import (
    KIND_METRICS,
    KINDS_KNOWN,
    NO_TIME,
    UNKNOWN,
    Collectives,
    Floats,
    Lane,
    SpanName,
    SpanRows,
    Steps,
    of_unused_kind,
)
from aorta.analysis.frames import Spans as StepSpans
from aorta.analysis.groups import Groups
from aorta.analysis.load.collective_costs import END_SOURCE, CollectiveRows, CostPart, collective_rows, parts_of
from aorta.analysis.load.interval_table import (
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
from aorta.analysis.load.kernels import KernelFacts, kernel_facts, slowdowns
from aorta.analysis.load.trace_files import TraceFiles, read_unit
from aorta.analysis.load.trace_health import TraceFacts, check_rows, doubted
from aorta.analysis.metrics import RATIO_PARTS
from aorta.analysis.run import CoverageFacts, RankTables, Source
from aorta.analysis.step_intervals import Details, StepIntervals
from aorta.records.schema import ActiveSegment
from aorta.timeline.arrays import Int64, Spans, covered_ns, measure_windows, merge, ranges, tile_windows, union
from aorta.timeline.classes import COMPUTE, COPY, KINDS, TRACE_LANES, UNKNOWN_KIND
from aorta.timeline.overlap import DECIDED, Overlap, Unseen, either

WHOLE_STEP: Final = 0
"""Step number of the single window of a trace that marks no steps."""
SHOWN_SLOWDOWNS: Final = 200
DOUBTED: Final = "kernels that are counted as computation have names that may communicate: {bounds}; see the notes"
Metrics: TypeAlias = tuple[dict[str, float | None], dict[str, str]]
"""The metrics of a window, and why some are null."""


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

    def spans(self, places: npt.NDArray[np.intp]) -> StepSpans:
        """Return when it computed in some steps; a trace has no blocks and tells of no stalls."""
        computes = self.segments[self.segments[:, 3] >> TRACE_LANES.index(COMPUTE) & 1 != 0]
        step, rows = ranges(*(np.searchsorted(computes[:, 0], places, side=side) for side in ("left", "right")))
        start, end = computes[rows, 1:3].T - self.start_ns[places][step]
        spans = SpanRows()
        spans.add(Lane.COMPUTE, step, SpanName("compute", ""), start, end)
        return spans.frame()


@dataclass(frozen=True)
class DeviceTables:
    """One device of one rank in the steps of one trace, or of several windows of its process.

    Attributes:
        global_step, windows: number, start and end of each step.
        measured: the metrics of each step.
        segments: of `TraceDetails`.
        whole: its whole trace measured as one window, as `summary.json` has it.
    """

    source: Source
    device: int
    global_step: Int64
    windows: Spans
    measured: Sequence[Metrics]
    collectives: CollectiveRows
    segments: Int64
    whole: dict[str, Any]
    busy_ns: int

    def as_rank(self, number: int, world_size: int) -> RankTables:
        """Return the tables of the rank with this number; a negative one stands for an unknown rank."""
        rows, (start, end) = self.collectives, self.windows
        reasons: dict[tuple[tuple[str, str], ...], int] = {}
        codes = [reasons.setdefault(tuple(said.items()), len(reasons)) for _, said in self.measured]
        return RankTables(
            # Groups belong to a rank; a number that stands for an unknown rank has none.
            source=replace(
                self.source, rank=number, world_size=world_size, groups=self.source.groups if number >= 0 else {}
            ),
            steps=Steps(
                global_step=self.global_step,
                warmup=np.zeros(len(start), bool),
                start_mono_ns=start,
                end_mono_ns=end,
                t_start_ns=start,
                t_end_ns=end,
                reason=np.array(codes, np.int64),
                reasons=tuple(map(dict, reasons)),
                metrics=_columns([values for values, _ in self.measured]),
            ),
            collectives=Collectives(
                names=rows.names,
                step=rows.step,
                name=rows.name,
                seq=rows.seq,
                issue_ns=np.full(len(rows.seq), NO_TIME, np.int64),  # the trace does not record when it was issued
                start_ns=rows.start_ns - start[rows.step],
                end_ns=rows.end_ns - start[rows.step],
            ),
            details=TraceDetails(self.segments, start, end),
            covered=CoverageFacts(end_sources={END_SOURCE: len(rows.seq)}),
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


@dataclass(frozen=True)
class TraceTables:
    """What is kept of one trace; its process may have used several devices."""

    devices: list[DeviceTables]
    facts: TraceFacts
    kernels: KernelFacts
    parts: list[CostPart]
    slowdowns: list[SlowdownEntry]
    slowdowns_left_out: int
    """Beyond the first `SHOWN_SLOWDOWNS`."""


def read_trace_tables(unit: TraceFiles) -> list[TraceTables]:
    """Read one unit and measure its traces.

    Raises:
        InputError: it cannot be read.
    """
    return list(map(_tables, read_unit(unit)))


def _tables(trace: Trace) -> TraceTables:
    trace = by_launch(trace)
    clean, facts = check_rows(trace)
    # Without computation in the table, hidden communication and slowdowns cannot be computed.
    parts = [] if clean.compute_unseen else parts_of(clean)
    slow = [] if clean.compute_unseen else slowdowns(clean)
    return TraceTables(
        devices=[_device(clean, timeline) for timeline in device_timelines(clean)],
        facts=facts,
        kernels=kernel_facts(clean),
        parts=parts,
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
    """One device. `lanes` holds merged spans by lane of the timeline; a lane that the source does not
    observe is missing. `doubted` are kernels that are counted as computation and may communicate, `certain` the others.
    """

    device: int
    rows: Intervals
    lanes: Mapping[str, Spans]
    doubted: Spans
    certain: Spans

    @property
    def whole(self) -> Spans:
        """One window, from the first start to the last end of any interval of known class."""
        known = [lane for lane in self.lanes.values() if len(lane.start)]
        start = min((lane.start[0] for lane in known), default=0)
        return Spans(np.array([start]), np.array([max((lane.end[-1] for lane in known), default=0)]))

    def measure(self, window: Spans) -> list[Overlap]:
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

        def lane(of: npt.NDArray[np.bool_], rows: Intervals = rows) -> Spans:
            return merge(rows.take(of).spans)

        computes, communicates, copies = (
            rows.cls == cls for cls in (IntervalClass.COMPUTE, IntervalClass.COMM, IntervalClass.COPY)
        )
        lanes = {COMPUTE: lane(computes)}
        for kind, code in (*KIND_CODE.items(), (UNKNOWN_KIND, NULL)):
            if (of_kind := communicates & (rows.kind == code)).any():
                lanes[kind] = lane(of_kind)
        if trace.copies_observed or copies.any():
            lanes[COPY] = lane(copies)
        doubts = doubted(rows)
        yield DeviceTimeline(device, rows, lanes, lane(doubts), lane(computes & ~doubts))


def _device(trace: Trace, timeline: DeviceTimeline) -> DeviceTables:
    # The steps in order of their numbers, each once; without any, the whole trace.
    steps, first = np.unique(trace.windows.step, return_index=True)
    window = Spans(trace.windows.start_ns[first], trace.windows.end_ns[first])
    marked = bool(len(steps))
    if not marked:
        steps, window = np.array([WHOLE_STEP], np.int64), timeline.whole
    *measured, whole = timeline.measure(Spans(*map(np.append, window, timeline.whole)))
    unseen = Unseen(trace.unseen, trace.compute_unseen) if trace.unseen else None
    lost, ran = (
        Counter(trace.lost.tolist()),
        Counter(timeline.rows.step[timeline.rows.cls != IntervalClass.COPY].tolist()),
    )
    in_all = lost.total(), ran.total()
    values, reasons = _metrics(whole, unseen, *in_all)
    place, tiles, masks = tile_windows(window, {TRACE_LANES.index(name): lane for name, lane in timeline.lanes.items()})
    return DeviceTables(
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
            device=str(timeline.device) if timeline.device != UNKNOWN else None,
            backend=trace.backend,
        ),
        device=timeline.device,
        global_step=steps,
        windows=window,
        measured=[
            _metrics(overlap, unseen, *((lost[step], ran[step]) if marked else in_all))
            for overlap, step in zip(measured, steps.tolist(), strict=True)
        ],
        collectives=collective_rows(trace, timeline.rows, steps if marked else None),
        segments=np.stack([place, *tiles, masks], axis=1),
        whole={
            "start_ns": int(timeline.whole.start[0]),
            "end_ns": int(timeline.whole.end[0]),
            "metrics": values,
            "null_reasons": reasons,
        },
        busy_ns=whole.window_ns - whole.idle_ns,
    )


def _metrics(overlap: Overlap, unseen: Unseen | None, lost: int, ran: int) -> Metrics:
    """Return the metrics of a window. Where launches lack their kernels, what rests on computation has only a bound,
    unless they are too few to matter (`DECIDED`).
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


def without_copies(traces: Sequence[TraceTables]) -> tuple[list[TraceTables], list[str]]:
    """Return the traces without those that repeat another one (`gzip -k` leaves both files), and a note about each: the
    same clock, rank, steps, and times to the nanosecond.
    """
    kept: dict[tuple[object, ...], TraceTables] = {}
    notes = []
    for trace in traces:
        facts = trace.facts
        times = [(each.global_step.tobytes(), *(end.tobytes() for end in each.windows)) for each in trace.devices]
        told = [(each.device, each.busy_ns, *each.whole["metrics"].values()) for each in trace.devices]
        known = facts.clock != "unknown" or facts.rank != UNKNOWN
        same = (facts.rank, facts.host, str(times), str(told)) if known else (id(trace),)
        if same in kept:
            notes.append(f"{facts.path}: the same steps at the same times as {kept[same].facts.path}: a copy")
        else:
            kept[same] = trace
    return list(kept.values()), notes


def windows_of_processes(traces: Sequence[TraceTables]) -> list[list[TraceTables]]:
    """Group the traces of one rank that are windows of one process: with other steps, one behind the other, or without
    marks of steps at other times of one clock, in one folder. Each group is in the order of its steps.
    """

    def order(trace: TraceTables) -> tuple[object, ...]:
        first = next(iter(trace.devices), None)
        begins = (0, 0) if first is None else (int(first.global_step[0]), first.whole["start_ns"])
        return trace.facts.rank, trace.facts.steps == 0, begins

    groups: list[list[TraceTables]] = []
    last: dict[int, list[TraceTables]] = {}
    for trace in sorted(traces, key=order):
        group = last.get(trace.facts.rank)
        if group is not None and trace.facts.rank != UNKNOWN and _follows(group[-1], trace):
            group.append(trace)
        else:
            last[trace.facts.rank] = [trace]
            groups.append(last[trace.facts.rank])
    return sorted(groups, key=lambda group: min(map(traces.index, group)))


def _follows(before: TraceTables, trace: TraceTables) -> bool:
    """Return whether a trace may be a later window of the same process."""
    same = (before.facts.clock, before.facts.world_size) == (trace.facts.clock, trace.facts.world_size)
    if not before.devices or not trace.devices or not same:
        return False
    if not before.facts.steps and not trace.facts.steps:
        ended = max(device.whole["end_ns"] for device in before.devices)
        same_folder = before.facts.path.rpartition("/")[0] == trace.facts.path.rpartition("/")[0]
        return same_folder and before.facts.clock != "unknown" and ended <= trace.devices[0].whole["start_ns"]
    ended, begun = before.devices[0].global_step[-1], trace.devices[0].global_step[0]
    return bool(before.facts.steps and trace.facts.steps and ended < begun)


def join_devices(traces: Sequence[TraceTables]) -> list[DeviceTables]:
    """Return the devices of one process, with the steps of all its traces; those without marks are numbered from 0."""
    found: dict[int, list[DeviceTables]] = {}
    for number, trace in enumerate(traces):
        for device in trace.devices:
            numbered = device if trace.facts.steps else replace(device, global_step=device.global_step + number)
            found.setdefault(device.device, []).append(numbered)
    return [same[0] if len(same) == 1 else _joined(same) for same in found.values()]


def _joined(parts: Sequence[DeviceTables]) -> DeviceTables:
    before = np.cumsum([0, *(len(part.global_step) for part in parts)])
    return replace(
        parts[0],
        global_step=np.concatenate([part.global_step for part in parts]),
        windows=Spans(*map(np.concatenate, zip(*(part.windows for part in parts), strict=True))),
        measured=[each for part in parts for each in part.measured],
        collectives=CollectiveRows.joined([part.collectives for part in parts], before),
        segments=np.concatenate(
            [part.segments + np.array([at, 0, 0, 0]) for part, at in zip(parts, before, strict=False)]
        ),
        whole=_whole([part.whole for part in parts]),
        busy_ns=sum(part.busy_ns for part in parts),
    )


def _whole(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the traces of one device measured as one: sums of times, and ratios of the sums."""
    told = [part["metrics"] for part in parts]
    reasons = dict(item for part in reversed(parts) for item in part["null_reasons"].items())
    values: dict[str, float | None] = {}
    for name in dict.fromkeys(name for each in told for name in each if name not in RATIO_PARTS):
        times = [each.get(name, 0.0) for each in told]  # a kind of collective that a window lacks took no time in it
        values[name] = None if None in times else sum(times)
    for name, (part, of) in RATIO_PARTS.items():
        if any(name in each for each in told):
            above, below = values[part], values[of]
            values[name] = above / below if above is not None and below else None
    return {
        "start_ns": min(part["start_ns"] for part in parts),
        "end_ns": max(part["end_ns"] for part in parts),
        "metrics": values,
        "null_reasons": {name: reasons[name] for name, value in values.items() if value is None and name in reasons},
    }
