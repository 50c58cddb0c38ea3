"""One unit of traces -> what a report needs of it, small enough to travel between processes.

Enters: a `Unit`. Leaves: a `TraceScan`: for each rank and device the same columns as a record of AORTA's own
(`readers.scan.Scan`), so that everything after it is one path; the whole trace measured as one window; and the facts
for the health of the result. Must not: let the interval table leave the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np

from aorta.analysis.readers.scan import INTEGERS, KIND_METRICS, KINDS_KNOWN, LOSSES, ROW, UNNUMBERED, Scan, What
from aorta.analysis.readers.scan import NULL as NO_TIME
from aorta.analysis.traces.costs import Part, parts_of
from aorta.analysis.traces.health import Facts, facts_of, usable
from aorta.analysis.traces.measuring import DeviceTimeline, device_timelines
from aorta.analysis.traces.numbering import MOST_COUNTED, order_identifies, ordinals
from aorta.analysis.traces.slowdown import Slowdown, slowdowns
from aorta.analysis.traces.table import NULL, Class, Trace
from aorta.analysis.traces.units import Unit, read_unit
from aorta.telemetry.schema import SCHEMA_VERSION, ClockReading, Footer, Header, InstrumentMode, Platform
from aorta.timeline.arrays import Int64
from aorta.timeline.classes import KINDS, TRACE_STREAMS, UNKNOWN_KIND
from aorta.timeline.intervals import Interval
from aorta.timeline.overlap import Unseen

WHOLE_STEP: Final = 0
"""Number of the one window of a trace that marks no steps."""
UNKNOWN: Final = "unknown"
NO_BYTES: Final = -1
END_SOURCE: Final = "trace"
SHOWN_SLOWDOWNS: Final = 200
_NO_CLOCK: Final = ClockReading(0, 0, 0, 0)


@dataclass(frozen=True)
class Whole:
    """A device's whole trace as one window: flat metrics, and the reasons for those that are null."""

    window: Interval
    metrics: Mapping[str, float | None]
    reasons: Mapping[str, str]


@dataclass(frozen=True)
class DeviceScan:
    """One device of one rank. `segments` are rows of (start, end, mask) in ns, of all windows, by start. `trace` is the
    place of its trace in the unit: a process may have used several devices.
    """

    rank: int
    device: int
    scan: Scan
    whole: Whole
    segments: Int64
    busy_ns: int
    trace: int


@dataclass(frozen=True)
class TraceScan:
    """What one unit holds."""

    devices: tuple[DeviceScan, ...]
    facts: tuple[Facts, ...]
    parts: tuple[Part, ...]
    slowdowns: tuple[Slowdown, ...]
    slowdowns_left_out: int
    """Beyond the first `SHOWN_SLOWDOWNS` of each trace."""


def scan_unit(unit: Unit) -> TraceScan:
    """Read one unit and measure it.

    Raises:
        InputError: it cannot be read.
    """
    devices: list[DeviceScan] = []
    facts: list[Facts] = []
    parts: list[Part] = []
    slow: list[Slowdown] = []
    left_out = 0
    for place, trace in enumerate(read_unit(unit)):
        facts.append(facts_of(trace))
        clean = usable(trace)
        devices += [_device(clean, timeline, place) for timeline in device_timelines(clean)]
        if clean.compute_unseen:
            continue  # what hides communication, and what it slows down, is not in the table
        parts += parts_of(clean)
        of_trace = slowdowns(clean.intervals)
        slow += of_trace[:SHOWN_SLOWDOWNS]
        left_out += len(of_trace[SHOWN_SLOWDOWNS:])
    return TraceScan(tuple(devices), tuple(facts), tuple(parts), tuple(slow), left_out)


def _device(trace: Trace, timeline: DeviceTimeline, place: int) -> DeviceScan:
    unseen = Unseen(trace.unseen, trace.compute_unseen) if trace.unseen else None
    windows, steps = _windows(timeline)
    measured = [timeline.measure(window) for window in windows]
    told = [overlap.metrics(unseen) for overlap in measured]
    whole = timeline.measure(timeline.whole)
    columns = _columns(trace, timeline, windows, steps, told)
    tiles = [timeline.segments(window) for window in windows]
    segments = np.concatenate(
        [np.zeros((0, 3), np.int64), *(np.stack([spans.start, spans.end, masks], axis=1) for spans, masks in tiles)]
    )
    values, reasons = whole.metrics(unseen)
    return DeviceScan(
        timeline.rank,
        timeline.device,
        columns,
        Whole(timeline.whole, values, reasons),
        segments,
        whole.window_ns - whole.idle_ns,
        place,
    )


def _windows(timeline: DeviceTimeline) -> tuple[list[Interval], Int64]:
    """The steps in order of their numbers, each once; without any, the whole."""
    if not len(timeline.steps):
        return [timeline.whole], np.array([WHOLE_STEP], np.int64)
    steps, chosen = np.unique(timeline.steps, return_index=True)
    starts, ends = timeline.windows.start[chosen].tolist(), timeline.windows.end[chosen].tolist()
    return list(zip(starts, ends, strict=True)), steps


