"""Collects what is wrong, or merely unusual, with the traces of one result, for people and for `summary.json`.

`check_rows` counts in one trace where it is read, and removes rows that no metric can use; `examine` says what was
counted in all. Nothing is dropped silently (W16). Must not: repair or guess.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aorta.documents.kernels import TraceEntry
from aorta.read.frames import Groups
from aorta.read.ledger import LANES, WHOLE, Gap, lacking, listed, lost
from aorta.read.traces.consistency import ORDER_NS, OTHERS, by_step
from aorta.read.traces.interval_table import (
    LANE_CLASSES,
    NULL,
    IntervalClass,
    Intervals,
    Trace,
    overlapping_ns,
    step_of,
)
from aorta.records.schema import WORLD_LIMIT
from aorta.timeline.arrays import Int64
from aorta.timeline.overlap import DECIDED

ABSURD_NS: Final = 30 * 60 * 1_000_000_000
"""No single kernel or collective lasts 30 minutes: torch aborts a collective after that (its `default_pg_timeout`)."""

SHOWN_DOUBTS: Final = 5
_SECOND_NS: Final = 1_000_000_000
_FAR: Final = 20
"""A gap of this many times the time of all other rows, and of a second, parts rows that cannot belong to them; a first
collective so many times as long as any later one waited. A choice, not measured: it has to stay above what collectives
of unlike sizes differ by in one job, and below a wait of seconds, the least that starting a recording by hand takes.
"""
_WRONG: Final = 0.25
"""Where so much of the time of streams is in two rows at once, no time of their clock counts. A choice."""
_INSIDE: Final = 0.1
"""Part of a row in which others of its stream may run from their start to their end. A choice."""
_FEW: Final = 10
"""Strays are at most a tenth of the rows: more of them are a part of the run."""

COUNTERS: Final[Mapping[str, str]] = {
    "rows": "rows in the table",
    "events": "events in the files, of whatever kind",
    "without_times": "rows without a time that could be read; left out",
    "negative_duration": "rows without an end, or with one before their start; left out",
    "absurd_duration": "rows of more than 30 minutes; left out",
    "strays": "rows far outside of everything else that the trace says of its time; left out",
    "repeated": "rows that are in the trace twice; counted once",
    "zero_duration": "rows without length; they count in no metric",
    "unknown_class": "rows of unknown class; they count in no metric",
    "unknown_kind": "communication of unknown kind; it counts in comm_ms and in no kind, and metrics of kinds are "
    "unknown in its windows",
    "kernels_unlinked": "kernels without a host operation or launch in the trace",
    "kernels_lost": "launches without a kernel in the trace: the computation of their steps is a lower bound",
    "comm_unlinked": "communication without the operation or call that issued it",
    "comm_copies": "copies that a collective launched; they are communication, moved by copy engines without a kernel",
    "outside_steps": "rows that start outside of every step; they count for the whole trace only",
    "same_stream_overlap": "rows that start before the one before them on their stream has ended",
}
"""Health counter -> what it counts. Readers add to the counters that only they can know (`Trace.counters`)."""


def check_rows(trace: Trace) -> tuple[Trace, TraceEntry]:
    """Return the trace without rows that end before they start or last absurdly long, far strays and repetitions; and
    what was counted in it, those rows included.
    """
    table = trace.intervals
    length = table.end_ns - table.start_ns
    repeated = np.zeros(len(table), bool)  # no stream of a device runs a kernel twice at once
    rows = np.flatnonzero((table.device != NULL) & (table.stream != NULL) & (length > 0))
    on = table.take(rows)
    repeated[rows] = True
    repeated[rows[Groups(on.device, on.stream, on.start_ns, on.end_ns, on.name).first]] = False
    left_out = {
        "negative_duration": length < 0,
        "absurd_duration": length > ABSURD_NS,
        "strays": _strays(trace),
        "repeated": repeated,
    }
    bad = np.any(list(left_out.values()), axis=0)
    clean = table.take(~bad) if bad.any() else table
    # Rows that begin while an earlier one of their stream still runs.
    serial = (clean.device != NULL) | (clean.cls == IntervalClass.COMM)  # threads of the host nest their operators
    streams = clean.take(serial & (clean.stream != NULL))
    streams = streams.take(np.argsort(streams.start_ns, kind="stable"))
    shared = overlapping_ns(streams, streams.device, streams.stream)
    counted = {
        "rows": len(table),
        **{name: int(chosen.sum()) for name, chosen in left_out.items()},
        "zero_duration": int((length == 0).sum()),
        "unknown_class": int((table.cls == IntervalClass.UNKNOWN).sum()),
        "unknown_kind": int(((table.cls == IntervalClass.COMM) & (table.kind == NULL)).sum()),
        "outside_steps": int((table.step == NULL).sum()) if len(trace.windows) else 0,
        "same_stream_overlap": int((shared > 0).sum()),
    }
    notes = list(trace.notes)
    if count := counted["strays"]:
        codes = dict.fromkeys(code for code in table.name[left_out["strays"]].tolist() if code != NULL)
        shown = ", ".join(repr(table.names[code][:80]) for code in list(codes)[:SHOWN_DOUBTS])
        notes.append(f"{trace.path}: {count} row(s) far from all others in time are left out: {shown}")
    facts = TraceEntry(
        path=trace.path,
        format=trace.format,
        clock=trace.clock,
        rank=None if trace.rank == NULL else trace.rank,
        world_size=trace.world_size,
        host=trace.host,
        devices=[device for device in np.unique(table.device).tolist() if device != NULL],
        steps=len(trace.windows),
        counters=dict(Counter(trace.counters) + Counter(counted)),
        notes=notes,
    )
    gaps = [
        *trace.gaps,
        *_without_length(table, length),
        *_elsewhere(trace, left_out["strays"]),
        *_twice_at_once(streams, shared),
        *_out_of_order(streams),
    ]
    untimed = sum(trace.counters.get(name, 0) for name in ("without_times", "negative_duration"))  # of the reader
    if untimed > DECIDED * (untimed + len(table)):
        gaps += lacking(f"{untimed} rows have no time that can be used", *LANES)
    return replace(trace, intervals=clean, gaps=tuple(gaps)), facts


def _without_length(table: Intervals, length_ns: Int64) -> Iterator[Gap]:
    """Yield the rows whose length is not known, in each step and the whole, where they matter (`DECIDED`): none, though
    rows of their name have one, no possible end, or one of an absurd length, for which they stand; others stand for
    the mean of their name, or else for any time.
    """
    chosen = (length_ns <= 0) | (length_ns > ABSURD_NS)
    known_ns, code = np.where(chosen, 0, length_ns), table.name + 1  # 0 of rows without a name
    counts = np.bincount(code[~chosen], minlength=len(table.names) + 1)
    mean_ns = np.bincount(code, known_ns, minlength=len(table.names) + 1) / np.maximum(counts, 1)
    # Kernels, and what communicates, take time, and so do some copies; a clock may show none of the others.
    copied = table.cls == IntervalClass.COPY
    ran = (table.device != NULL) | (table.cls == IntervalClass.COMM)
    endless = (length_ns < 0) | (ran & ~(copied & (length_ns[copied] > 0).any()))
    weight_ns = np.where((counts[code] == 0) & endless, ABSURD_NS, np.maximum(mean_ns[code], length_ns * chosen))
    for lane, cls in LANE_CLASSES.items():
        lacks = np.flatnonzero((table.cls == cls) & chosen)
        if len(lacks):
            why = "the length of {count} rows is not known"
            lasted = by_step(table, (table.cls == cls) & ~chosen, in_time=True)
            yield from lost(why, (lane,), table.step[lacks], weight_ns[lacks], lasted)


def _twice_at_once(streams: Intervals, shared: Int64) -> Iterator[Gap]:
    """Yield the lanes of streams in which a row ran beside others for more than half of its length, or beside several,
    or for a tenth of it beside any, that also ended before it: a stream runs one after the other, so times are wrong,
    or rows are in the trace twice. One that may begin early (programmatic dependent launch) ends behind what it depends
    on. Where rows of communication and others overlap, the number is not that of a stream. Kernels of one launch, that
    of a graph, may have its number.
    """
    length, sends = streams.end_ns - streams.start_ns, streams.cls == IntervalClass.COMM
    weight_ns = np.zeros(len(streams), np.int64)
    for own in Groups(streams.device, streams.stream).rows if shared.any() else ():
        both, end, launch = shared[own], streams.end_ns[own], streams.launch_ns[own]
        if both[np.append(False, sends[own][1:] != sends[own][:-1])].sum() * 2 > both.sum():
            continue
        reach = np.maximum.accumulate(end)
        last = np.maximum.accumulate(np.where(end == reach, np.arange(len(own)), 0))
        late = np.flatnonzero(both)
        before = last[late - 1]  # what still ran
        alone = (launch[late] == NULL) | (launch[late] != launch[before])
        late, before = late[alone], before[alone]
        beside = np.bincount(before, both[late], len(own))
        within = end[late] <= reach[late - 1]
        inside, inside_ns = (np.bincount(before, of, len(own)) for of in (within, both[late] * within))
        wrong = (2 * beside > length[own]) | (inside > OTHERS) | (inside_ns > _INSIDE * length[own])
        late = late[wrong[before]]
        weight_ns[own[wrong]] = length[own][wrong]
        weight_ns[own[late]] = both[late]
    if shared.sum() > _WRONG * length.sum() and weight_ns.any():
        yield from lacking(f"rows of streams overlap for more than {_WRONG:.0%} of their time", *LANES, seen=False)
    for lane, cls in LANE_CLASSES.items():
        rows = np.flatnonzero((streams.cls == cls) & (weight_ns > 0))
        if len(rows):
            why = "{count} rows run at the same time as another of their stream, so times are wrong or rows repeated"
            lasted = by_step(streams, streams.cls == cls, in_time=True)
            yield from lost(why, (lane,), streams.step[rows], weight_ns[rows].astype(float), lasted, seen=False)


def _out_of_order(streams: Intervals) -> Iterator[Gap]:
    """Yield the lanes of rows that run behind others of their stream that were launched later: a stream keeps the order
    of its launches, so rows are in the trace twice, or their times or launches are wrong.
    """
    known = streams.take(streams.launch_ns != NULL)
    early = np.zeros(len(known), bool)
    for own in Groups(known.device, known.stream).rows:
        launch = known.launch_ns[own]
        early[own] = np.maximum.accumulate(launch) - launch > ORDER_NS
    if early.any():
        why = "{count} rows run behind others of their stream that were launched later, so times are wrong"
        weight_ns = (known.end_ns - known.start_ns)[early].astype(float)
        ran = by_step(known, np.ones(len(known), bool), in_time=True)
        yield from lost(why, LANES, known.step[early], weight_ns, ran, seen=False)


def _elsewhere(trace: Trace, strays: NDArray[np.bool_]) -> Iterator[Gap]:
    """Yield what lanes lack of the rows whose time is impossible: in the step that launched them, or else in any."""
    rows, why = trace.intervals.take(strays), "rows far from all others in time are left out"
    launched = np.where(rows.launch_ns == NULL, NULL, step_of(rows.launch_ns, trace.windows))
    for lane, cls in LANE_CLASSES.items():
        for step in np.unique(launched[rows.cls == cls]).tolist():
            own = (rows.cls == cls) & (launched == step)
            most_ns = int((rows.end_ns - rows.start_ns)[own].sum())
            yield from (Gap(lane, why, in_step, most_ns) for in_step in ((None,) if step == NULL else (step, WHOLE)))


def _strays(trace: Trace) -> NDArray[np.bool_]:
    """Return which rows lie outside of everything else that the trace says of its time: its steps and launches, with
    as much time again on either side, or without them the other rows, behind a gap of `_FAR` times all their time.
    """
    table, marks = trace.intervals, trace.windows
    stray = np.zeros(len(table), bool)
    known = np.concatenate((marks.start_ns, marks.end_ns, table.launch_ns[table.launch_ns != NULL]))
    if len(known):
        low, high = int(known.min()), int(known.max())
        margin = max(high - low, _SECOND_NS)
        stray = (table.end_ns < low - margin) | (table.start_ns > high + margin)
    elif len(table):
        order = np.argsort(table.start_ns, kind="stable")
        start, reach = table.start_ns[order], np.maximum.accumulate(table.end_ns[order])
        edges = np.concatenate(([0], np.flatnonzero(start[1:] - reach[:-1] > _SECOND_NS) + 1, [len(order)]))
        low = high = int(np.argmax(np.diff(edges)))  # the rows between two pauses that are most
        while True:
            near = _FAR * (int(reach[edges[high + 1] - 1]) - int(start[edges[low]]))
            if low > 0 and start[edges[low]] - reach[edges[low] - 1] <= near:
                low -= 1
            elif high + 2 < len(edges) and start[edges[high + 1]] - reach[edges[high + 1] - 1] <= near:
                high += 1
            else:
                break
        first, last = edges[low], edges[high + 1]
        stray[np.concatenate((order[:first], order[last:]))] = True
    return stray if stray.sum() * _FEW <= len(table) else np.zeros(len(table), bool)


def outlasting(rows: Intervals) -> NDArray[np.bool_]:
    """Return the first or the last collectives of a device, of each stream at most one, that last `_FAR` times as long
    as any other and together longer than these: they waited for ranks whose recording began later or ended earlier.
    """
    waited = np.zeros(len(rows), bool)
    sends = np.flatnonzero(rows.cls == IntervalClass.COMM)
    sends = sends[np.argsort(rows.start_ns[sends], kind="stable")]
    length = (rows.end_ns - rows.start_ns)[sends]
    for order in (slice(None), slice(None, None, -1)) if len(sends) > OTHERS else ():
        at = np.arange(len(sends))[order]
        ends = np.zeros(len(sends), bool)
        ends[at[np.unique(rows.stream[sends][at], return_index=True)[1]]] = True
        outer = sends[at[0]]
        ends &= (rows.start_ns[sends] < rows.end_ns[outer]) & (rows.end_ns[sends] > rows.start_ns[outer])
        others = length[~ends]
        if len(others) >= OTHERS:
            long = ends & (length > _FAR * others.max())
            waited[sends[long]] = length[long].sum() > others.sum()
    return waited


def examine(
    traces: Sequence[TraceEntry],
    measured: Collection[int] | None = None,
    claimed: Sequence[int] | None = None,
) -> tuple[int | None, list[int], list[str]]:
    """Return how many ranks there were (None where no trace says), those missing, and what all traces together show, in
    sentences, the most serious first. Ranks for which nothing could be measured (not in `measured`) do not count as
    read. `claimed`: the rank of each process, whose windows may be several traces; None: every trace is one.
    """
    ranks = claimed if claimed is not None else [trace.rank for trace in traces]
    claims = Counter(rank for rank in ranks if rank not in (None, NULL))
    worlds = {trace.world_size for trace in traces if trace.world_size is not None}
    # Sources that disagree: the largest world is the one in which all their ranks exist.
    world = max((size for size in worlds if 0 < size <= WORLD_LIMIT), default=None)
    read = claims.keys() if measured is None else claims.keys() & set(measured)
    missing = sorted({*range(world or 0)} - read)
    doubled = sorted(rank for rank, count in claims.items() if count > 1 and rank is not None)
    counters: Counter[str] = Counter()
    for trace in traces:
        counters.update(trace.counters)
    notes = []
    if unknown := sum(trace.rank is None for trace in traces):
        notes.append(f"{unknown} trace(s) of unknown rank; left out of comparisons between ranks")
    if doubled:
        notes.append(f"several traces claim to be rank {listed(doubled)}: which is right is not known")
    for trace in {trace.rank: trace for trace in traces if len(trace.devices) > 1}.values():
        who = f"rank {trace.rank}" if trace.rank is not None else "a trace of unknown rank"
        notes.append(f"{who} has rows on devices {listed(trace.devices)}; each is measured by itself (W15)")
    notes += [
        f"{counters[name]} of {counters['rows']} rows: {what}"
        for name, what in COUNTERS.items()
        if name not in ("rows", "events") and counters[name]  # these say how much there is
    ]
    for fact in ("clock", "format"):
        if len(seen := sorted({str(getattr(trace, fact)) for trace in traces})) > 1:
            notes.append(f"traces differ in {fact}: {', '.join(seen)}; times of different clocks were not compared")
    counts = Counter(note for trace in traces for note in trace.notes)
    return world, missing, notes + [f"{note} ({count} traces)" if count > 1 else note for note, count in counts.items()]
