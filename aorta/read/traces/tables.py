"""Reads one unit of traces and reduces it to what a report needs of each device, small enough to be sent between
processes.

`read_trace_tables(unit)` measures all steps of a device at once, and the whole trace as one window, with the definition
that records are measured with (`aorta.timeline`). Must not: let the interval table leave the process, invent what a
trace does not say, define a metric, or put two devices into one union (W15).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from aorta.documents.kernels import TraceEntry
from aorta.errors import InputError
from aorta.read.frames import Floats, Groups, Lane, SpanName, SpanRows, Spans, Steps, metric_columns
from aorta.read.ledger import COMM, LANES, WHOLE, Gap, audit, balanced, lacking
from aorta.read.run import Details, RankTables, Source, StepIntervals
from aorta.read.traces.chrome_json import LARGEST_NS
from aorta.read.traces.consistency import unrecorded, wrong_clocks
from aorta.read.traces.files import TraceFiles, read_unit
from aorta.read.traces.health import SHOWN_DOUBTS, check_rows, outlasting
from aorta.read.traces.interval_table import (
    KIND_CODE,
    LANE_CLASSES,
    NO_WINDOWS,
    NULL,
    IntervalClass,
    Intervals,
    Trace,
    Windows,
    by_device,
    collectives_in,
    look_up,
    overlapping_ns,
    step_of,
    windows,
)
from aorta.read.traces.kernels import KernelFacts, kernel_facts
from aorta.records.schema import ActiveSegment
from aorta.timeline.arrays import Int64, IntervalArray, covered_ns, measure, merge, ranges, tile_windows
from aorta.timeline.classes import COMPUTE, COPY, TRACE_LANES, UNKNOWN_KIND, doubtful
from aorta.timeline.overlap import DECIDED, NS_PER_MS, Bounds, Overlap, either, measure_windows

WHOLE_STEP: Final = 0
"""Step number of the single window of a trace that marks no steps."""
MOST_DEVICES: Final = 1024
"""Of one trace: sixteen times the devices of the largest host (8 MI300X in 64 partitions)."""
OF_LENGTH: Final = ("window_ms", "idle_ms", "exposed_share")
"""Metrics that rest on how long a window lasts."""
OUTSIDE: Final = 0.1
"""From this part of the time of a device on, rows outside of the steps mean that it lags behind the marks."""
DOUBTED: Final = "kernels counted as computation have names that may communicate ({names}): --comm-pattern decides"
COPIES_DOUBTED: Final = (
    "copies between devices may be communication (symmetric memory), which the trace does not say: it is {bounds}"
)
NAMES_DOUBTED: Final = "communication lacks rows, and may have run under names not known to compute: it is {bounds}"
CALLS_DOUBTED: Final = (
    "kernels are communication by one of name, arguments and call, and not by another: it is {bounds}"
)
STRANGERS: Final = "kernels that no call launched may be of another process, or there twice: it is {bounds}"
UNTIMED: Final = "no row of the device has a length, so it is not known how far it lags behind the steps of the host"
AHEAD: Final = "what the step launched runs longer than the host took for it: the host runs ahead of the device"
WAITED: Final = (
    "the first or last collective of the trace lasts {length:.4g} ms, {share:.1%} of all communication: it seems to "
    "have waited for ranks whose recording began later or ended earlier, and is left out"
)


@dataclass(frozen=True)
class TraceDetails(Details):
    """Details of a trace. Rows of `segments` are (step, start, end, mask) in ns on its clock, step after step. Windows
    of steps may overlap, so time alone does not tell whose a segment is.
    """

    segments: Int64
    start_ns: Int64
    end_ns: Int64

    def step(self, index: int) -> StepIntervals:
        """Return which lanes were active when, in one step."""
        start = int(self.start_ns[index])
        first, last = np.searchsorted(self.segments[:, 0], [index, index + 1])
        rows = self.segments[first:last, 1:].tolist()
        segments = [ActiveSegment(low - start, high - start, mask) for low, high, mask in rows]
        return StepIntervals(int(self.end_ns[index]) - start, TRACE_LANES, segments)

    def spans(self, indices: npt.NDArray[np.intp]) -> Spans:
        """Return when it computed in some steps; a trace has no blocks and tells of no stalls."""
        computes = self.segments[self.segments[:, 3] >> TRACE_LANES.index(COMPUTE) & 1 != 0]
        step, rows = ranges(*(np.searchsorted(computes[:, 0], indices, side=side) for side in ("left", "right")))
        start, end = computes[rows, 1:3].T - self.start_ns[indices][step]
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
    """What is kept of one trace; its process may have used several devices."""

    devices: list[DeviceTables]
    facts: TraceEntry
    kernels: KernelFacts

    @property
    def rank(self) -> int:
        """The rank that it states; `NULL` where it does not."""
        return NULL if self.facts.rank is None else self.facts.rank


def read_trace_tables(unit: TraceFiles) -> list[TraceTables]:
    """Read one unit and measure its traces.

    Raises:
        InputError: it cannot be read.
    """
    return list(map(_tables, read_unit(unit)))


def _tables(trace: Trace) -> TraceTables:
    if (count := len(np.unique(trace.intervals.device))) > MOST_DEVICES:
        raise InputError(f"{trace.path}: names {count} devices; a trace of one host has at most {MOST_DEVICES}")
    trace, facts = check_rows(unrecorded(by_launch(trace)))
    return TraceTables(
        devices=[_device(trace, timeline) for timeline in device_timelines(trace)],
        facts=facts,
        kernels=kernel_facts(trace),
    )


def by_launch(trace: Trace) -> Trace:
    """Return the trace with the steps that its devices ran, where these lag behind the marks of the host.

    Where most time of the devices was launched in another step than it ran in, each step is what it launched, from the
    first start to the last end, or for as long as its mark where that is longer and no other begins. Where launches are
    not known, or only of less than half of the time, and much of it lies outside of the steps, there are none. Of a
    device on another clock nothing is said.
    """
    table, marks = trace.intervals, trace.windows
    if wrong := wrong_clocks(trace):
        return replace(trace, gaps=(*trace.gaps, *wrong))
    if not len(marks) or not len(table):
        return trace
    linked = table.launch_ns != NULL
    launched = np.where(linked, step_of(table.launch_ns, marks), NULL)
    length, on_device = np.maximum(table.end_ns - table.start_ns, 0), table.device != NULL
    later = (launched != NULL) & (launched != table.step)
    outside = ~linked & (table.step == NULL) & on_device & (table.start_ns >= marks.start_ns.min())
    total = int(length[on_device].sum())
    if not (later.any() or outside.any()):
        return trace
    step, steps, of_launch, gaps = table.step, marks, False, list(trace.gaps)
    note = f"{int(later.sum())} of {int(linked.sum())} kernels ran outside of the step that launched them"
    if length[later].sum() * 2 > total or later.sum() * 2 > on_device.sum():
        known = table.take(launched != NULL)
        own = Groups(launched[launched != NULL])
        start, end = own.reduce(np.minimum, known.start_ns), own.reduce(np.maximum, known.end_ns)
        numbers = launched[launched != NULL][own.first]
        lasted = look_up(numbers, marks.step, marks.end_ns - marks.start_ns)
        longer = np.minimum(start + lasted, np.append(start[1:], LARGEST_NS))  # idle time behind it is the step's, too
        step, steps = launched, windows(numbers, start, np.maximum(end, longer))
        note += ": each step is what it launched"
        if of_launch := bool((steps.start_ns[1:] < steps.end_ns[:-1]).any()):
            steps = marks  # a row counts in one step: windows that overlap cannot say which
            note += ", for as long as the host's step lasted: the device works on several steps at once"
        else:
            note += ", from its first start to its last end, or for as long as the host's step lasted"
        gaps += _of_unknown_steps(table, launched, on_device & ~linked, steps)
    elif length[outside].sum() > OUTSIDE * total and 2 * length[(launched != NULL) & ~later].sum() < total:
        step, steps = np.full(len(table), NULL), NO_WINDOWS
        share = length[outside].sum() / total
        note = f"launches are unknown, and {share:.0%} of the device's time is outside of the steps: "
        note += "the whole trace is measured"
    elif later.any():
        note += "; steps are cut where the host marked them"
    else:
        return trace
    table, notes = replace(table, step=step), (*trace.notes, f"{trace.path}: {note}")
    return replace(trace, intervals=table, windows=steps, of_launch=of_launch, gaps=tuple(gaps), notes=notes)


def _of_unknown_steps(
    table: Intervals, launched: npt.NDArray[np.int64], unlinked: npt.NDArray[np.bool_], steps: Windows
) -> Iterator[Gap]:
    """Yield the lanes of steps to which rows without a launch may belong. A stream runs in the order of launches: a
    kernel is of no earlier step than the one before it, and of no later one than the next. Of a copy that nothing
    launched the stream is no evidence: engines of their own move copies.
    """
    why = "the device lags behind the steps, and rows without a launch belong to an unknown one"
    number = look_up(launched, steps.step, np.arange(len(steps)))
    length = np.maximum(table.end_ns - table.start_ns, 0)
    earliest, latest = np.zeros(len(table), np.int64), np.full(len(table), len(steps) - 1)
    for rows in Groups(table.device, table.stream, table.cls == IntervalClass.COPY).rows:
        own = rows[np.argsort(table.start_ns[rows], kind="stable")]
        known = np.flatnonzero(number[own] >= 0)
        if len(known) and table.cls[own[0]] != IntervalClass.COPY:
            after = np.searchsorted(known, np.arange(len(own)))
            earliest[own] = np.append(0, number[own][known])[after]
            latest[own] = np.append(number[own][known], len(steps) - 1)[after]
    for lane, cls in LANE_CLASSES.items():
        doubtful, of_lane = unlinked & (table.cls == cls), table.cls == cls
        for index, step in enumerate(steps.step.tolist()):
            lacks = int(length[doubtful & (earliest <= index) & (index <= latest)].sum())
            if lacks > DECIDED * (lacks + int(length[of_lane & (number == index)].sum())):
                yield Gap(lane, why, step, seen=False)


@dataclass(frozen=True)
class DeviceTimeline:
    """One device. Rows that may belong to another account have that one in `second`, and `why` says so. `waits` are in
    no lane (`outlasting`). Only the `counted` rows communicate and copy (None: all).
    """

    device: int
    rows: Intervals
    second: npt.NDArray[np.int8]
    why: str
    waits: Intervals
    copies_observed: bool
    counted: npt.NDArray[np.bool_] | None = None

    @cached_property
    def lanes(self) -> dict[str, IntervalArray]:
        """Merged spans by lane of the timeline; a lane that the source does not observe is missing."""
        return self._lanes(self.rows.cls, self.rows.kind)

    @cached_property
    def whole(self) -> IntervalArray:
        """One window, from the first start to the last end of any interval of known class."""
        start = min((lane.start[0] for lane in self.lanes.values() if len(lane.start)), default=0)
        end = max((lane.end[-1] for lane in self.lanes.values() if len(lane.end)), default=0)
        return IntervalArray(np.array([start]), np.array([end]))

    def measure(self, window: IntervalArray) -> list[Overlap]:
        """Measure windows on this device. Rows that may be in two accounts are read both ways, which gives bounds."""
        measured = _measured(window, self.lanes)
        doubts = self.second != self.rows.cls
        if not doubts.any():
            return measured
        in_doubt = covered_ns(window, merge(self.rows.take(doubts).spans)) > 0
        others = _measured(window, self._lanes(self.second, np.where(doubts, NULL, self.rows.kind)))
        return [
            either(overlap, other, self.why) if doubt else overlap
            for overlap, other, doubt in zip(measured, others, in_doubt, strict=True)
        ]

    def _lanes(self, cls: npt.NDArray[np.int8], kind: npt.NDArray[np.int8]) -> dict[str, IntervalArray]:
        counted = True if self.counted is None else self.counted
        communicates, copied = counted & (cls == IntervalClass.COMM), counted & (cls == IntervalClass.COPY)
        chosen = {COMPUTE: cls == IntervalClass.COMPUTE}
        for name, code in (*KIND_CODE.items(), (UNKNOWN_KIND, NULL)):
            if (of_kind := communicates & (kind == code)).any():
                chosen[name] = of_kind
        if self.copies_observed or copied.any():
            chosen[COPY] = copied
        return {name: merge(self.rows.take(of).spans) for name, of in chosen.items()}


def _measured(window: IntervalArray, lanes: Mapping[str, IntervalArray]) -> list[Overlap]:
    comm = {kind: lanes[kind] for kind in KIND_CODE if kind in lanes}
    unknown, copy = lanes.get(UNKNOWN_KIND), lanes.get(COPY)
    return measure_windows(window, compute=lanes[COMPUTE], comm=comm, of_unknown_kind=unknown, copy=copy)


def device_timelines(trace: Trace) -> Iterator[DeviceTimeline]:
    """Yield every device that has rows of a known class."""
    known = trace.intervals.take(trace.intervals.cls != IntervalClass.UNKNOWN)
    for device, rows in by_device(known):
        waits = outlasting(rows)
        waited, rows = rows.take(waits), rows.take(~waits)
        second, reasons = rows.cls.copy(), []
        for chosen, account, why in second_accounts(rows):
            if chosen.any():
                second[chosen] = account
                reasons.append(why)
        yield DeviceTimeline(device, rows, second, "; ".join(reasons), waited, trace.copies_observed)


def second_accounts(rows: Intervals) -> Iterator[tuple[npt.NDArray[np.bool_], int, str]]:
    """Yield rows of a device that may belong to another account, which one, and why."""
    doubts = rows.named(doubtful) & (rows.cls == IntervalClass.COMPUTE) & (rows.device != NULL)
    largest = Groups(rows.name[doubts])
    names = [rows.names[code] for code in rows.name[doubts][largest.first][np.argsort(-largest.sizes)].tolist()]
    named = ", ".join(re.sub("[{};]", "", repr(name[:80])) for name in names[:SHOWN_DOUBTS])
    yield doubts, IntervalClass.COMM, DOUBTED.format(names=named) + ": it is {bounds}"
    for cls, second, why in (
        (IntervalClass.COPY, IntervalClass.COMM, COPIES_DOUBTED),
        (IntervalClass.COMPUTE, IntervalClass.COMM, NAMES_DOUBTED),
        (IntervalClass.COMM, IntervalClass.COMPUTE, CALLS_DOUBTED),
        (IntervalClass.COMPUTE, IntervalClass.UNKNOWN, STRANGERS),
        (IntervalClass.COMM, IntervalClass.UNKNOWN, STRANGERS),
    ):
        yield (rows.cls == cls) & (rows.second == second), second, why


def waited(timeline: DeviceTimeline) -> str:
    """Return what is said of the collectives that waited."""
    length = float((timeline.waits.end_ns - timeline.waits.start_ns).max()) / 1e6
    rows, own = timeline.rows, timeline.rows.cls == IntervalClass.COMM
    share = length / (length + float((rows.end_ns - rows.start_ns)[own].sum()) / 1e6)
    return WAITED.format(length=length, share=share)


def _gaps(trace: Trace, timeline: DeviceTimeline, window: IntervalArray, steps: Sequence[int]) -> list[list[Gap]]:
    """Return what the lanes of a device may lack in each window, `WHOLE` among `steps` included."""
    table, device = trace.intervals, timeline.device
    here = (table.device == device) | (table.device == NULL)
    nameless = here & (table.cls == IntervalClass.UNKNOWN) & (table.end_ns > table.start_ns)
    spans = dict(trace.unknown)
    if nameless.any():
        spans[f"{int(nameless.sum())} rows have no name"] = merge(table.take(nameless).spans)
    of_whole = np.array(steps) == WHOLE  # ends with what was seen: rows may lie outside of it
    left = {why: np.where(of_whole, measure(own), covered_ns(window, own)) for why, own in spans.items()}
    gaps = list(trace.gaps)
    sends = table.cls == IntervalClass.COMM
    if sends.any() and trace.world_size != 1 and not sends[table.device == device].any():
        others = ", ".join(map(str, np.unique(table.device[sends]).tolist()))
        gaps += lacking(f"communication of this process is known on device {others} only", COMM, seen=False)
    if sends.any() and trace.world_size != 1 and not here.all() and (seen := _one_device(table)):
        why = f"rows of one stream are on devices {seen} in turns and never at once, so one device has several numbers"
        gaps += lacking(why, *LANES, seen=False)
    if len(timeline.waits):  # it would have lasted no longer than any other
        own, longest = timeline.rows.cls == IntervalClass.COMM, timeline.rows.spans
        most_ns, why = int((longest.end - longest.start)[own].max()), waited(timeline)
        among = np.flatnonzero(covered_ns(window, merge(timeline.waits.spans))).tolist()
        gaps += [Gap(COMM, why, steps[index], most_ns, seen=steps[index] == WHOLE) for index in among]
    return [
        [
            *(gap for gap in gaps if gap.step in (None, step)),
            *(Gap(lane, why, step, int(ns[index])) for why, ns in left.items() if ns[index] for lane in LANES),
        ]
        for index, step in enumerate(steps)
    ]


def _one_device(table: Intervals) -> str:
    """Return devices that share the number of a stream, and never run at once on it: devices of a process do."""
    rows = table.take((table.device != NULL) & (table.stream != NULL))
    streams, own = Groups(rows.stream), Groups(rows.stream, rows.device)
    devices = np.bincount(streams.of_row[own.first], minlength=len(streams))
    rows = rows.take(devices[streams.of_row] > 1)
    rows = rows.take(np.argsort(rows.start_ns, kind="stable"))
    at_once = int(overlapping_ns(rows, rows.stream).sum() - overlapping_ns(rows, rows.stream, rows.device).sum())
    alternate = len(rows) and at_once <= DECIDED * int((rows.end_ns - rows.start_ns).sum())
    return ", ".join(map(str, np.unique(rows.device).tolist())) if alternate else ""


def _device(trace: Trace, timeline: DeviceTimeline) -> DeviceTables:
    # The steps in order of their numbers, each once; without any, the whole trace.
    numbers, first = np.unique(trace.windows.step, return_index=True)
    window = IntervalArray(trace.windows.start_ns[first], trace.windows.end_ns[first])
    marked = bool(len(numbers))
    if not marked:
        numbers, window = np.array([WHOLE_STEP], np.int64), timeline.whole
    every = IntervalArray(*map(np.append, window, timeline.whole))
    names = [*(numbers.tolist() if marked else [WHOLE]), WHOLE]
    measured = timeline.measure(every)
    if trace.of_launch:
        for index, (step, marks) in enumerate(zip(names[:-1], measured, strict=False)):
            measured[index] = _launched(timeline, timeline.rows.step == step, marks.window_ns)
    gaps = _gaps(trace, timeline, every, names)
    balances = [
        balanced(overlap, own, open_ended=name == WHOLE)
        for overlap, own, name in zip(measured, gaps, names, strict=True)
    ]
    *of_steps, of_whole = balances
    whole, values = measured[-1], of_whole.values
    if trace.of_launch:
        for balance, overlap in zip(of_steps, measured, strict=False):
            balance.values["idle_ms"], balance.reasons["idle_ms"] = None, "the device works on several steps at once"
            if max(overlap.compute_ns, overlap.comm_ns) > overlap.window_ns:
                balance.values.update(dict.fromkeys(OF_LENGTH))
                balance.reasons.update(dict.fromkeys(OF_LENGTH, AHEAD))
    waits_ns = covered_ns(every, merge(timeline.waits.spans)).tolist()
    for balance, waits, overlap in zip(balances, waits_ns, measured, strict=True):
        if waits > DECIDED * overlap.window_ns:
            balance.values.update(dict.fromkeys(OF_LENGTH))
            balance.reasons.update(dict.fromkeys(OF_LENGTH, waited(timeline)))
    if timeline.device != NULL and not (timeline.rows.end_ns > timeline.rows.start_ns).any():
        for balance in of_steps:
            balance.values.update(dict.fromkeys(OF_LENGTH))
            balance.reasons.update(dict.fromkeys(OF_LENGTH, UNTIMED))
    reasons: dict[tuple[tuple[str, str], ...], int] = {}
    codes = [reasons.setdefault(tuple(balance.reasons.items()), len(reasons)) for balance in of_steps]
    lanes = {TRACE_LANES.index(name): lane for name, lane in timeline.lanes.items()}
    in_step, tiles, masks = tile_windows(window, lanes)
    steps, broken = audit(
        Steps(
            global_step=numbers,
            warmup=np.zeros(len(numbers), bool),
            start_mono_ns=window.start,
            end_mono_ns=window.end,
            t_start_ns=window.start,
            t_end_ns=window.end,
            reason=np.array(codes, np.int64),
            reasons=tuple(map(dict, reasons)),
            metrics=_columns([balance.values for balance in of_steps]),
            bounds=_bounds([balance.bounds for balance in of_steps]),
        ),
        values if marked else None,
    )
    doubts = [Gap(lane, why.partition(": it is ")[0]) for why in timeline.why.split("; ") if why for lane in LANES[:2]]
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
            steps=steps,
            collectives=collectives,
            details=TraceDetails(np.stack([in_step, *tiles, masks], axis=1), window.start, window.end),
            gaps=(*dict.fromkeys([*trace.gaps, *(gap for own in gaps for gap in own), *doubts, *broken]),),
        ),
        whole={
            "start_ns": int(timeline.whole.start[0]),
            "end_ns": int(timeline.whole.end[0]),
            "metrics": values,
            "null_reasons": of_whole.reasons,
        },
        busy_ns=whole.window_ns - whole.idle_ns,
    )


def _launched(timeline: DeviceTimeline, rows: npt.NDArray[np.bool_], window_ns: int) -> Overlap:
    """Measure the rows that a step launched, wherever they ran. What any step computes hides its communication."""
    own = replace(timeline, rows=timeline.rows.take(rows), second=timeline.second[rows])
    (computed,), (beside,) = own.measure(own.whole), replace(timeline, counted=rows).measure(own.whole)
    bounds = {**beside.bounds}
    if bounds:
        compute_ms, least_ms, most_ms = computed.compute_ns / NS_PER_MS, *bounds["exposed_comm_ms"]
        bounds["compute_ms"] = computed.bounds.get("compute_ms", (compute_ms, compute_ms))
        bounds["overlap_over_compute"] = 0.0, inf
        bounds["exposed_share"] = least_ms * NS_PER_MS / window_ns, most_ms * NS_PER_MS / window_ns
    return replace(beside, window_ns=window_ns, compute_ns=computed.compute_ns, bounds=bounds)


def _columns(measured: Sequence[Mapping[str, float | None]]) -> dict[str, Floats]:
    alike: dict[tuple[str, ...], list[int]] = {}
    for index, values in enumerate(measured):
        alike.setdefault(tuple(values), []).append(index)
    groups = (
        (names, np.array(own), np.array([tuple(measured[index].values()) for index in own], np.float64))
        for names, own in alike.items()
    )
    return metric_columns(len(measured), groups, {})


def _bounds(of_steps: Sequence[Mapping[str, Bounds]]) -> dict[str, tuple[Floats, Floats]]:
    """Return metric -> its least and its greatest value in each step, NaN where these are close."""
    names = dict.fromkeys(name for ends in of_steps for name in ends)
    nothing = (np.nan, np.nan)
    columns = {name: np.array([ends.get(name, nothing) for ends in of_steps], np.float64) for name in names}
    return {name: (ends[:, 0].copy(), ends[:, 1].copy()) for name, ends in columns.items()}