def _columns(
    trace: Trace,
    timeline: DeviceTimeline,
    windows: list[Interval],
    steps: Int64,
    told: list[tuple[dict[str, float | None], dict[str, str]]],
) -> Scan:
    whats, rows, counts = _collectives(trace, timeline, windows, steps)
    names = tuple(dict.fromkeys(name for values, _ in told for name in values))
    reasons: dict[tuple[tuple[str, str], ...], int] = {}
    codes = [reasons.setdefault(tuple(said.items()), len(reasons)) for _, said in told]
    start = np.array([window[0] for window in windows], np.int64)
    end = np.array([window[1] for window in windows], np.int64)
    numbers = {
        "step": steps,
        "global_step": steps,
        "start_mono_ns": start,
        "end_mono_ns": end,
        "t_start_ns": start,
        "t_end_ns": end,
        "reasons": np.array(codes, np.int64),
        "rows_end": np.cumsum(counts),
    }
    nothing = np.zeros(len(steps), np.int64)
    integers = np.stack([numbers.get(name, nothing) for name in INTEGERS])
    losses = np.full((len(LOSSES), len(steps)), np.nan)
    metrics = np.array([[_value(values, name) for values, _ in told] for name in names], np.float64)
    return Scan(
        path=cast("Any", trace.path),  # a URL stays as it is; a report only prints it
        header=_header(trace, timeline),
        footer=Footer("completed", 0, len(steps), _NO_CLOCK, {k: list(v) for k, v in trace.group_ranks.items()}),
        problems=(),
        step_count=len(steps),
        row_count=len(rows),
        read_count=len(steps),
        metrics=names,
        whats=whats,
        reasons=tuple(dict(said) for said in reasons),
        coverages=(),
        isolated={},
        end_sources={END_SOURCE: len(rows)},
        uncovered=0,
        coverage_reasons={},
        first_missed=None,
        blob=b"".join(part.tobytes() for part in (integers, losses, metrics.reshape(len(names), len(steps)), rows)),
    )


def _value(values: Mapping[str, float | None], name: str) -> float:
    """A kind that a step does not mention was not used in it: 0, unless kinds are null."""
    if name in values or name not in KIND_METRICS or any(values[witness] is None for witness in KINDS_KNOWN):
        value = values.get(name)
        return np.nan if value is None else value
    return 0.0


def _collectives(
    trace: Trace, timeline: DeviceTimeline, windows: list[Interval], steps: Int64
) -> tuple[tuple[What, ...], Int64, Int64]:
    """Collectives that start inside a window, by step, then start: rows of `scan.ROW`, and how many a step."""
    table = timeline.rows
    table = table.take(table.cls == Class.COMM)
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
    whats: list[What] = [
        (
            KINDS[kind] if kind != NULL else UNKNOWN_KIND,
            table.groups[group] if group != NULL else UNKNOWN,
            size if size != NULL else NO_BYTES,
            table.dtypes[dtype] if dtype != NULL else None,
            END_SOURCE,
        )
        for kind, group, size, dtype in distinct.tolist()
    ]
    begin = np.array([window[0] for window in windows], np.int64)[place] if len(table) else table.start_ns
    rows = np.empty((len(table), len(ROW)), np.int64)
    rows[:, 0] = code
    rows[:, 1] = np.where(table.seq != NULL, table.seq, _numbers(trace, place, code))
    rows[:, 2] = NO_TIME  # when it was issued is not in the trace
    rows[:, 3], rows[:, 4] = table.start_ns - begin, table.end_ns - begin
    return tuple(whats), rows, np.bincount(place, minlength=len(steps)).astype(np.int64)


def _numbers(trace: Trace, place: Int64, code: Int64) -> Int64:
    """Of collectives that the source does not number."""
    numbers = ordinals(place, code)
    return numbers if order_identifies(trace) else UNNUMBERED - numbers % MOST_COUNTED


def _header(trace: Trace, timeline: DeviceTimeline) -> Header:
    """The facts that a report prints and compares; what a trace does not say is "unknown"."""
    return Header(
        schema_version=SCHEMA_VERSION,
        run_id=trace.path,
        label=trace.format,
        attempt=0,
        rank=timeline.rank,
        world_size=trace.world_size or 0,
        local_rank=NULL,
        node_rank=NULL,
        host=trace.host or UNKNOWN,
        pid=0,
        boot_id="",
        platform=cast("Platform", trace.platform or UNKNOWN),
        device=str(timeline.device) if timeline.device != NULL else UNKNOWN,
        backend=trace.backend,
        parallel=UNKNOWN,
        timer=cast("Any", trace.format),
        instrument_mode=cast("InstrumentMode", trace.format),
        manifest_hash="",
        start_step=0,
        warmup_steps=0,
        clock=_NO_CLOCK,
        streams=TRACE_STREAMS,
    )
