"""Reads one Kineto trace into a `Trace`.

The rows are those of the devices, or for a trace of a CPU gloo's rows and operators. Must not: merge devices (W15),
drop a row without counting it (W16), or trust the order of events.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np

from aorta.analysis.load.chrome_json import EventArray
from aorta.analysis.load.interval_table import (
    NO_WINDOWS,
    NULL,
    Clock,
    Gemms,
    IntervalClass,
    Intervals,
    Trace,
    Windows,
    intervals,
    look_up,
    step_of,
    windows,
)
from aorta.analysis.load.kernel_classifier import MARKS, NameClassifier, kind_of
from aorta.analysis.load.kineto.event_structs import Metadata, Rows, metadata_of
from aorta.analysis.load.kineto.host_operators import HostWork, host_intervals
from aorta.analysis.load.kineto.kernel_links import (
    CollectiveColumns,
    from_arguments,
    group_ranks,
    launched_by_collectives,
    unknown,
)
from aorta.analysis.load.kineto.trace_events import EventColumns, external_id
from aorta.analysis.load.microseconds import LARGEST_NS
from aorta.analysis.load.rank_inference import Process, place
from aorta.errors import InputError
from aorta.timeline.arrays import Int64
from aorta.timeline.kernel_names import computes

_DEVICE_BACKENDS: Final = re.compile(r"[nrxh]ccl", re.IGNORECASE)
_UNIX_FROM_NS: Final = 1_000_000_000_000_000_000
"""9 September 2001. Later instants count from 1970 even if no base is given; older torch wrote none."""


def read_kineto(stream: io.BufferedReader, path: str, classifier: NameClassifier) -> Trace:
    """Read one trace.

    Args:
        stream: the inflated text.

    Raises:
        InputError: it is not a Kineto trace, is cut off or damaged, or holds nothing that can be measured.
    """
    columns = EventColumns(classifier)
    array = EventArray(stream, columns.decode, path, tolerant=True)
    # Devices in the metadata prove nothing: torch built for CUDA lists them in traces of CPU work too.
    if columns.host is not None and metadata_of(array.head, {}, path).devices == []:
        columns.host.read_kept()
    for piece in array.pieces():
        columns.take(piece)
    trace = _trace(columns, metadata_of(array.head, array.tail, path), path)
    damage = [f"{path}: {why}" + (f" ({count} times)" if count > 1 else "") for why, count in array.damage.items()]
    return replace(trace, notes=(*trace.notes, *damage))


def _trace(columns: EventColumns, metadata: Metadata, path: str) -> Trace:
    counters, notes = columns.counters, list[str]()
    counters["events"] = columns.events
    distributed = metadata.distributed
    world_size = distributed.world_size if distributed is not None else None
    host = columns.host
    on_device = host is None
    if host is None:
        if columns.unlink():
            notes.append(
                f"{path}: merged of several processes, whose ids repeat: kernels are not linked to their calls"
            )
        table, collectives = _device_intervals(columns)
        if named := columns.devices.names():
            notes.append(f"{path}: devices are named: " + ", ".join(f"{n} is {each!r}" for n, each in named.items()))
    else:
        host.read_kept()
        counters.update(host.counters)
        table, collectives = host_intervals(host, world_size, counters, notes)
    if not len(table):
        why = "; it is partial: its loop ended before a step of this window was finished" if metadata.partial else ""
        raise InputError(
            f"{path}: {columns.events} events, none of them work on a device, gloo's or an operator's{why}"
        )
    placed = place(
        Process(
            path,
            host=metadata.host,
            environment_rank=distributed.rank if distributed is not None else None,
            environment_world=world_size,
        )
    )
    notes += placed.notes
    base, clock = _base(table.start_ns, metadata, path)
    marks = _windows(columns.marks, columns.mark_kinds.strings, placed.rank, base, notes)
    groups = _groups(distributed.pg_config if distributed is not None else None) | collectives.group_ranks
    if len(groups) == 1:
        # With a single group, collectives that do not name their group ran in it.
        (only,) = groups
        collectives.group[(table.cls == IntervalClass.COMM) & (collectives.group == NULL)] = collectives.groups(only)
    unseen = unknown(len(columns.copies) - counters["comm_copies"], columns.symmetric)
    lost, operators = columns.links.lost(columns.device.correlation)
    known_lost = 0
    if host is not None:
        unseen = _device_unseen(host, metadata, len(lost))
    elif len(lost) and (columns.device.correlation != NULL).any():
        counters["kernels_lost"] = known_lost = len(lost)
        notes.append(f"{path}: {len(lost)} launches have no kernel in the trace: the profiler lost them")
        if lost_comm := int(np.isin(operators, list(columns.issued)).sum()):
            unseen = f"{lost_comm} launches of communication have no kernel in the trace"
    rank = np.full(len(table), placed.rank, np.int32)
    start = table.start_ns + base
    made = intervals(
        start_ns=start,
        end_ns=table.end_ns + base,
        rank=rank,
        device=table.device,
        stream=table.stream,
        cls=table.cls,
        kind=collectives.kind,
        group=collectives.group,
        seq=collectives.seq,
        bytes=np.where(table.cls == IntervalClass.COMM, collectives.bytes, table.bytes),
        dtype=collectives.dtype,
        step=step_of(rank, start, marks),
        name=table.name,
        launch_ns=np.where(table.launch_ns == NULL, NULL, table.launch_ns + base),
        origin=table.origin,
        operator=table.operator,
        names=table.names,
        groups=collectives.groups.strings,
        dtypes=collectives.dtypes.strings,
    )
    return Trace(
        path=path,
        format="kineto",
        clock=clock,
        intervals=made,
        windows=marks,
        ranks=(placed.rank,),
        world_size=placed.world_size if placed.world_size is not None else world_size,
        platform=_platform(metadata, on_device or unseen is not None),
        backend=distributed.backend if distributed is not None else None,
        host=metadata.host,
        group_ranks=groups,
        group_sizes=collectives.group_sizes | {name: len(ranks) for name, ranks in groups.items()},
        counters={name: count for name, count in counters.items() if count or name == "events"},
        notes=tuple(notes),
        copies_observed=on_device,
        unseen=unseen,
        compute_unseen=host is not None and unseen is not None,
        lost=step_of(np.full(known_lost, placed.rank, np.int32), lost[:known_lost] + base, marks),
        gemms=columns.links.gemms() if host is None else _host_gemms(columns.links.gemms(), host.operators),
    )


def _device_intervals(columns: EventColumns) -> tuple[Intervals, CollectiveColumns]:
    """Return rows of all devices. Communication gets its parameters from its arguments or its host operator."""
    device = columns.device
    names = columns.names.strings
    silent = any(arguments.collective is None for arguments in columns.linked.values())
    of_host = columns.parameters() if silent or columns.copies else {}
    copies = launched_by_collectives(columns.copies, of_host)
    columns.counters["comm_copies"] += len(copies)
    moved = np.fromiter(copies, np.int64, len(copies))
    cls = device.cls.copy()
    cls[moved] = int(IntervalClass.COMM)
    other = np.array([not computes(name) for name in names], bool)
    issued = (cls == IntervalClass.COMPUTE) & other[device.name] & np.isin(device.origin, list(columns.issued))
    cls[issued] = int(IntervalClass.COMM)
    table = intervals(
        start_ns=device.start,
        end_ns=device.end,
        device=columns.devices.numbers(device.device),
        stream=columns.streams.numbers(device.stream),
        cls=cls,
        bytes=device.bytes,
        name=device.name,
        launch_ns=columns.links.launches(device.correlation),
        origin=device.origin,
        names=names,
    )
    collectives = CollectiveColumns.empty(len(table))
    communicates = np.flatnonzero(table.cls == IntervalClass.COMM)
    by_name = {code: kind_of(names[code]) for code in np.unique(table.name[communicates]).tolist()}
    collectives.kind[communicates] = [by_name[code] for code in table.name[communicates].tolist()]
    unnamed = issued & (collectives.kind == NULL)
    kinds = {name: kind_of(name) for name in set(columns.issued.values())}
    collectives.kind[unnamed] = [kinds[columns.issued[origin]] for origin in device.origin[unnamed].tolist()]
    known = {row: arguments for row, arguments in columns.linked.items() if arguments.collective is not None}
    unlinked = len(columns.linked) - len(known)
    if unlinked:
        for row, arguments in columns.linked.items():
            if arguments.collective is None:
                external = external_id(arguments)
                if external != NULL and external in of_host:
                    known[row] = of_host[external]
                    unlinked -= 1
    columns.counters["comm_unlinked"] += unlinked
    from_arguments(collectives, known | copies)
    # One collective may be many copies: none of them has all its bytes, and they share its sequence number.
    collectives.seq[moved] = collectives.bytes[moved] = NULL
    return table, collectives


def _device_unseen(host: HostWork, metadata: Metadata, launches: int) -> str | None:
    """Return why a trace without rows of a device says nothing of the work; None where it is the trace of a CPU."""
    on_cpu = any(name.startswith("gloo:") for name in host.names.strings)
    backend = (metadata.distributed.backend if metadata.distributed is not None else None) or ""
    evidence = []
    if launches:
        evidence.append(f"{launches} launches of kernels")
    if not on_cpu and _DEVICE_BACKENDS.search(backend):
        evidence.append(f"backend {backend}")
    if not on_cpu and metadata.devices and "gloo" not in backend:
        evidence.append("deviceProperties")
    if not evidence:
        return None
    return (
        f"no device activity in the trace, but it has {', '.join(evidence)}: record with ProfilerActivity.CUDA (or "
        "that of the device) too, and see whether the profiler may read the device"
    )


def _host_gemms(gemms: Gemms, operators: Rows) -> Gemms:
    # A product that contains another (a DTensor's: that of its local part) is only the inner one.
    products = np.flatnonzero(operators.origin != NULL)
    start, end, thread = operators.start[products], operators.end[products], operators.thread[products]
    order = np.lexsort((-end, start, thread))
    following = order[1:]
    contains = (thread[following] == thread[order[:-1]]) & (start[following] < end[order[:-1]])
    innermost = products[np.delete(order, np.flatnonzero(contains))]
    lasted = look_up(gemms.origin, operators.origin[innermost], (operators.end - operators.start)[innermost])
    known = lasted != NULL
    return replace(gemms, origin=gemms.origin[known], shape=gemms.shape[known], lasted_ns=lasted[known])


def _base(starts: Int64, metadata: Metadata, path: str) -> tuple[int, Clock]:
    """Return the nanoseconds to add to the times, and the clock that they then refer to."""
    base = metadata.base_ns or 0
    low, high = int(starts.min()) + base, int(starts.max()) + base
    if not -LARGEST_NS < low <= high < LARGEST_NS:
        raise InputError(f"{path}: times from {low} to {high} ns, which no clock shows: baseTimeNanoseconds is {base}")
    return base, "REALTIME" if low >= _UNIX_FROM_NS else "unknown"


def _windows(marks: Rows, kinds: tuple[str, ...], rank: int, base: int, notes: list[str]) -> Windows:
    """Return windows of the steps, from the best kind of mark in the trace; of one number the first mark counts."""
    chosen = next((kinds.index(kind) for kind in MARKS if kind in kinds), None)
    if chosen is None:
        notes.append("no step marks (ProfilerStep#N): only the whole trace is measured")
        return NO_WINDOWS
    mine = np.flatnonzero(marks.kind == chosen)
    mine = mine[np.argsort(marks.start[mine], kind="stable")]
    steps, first = np.unique(marks.step[mine], return_index=True)
    if len(steps) < len(mine):
        notes.append(f"{len(mine) - len(steps)} step mark(s) repeat a number; the first of each is used")
    kept = mine[first]
    return windows(rank, steps, marks.start[kept] + base, marks.end[kept] + base)


def _groups(config: object) -> dict[str, tuple[int, ...]]:
    """Group name -> ranks, from `distributedInfo.pg_config`."""
    entries: Iterator[Any] = iter(config if isinstance(config, list) else ())
    found = {
        str(entry["pg_name"]): group_ranks(entry.get("ranks"))
        for entry in entries
        if isinstance(entry, dict) and "pg_name" in entry
    }
    return {name: ranks for name, ranks in found.items() if ranks}


def _platform(metadata: Metadata, on_device: bool) -> str | None:
    if not on_device:
        return "cpu"
    if any(value is not None for value in (metadata.roctracer, metadata.rocprofiler, metadata.hip)):
        return "rocm"
    if any(value is not None for value in (metadata.cupti, metadata.cuda)):
        return "cuda"
    names = " ".join(str(device.get("name", "")) for device in metadata.devices or ())
    return "rocm" if "AMD" in names or "gfx" in names else "cuda" if "NVIDIA" in names or "Tesla" in names else None
