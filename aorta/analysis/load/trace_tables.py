"""Reads one unit of traces and reduces it to the tables of its ranks, small enough to be sent between processes.

`read_trace_tables(unit)` measures each device of each trace with the definition that records are measured with
(`aorta.timeline`), and keeps what a report needs: tables, the whole trace as one window, and facts for the health of
the result. Must not: let the interval table leave the process, or invent what a trace does not say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from aorta.analysis.documents.traces import SlowdownEntry
from aorta.analysis.load.collective_costs import MOST_COUNTED, CostPart, order_identifies, ordinals, parts_of
from aorta.analysis.load.device_timelines import DeviceTimeline, by_launch, device_timelines
from aorta.analysis.load.interval_table import IntervalClass, Trace, collectives_of
from aorta.analysis.load.kernel_facts import KernelFacts, kernel_facts, slowdowns
from aorta.analysis.load.trace_files import TraceFiles, read_unit
from aorta.analysis.load.trace_health import TraceFacts, facts_of, usable
from aorta.analysis.metrics import RATIO_PARTS
from aorta.analysis.step_intervals import Details, StepIntervals, StepLanes, StepPart, StepPartRows
from aorta.analysis.tables import (
    KIND_METRICS,
    KINDS_KNOWN,
    NO_TIME,
    UNKNOWN,
    UNNUMBERED,
    CollectiveName,
    Collectives,
    CoverageFacts,
    Floats,
    RankTables,
    Source,
    Steps,
    of_unused_kind,
)
from aorta.records.schema import ActiveSegment, DeviceSample
from aorta.timeline.arrays import Int64
from aorta.timeline.classes import COMPUTE, KINDS, TRACE_LANES, UNKNOWN_KIND
from aorta.timeline.intervals import Interval
from aorta.timeline.overlap import DECIDED, Overlap, Unseen

WHOLE_STEP: Final = 0
"""Step number of the single window of a trace that marks no steps."""
UNKNOWN_GROUP: Final = "unknown"
"""Group name of collectives whose process group the trace does not state."""
END_SOURCE: Final = "trace"
"""Ends of collectives are as the trace has them."""
SHOWN_SLOWDOWNS: Final = 200
_COLUMNS: Final = ("global_step", "warmup", "start_mono_ns", "end_mono_ns", "t_start_ns", "t_end_ns")


@dataclass(frozen=True)
class TraceDetails(Details):
    """Details of a trace: segments (start, end, mask) in ns on its clock, step after step; those of a step end
    at its `segments_end`. Windows of steps may overlap, so time alone does not tell whose a segment is.
    """

    segments: Int64
    segments_end: Int64
    start_ns: Int64
    end_ns: Int64

    def step(self, place: int) -> StepIntervals:
        """Return which lanes were active when, in one step."""
        start, end = int(self.start_ns[place]), int(self.end_ns[place])
        rows = self.segments[int(self.segments_end[place - 1]) if place else 0 : int(self.segments_end[place])]
        segments = [ActiveSegment(low - start, high - start, mask) for low, high, mask in rows.tolist()]
        return StepIntervals(end - start, TRACE_LANES, segments)

    def lanes_of(self, places: npt.NDArray[np.intp]) -> StepLanes:
        """Return when it computed in some steps; a trace has no blocks and tells of no stalls."""
        counts = np.diff(self.segments_end, prepend=0)[places]
        step = np.repeat(np.arange(len(places)), counts)
        first = (self.segments_end[places] - counts)[step]
        rows = self.segments[first + np.arange(len(step)) - np.repeat(np.cumsum(counts) - counts, counts)]
        computes = rows[:, 2] >> TRACE_LANES.index(COMPUTE) & 1 != 0
        zero_ns = self.start_ns[places][step]
        columns = StepPart(step, rows[:, 0] - zero_ns, rows[:, 1] - zero_ns)
        compute, none = StepPart(*(column[computes] for column in columns)), StepPartRows().part()
        return StepLanes(compute, none, none, none, none.step, ())

    def device_samples(self) -> Iterator[tuple[DeviceSample, str | None]]:
        """Return none: traces hold no samples of sensors."""
        return iter(())


@dataclass(frozen=True)
class DeviceTables:
    """One device of one rank. `whole`: its whole trace measured as one window, as `summary.json` has it."""

    device: int
    tables: RankTables
    whole: dict[str, Any]
    busy_ns: int


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


def without_copies(traces: Sequence[TraceTables]) -> tuple[list[TraceTables], list[str]]:
    """Return the traces without those that repeat another one (`gzip -k` leaves both files), and a note about each: the
    same clock, rank, steps, and times to the nanosecond.
    """
    kept: dict[tuple[object, ...], TraceTables] = {}
    notes = []
    for trace in traces:
        steps = [device.tables.steps for device in trace.devices]
        times = [
            (each.global_step.tobytes(), each.start_mono_ns.tobytes(), each.end_mono_ns.tobytes()) for each in steps
        ]
        told = [(device.device, device.busy_ns, *device.whole["metrics"].values()) for device in trace.devices]
        known = trace.facts.clock != "unknown" or trace.facts.ranks != (UNKNOWN,)
        same = (trace.facts.ranks, trace.facts.host, str(times), str(told)) if known else (id(trace),)
        if same in kept:
            notes.append(f"{trace.facts.path}: the same steps at the same times as {kept[same].facts.path}: a copy")
        else:
            kept[same] = trace
    return list(kept.values()), notes


def windows_of_processes(traces: Sequence[TraceTables]) -> list[list[TraceTables]]:
    """Group the traces of one rank that are windows of one process: with other steps, one behind the other, or without
    marks of steps at other times of one clock, in one folder. Each group is in the order of its steps.
    """
    groups: list[list[TraceTables]] = []
    last: dict[tuple[int, ...], list[TraceTables]] = {}
    for trace in sorted(traces, key=lambda each: (each.facts.ranks, each.facts.steps == 0, _first(each))):
        group = last.get(trace.facts.ranks)
        if group is not None and trace.facts.ranks != (UNKNOWN,) and _follows(group[-1], trace):
            group.append(trace)
        else:
            last[trace.facts.ranks] = [trace]
            groups.append(last[trace.facts.ranks])
    return sorted(groups, key=lambda group: min(map(traces.index, group)))


def _first(trace: TraceTables) -> tuple[int, int]:
    if not trace.devices:
        return 0, 0
    steps = trace.devices[0].tables.steps
    return int(steps.global_step[0]) if len(steps) else 0, trace.devices[0].whole["start_ns"]


def _follows(before: TraceTables, trace: TraceTables) -> bool:
    """Return whether a trace may be a later window of the same process."""
    same = (before.facts.clock, before.facts.world_size) == (trace.facts.clock, trace.facts.world_size)
    if not before.devices or not trace.devices or not same:
        return False
    if not before.facts.steps and not trace.facts.steps:
        ended = max(device.whole["end_ns"] for device in before.devices)
        same_folder = before.facts.path.rpartition("/")[0] == trace.facts.path.rpartition("/")[0]
        return same_folder and before.facts.clock != "unknown" and ended <= trace.devices[0].whole["start_ns"]
    first, second = before.devices[0].tables.steps.global_step, trace.devices[0].tables.steps.global_step
    return bool(before.facts.steps and trace.facts.steps and first[-1] < second[0])


def join_devices(windows: Sequence[TraceTables]) -> list[DeviceTables]:
    """Return the devices of one process, with the steps of all its windows; those without marks are numbered from 0."""
    found: dict[int, list[DeviceTables]] = {}
    for number, window in enumerate(windows):
        for device in window.devices:
            tables = device.tables
            if not window.facts.steps:
                tables = replace(tables, steps=replace(tables.steps, global_step=tables.steps.global_step + number))
            found.setdefault(device.device, []).append(replace(device, tables=tables))
    return [same[0] if len(same) == 1 else _joined(same) for same in found.values()]


def _joined(devices: Sequence[DeviceTables]) -> DeviceTables:
    tables = [device.tables for device in devices]
    steps, rows = [each.steps for each in tables], [each.collectives for each in tables]
    details = [each.details for each in tables if isinstance(each.details, TraceDetails)]

    def shifted(columns: Sequence[Any], counts: Sequence[int]) -> Any:
        """Return columns as one, each raised by what is counted before it."""
        return np.concatenate([column + sum(counts[:at]) for at, column in enumerate(columns)])

    def together(columns: Iterable[Any]) -> Any:
        return np.concatenate(list(columns))

    joined = Steps(
        **{name: together(getattr(each, name) for each in steps) for name in _COLUMNS},
        rows_end=shifted([each.rows_end for each in steps], list(map(len, rows))),
        reason=shifted([each.reason for each in steps], [len(each.reasons) for each in steps]),
        reasons=tuple(said for each in steps for said in each.reasons),
        metrics=_metrics(
            [
                {name: float(each.metrics[name][at]) for name in each.metrics}
                for each in steps
                for at in range(len(each))
            ]
        ),
    )
    collectives = Collectives(
        tuple(name for each in rows for name in each.names),
        name=shifted([each.name for each in rows], [len(each.names) for each in rows]).astype(np.int32),
        **{name: together(getattr(each, name) for each in rows) for name in ("seq", "issue_ns", "start_ns", "end_ns")},
    )
    merged = replace(
        tables[0],
        steps=joined,
        collectives=collectives,
        details=TraceDetails(
            together(each.segments for each in details),
            shifted([each.segments_end for each in details], [len(each.segments) for each in details]),
            joined.start_mono_ns,
            joined.end_mono_ns,
        ),
        covered=CoverageFacts(end_sources=dict(sum((Counter(each.covered.end_sources) for each in tables), Counter()))),
    )
    return DeviceTables(devices[0].device, merged, _whole(devices), sum(device.busy_ns for device in devices))


def _whole(devices: Sequence[DeviceTables]) -> dict[str, Any]:
    """Return the windows of one device measured as one: sums of times, and ratios of the sums."""
    told = [device.whole["metrics"] for device in devices]
    reasons = dict(item for device in reversed(devices) for item in device.whole["null_reasons"].items())
    values: dict[str, float | None] = {}
    for name in dict.fromkeys(name for each in told for name in each if name not in RATIO_PARTS):
        parts = [each.get(name, 0.0) for each in told]  # a kind of collective that a window lacks took no time in it
        values[name] = None if None in parts else sum(parts)
    for name, (part, of) in RATIO_PARTS.items():
        if any(name in each for each in told):
            above, below = values[part], values[of]
            values[name] = above / below if above is not None and below else None
    return {
        "start_ns": min(device.whole["start_ns"] for device in devices),
        "end_ns": max(device.whole["end_ns"] for device in devices),
        "metrics": values,
        "null_reasons": {name: reasons[name] for name, value in values.items() if value is None and name in reasons},
    }


def _tables(trace: Trace) -> TraceTables:
    trace = by_launch(trace)
    clean = usable(trace)
    # Without computation in the table, hidden communication and slowdowns cannot be computed.
    parts = [] if clean.compute_unseen else parts_of(clean)
    slow = [] if clean.compute_unseen else slowdowns(clean.intervals)
    return TraceTables(
        devices=[_device(clean, timeline) for timeline in device_timelines(clean)],
        facts=facts_of(trace),
        kernels=kernel_facts(clean),
        parts=parts,
        slowdowns=slow[:SHOWN_SLOWDOWNS],
        slowdowns_left_out=len(slow[SHOWN_SLOWDOWNS:]),
    )


def _device(trace: Trace, timeline: DeviceTimeline) -> DeviceTables:
    unseen = Unseen(trace.unseen, trace.compute_unseen) if trace.unseen else None
    windows, steps = _windows(timeline)
    measured = [timeline.measure(window) for window in windows]
    ran = Counter(timeline.rows.step[timeline.rows.cls != IntervalClass.COPY].tolist())
    lost = Counter(trace.lost.tolist())
    told = [
        _told(overlap, unseen, *((lost[step], ran[step]) if len(timeline.steps) else (lost.total(), ran.total())))
        for overlap, step in zip(measured, steps.tolist(), strict=True)
    ]
    whole = timeline.measure(timeline.whole)
    collectives, counts = _collectives(trace, timeline, windows, steps)
    tiles = [timeline.segments(window) for window in windows]
    segments = np.concatenate(
        [np.zeros((0, 3), np.int64), *(np.stack([spans.start, spans.end, masks], axis=1) for spans, masks in tiles)]
    )
    table = _steps(windows, steps, told, np.cumsum(counts))
    values, reasons = _told(whole, unseen, lost.total(), ran.total())
    tables = RankTables(
        source=_source(trace, timeline),
        steps=table,
        collectives=collectives,
        details=TraceDetails(
            segments,
            np.cumsum([len(masks) for _, masks in tiles]),
            table.start_mono_ns,
            table.end_mono_ns,
        ),
        covered=CoverageFacts(end_sources={END_SOURCE: len(collectives)}),
    )
    busy_ns = whole.window_ns - whole.idle_ns
    start_ns, end_ns = timeline.whole
    entry = {"start_ns": start_ns, "end_ns": end_ns, "metrics": values, "null_reasons": reasons}
    return DeviceTables(timeline.device, tables, entry, busy_ns)


def _told(
    overlap: Overlap, unseen: Unseen | None, lost: int, ran: int
) -> tuple[dict[str, float | None], dict[str, str]]:
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


def _windows(timeline: DeviceTimeline) -> tuple[list[Interval], Int64]:
    """Return the steps in order of their numbers, each once; without any step, the whole trace."""
    if not len(timeline.steps):
        return [timeline.whole], np.array([WHOLE_STEP], np.int64)
    steps, chosen = np.unique(timeline.steps, return_index=True)
    starts, ends = timeline.windows.start[chosen].tolist(), timeline.windows.end[chosen].tolist()
    return list(zip(starts, ends, strict=True)), steps


def _steps(
    windows: list[Interval],
    numbers: Int64,
    told: list[tuple[dict[str, float | None], dict[str, str]]],
    rows_end: Int64,
) -> Steps:
    reasons: dict[tuple[tuple[str, str], ...], int] = {}
    codes = [reasons.setdefault(tuple(said.items()), len(reasons)) for _, said in told]
    start = np.array([window[0] for window in windows], np.int64)
    end = np.array([window[1] for window in windows], np.int64)
    return Steps(
        global_step=numbers,
        warmup=np.zeros(len(windows), bool),
        start_mono_ns=start,
        end_mono_ns=end,
        t_start_ns=start,
        t_end_ns=end,
        rows_end=rows_end,
        reason=np.array(codes, np.int64),
        reasons=tuple(dict(said) for said in reasons),
        metrics=_metrics([values for values, _ in told]),
    )


def _metrics(told: list[dict[str, float | None]]) -> dict[str, Floats]:
    """Return metric -> a value a step."""
    names = dict.fromkeys(name for values in told for name in values)
    columns = {
        name: np.array([np.nan if (value := values.get(name)) is None else value for values in told], np.float64)
        for name in names
    }
    unused = of_unused_kind([columns[name] for name in KINDS_KNOWN])
    for name in names.keys() & KIND_METRICS:
        absent = np.array([name not in values for values in told])
        columns[name][absent] = unused[absent]
    return columns


def _collectives(
    trace: Trace, timeline: DeviceTimeline, windows: list[Interval], steps: Int64
) -> tuple[Collectives, Int64]:
    """Return the collectives that start inside a window, by step, then start; and the number of them per step."""
    table = timeline.rows
    table = collectives_of(table.take(table.cls == IntervalClass.COMM))
    if len(timeline.steps):
        table = table.take(np.isin(table.step, steps))
        place = np.searchsorted(steps, table.step)
    else:
        place = np.zeros(len(table), np.int64)
    order = np.lexsort((table.start_ns, place))
    table, place = table.take(order), place[order]
    keys = np.stack([table.kind, table.group, table.bytes, table.dtype], axis=1).astype(np.int64)
    distinct, code = np.unique(keys, axis=0, return_inverse=True)
    code = code.reshape(-1)
    names = tuple(
        CollectiveName(
            KINDS[kind] if kind != UNKNOWN else UNKNOWN_KIND,
            table.groups[group] if group != UNKNOWN else UNKNOWN_GROUP,
            size,
            table.dtypes[dtype] if dtype != UNKNOWN else None,
            END_SOURCE,
        )
        for kind, group, size, dtype in distinct.tolist()
    )
    begin = np.array([window[0] for window in windows], np.int64)[place] if len(table) else table.start_ns
    collectives = Collectives(
        names,
        name=code.astype(np.int32),
        seq=np.where(table.seq != UNKNOWN, table.seq, _numbers(trace, place, code)),
        issue_ns=np.full(len(table), NO_TIME, np.int64),  # the trace does not record when it was issued
        start_ns=table.start_ns - begin,
        end_ns=table.end_ns - begin,
    )
    return collectives, np.bincount(place, minlength=len(steps)).astype(np.int64)


def _numbers(trace: Trace, place: Int64, code: Int64) -> Int64:
    """Return the sequence numbers for collectives that the source does not number."""
    numbers = ordinals(place, code)
    return numbers if order_identifies(trace) else UNNUMBERED - numbers % MOST_COUNTED


def _source(trace: Trace, timeline: DeviceTimeline) -> Source:
    device = str(timeline.device) if timeline.device != UNKNOWN else None
    return Source(
        path=trace.path,
        format=trace.format,
        rank=timeline.rank,
        world_size=trace.world_size or 0,
        lanes=TRACE_LANES,
        timer=trace.format,
        instrument_mode=trace.format,
        groups=trace.group_ranks,
        host=trace.host,
        platform=trace.platform,
        device=device,
        backend=trace.backend,
    )
