"""Reads one Kineto trace: Chrome JSON of torch.profiler, as intervals and marks of steps.

The rows are those of the devices, or for a trace of a CPU gloo's rows and operators (`host`). A row's call
(`correlation`) tells when it was launched, its operator (`External id`) which collective it is.

Collectives whose data is moved by copy engines launch no kernel (NCCL with zero-CTA collectives, torch's symmetric
memory). Of the copies between devices those are communication whose arguments, or those of the operator that launched
them, name a collective; copies that may be either make communication unobserved, with this reason.

Must not: merge devices (W15), drop a row without counting it (W16), trust the order of events, or select work by
anything but its category (W13).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import compress
from typing import Any, Final

import numpy as np

from aorta.errors import InputError
from aorta.read.frames import Numbered
from aorta.read.traces.chrome_json import LARGEST_NS, EventArray, ns_of_values
from aorta.read.traces.interval_table import (
    NULL,
    Clock,
    IntervalClass,
    Intervals,
    NameClassifier,
    Trace,
    kind_of,
    look_up,
    step_of,
)
from aorta.read.traces.kineto.events import (
    COPIES,
    LARGEST_DEVICE,
    OPERATORS,
    PARAMETERS,
    Arguments,
    Cached,
    CollectiveColumns,
    DistributedInfo,
    Event,
    EventDecoder,
    Identifiers,
    Metadata,
    arguments_of,
    by_category,
    externals_of,
    group_ranks,
    idents,
    integer,
    joined,
    metadata_of,
    with_times,
)
from aorta.read.traces.kineto.host import LABEL, HostWork, host_rows
from aorta.read.traces.reader import MARK, Process, Ranges, TraceInput, trace_of
from aorta.timeline.arrays import Int64, IntervalArray
from aorta.timeline.classes import computes, launches_communication

_COMPUTE, _COMM, _COPY, _UNKNOWN = map(int, IntervalClass)
_LAUNCH, _CAPTURE, _CAPTURED = 1, 2, 3
_WAITED: Final = -1
_SYMMETRIC: Final = "symm_mem::"
"""Operators of torch's symmetric memory (torch/csrc/distributed/c10d/symm_mem); they do not go through a `c10d::`
operator.
"""
_WITH_HOST: Final = re.compile(r"HtoD|DtoH|HtoH|HostToDevice|DeviceToHost|HostToHost|Pageable|Pinned|Host\b")
_DEVICE_BACKENDS: Final = re.compile(r"[nrxh]ccl", re.IGNORECASE)
_UNIX_FROM_NS: Final = 1_000_000_000_000_000_000
"""9 September 2001. Later instants count from 1970 even if no base is given; older torch wrote none."""


def read_kineto(source: TraceInput) -> Iterator[Trace]:
    """Yield the trace in one file.

    Raises:
        InputError: it is not a Kineto trace, is cut off or damaged, or holds nothing that can be measured.
    """
    path, decode = source.place, EventDecoder()
    kept = _Kept(source.classifier, decode)
    pieces = EventArray(source.streams[path], lambda text: (text, decode(text)), path, tolerant=True)
    # Devices in the metadata prove nothing: torch built for CUDA lists them in traces of CPU work too.
    if kept.host is not None and metadata_of(pieces.head, {}, path).devices == []:
        kept.host.read_kept()
    for text, events in pieces.pieces():
        kept.take(text, events)
    metadata = metadata_of(pieces.head, pieces.tail, path)
    trace = _on_devices(kept, metadata, source) if kept.host is None else _on_host(kept, kept.host, metadata, source)
    damage = [f"{path}: {why}" + (f" ({times} times)" if times > 1 else "") for why, times in pieces.damage.items()]
    counters = {name: count for name, count in kept.counters.items() if count or name == "events"}
    yield replace(trace, counters=counters, notes=(*trace.notes, *damage))


_WAITS: Final = re.compile(r"Synchronize|Memcpy(?:2D|3D|WithStream)?$")
"""Calls in which the host waits for the device: cudaStreamSynchronize, hipEventSynchronize, cudaMemcpy."""


class _Kept:
    """What is kept of the events, piece by piece: columns of numbers and codes, so that memory grows with the rows that
    are kept, not with the trace. A trace holds millions of events, so little is done for each of them in Python.

    Attributes:
        host: the work of the host; None once there is work on a device.
        described: row of communication, or of a copy between devices -> its arguments where they name a collective,
            else its `External id`.
        parameters: `External id` -> arguments of `record_param_comms`.
        issued: `External id` of each operator or range that issues communication -> its name.
        marks: name, start and end in ns of the marks of steps.
    """

    def __init__(self, classifier: NameClassifier, decode: EventDecoder) -> None:
        self.host: HostWork | None = HostWork(decode)
        self.counters = Counter(events=0)
        self.names = Numbered()
        self.devices, self.streams = Identifiers(LARGEST_DEVICE), Identifiers()
        self.work: list[dict[str, Int64]] = []
        self.calls: list[dict[str, Int64]] = []
        self.waits: list[dict[str, Int64]] = []
        self.described: dict[int, Arguments | int] = {}
        self.parameters: dict[int, Arguments] = {}
        self.issued: dict[int, str] = {}
        self.marks: list[tuple[str, int, int]] = []
        self.roles = Cached(_role)
        self._decode = decode
        self._rows = 0
        self._codes = Cached(lambda name: self.names[_text(name)])
        self._classes = Cached(lambda name: int(classifier.class_of(_text(name))))
        self._launching = Cached(_launching)

    def take(self, text: bytes | memoryview, events: list[Event]) -> None:
        """Keep what matters of one piece of the event array."""
        work, calls, host = by_category(events)
        by_role = defaultdict[str, list[Event]](list)
        for name, named in host.items():
            by_role[self.roles[name]] += named
        if self._decode.operators == "untimed" and any(mark.cat in OPERATORS for mark in by_role["mark"]):
            self.take(text, self._decode.with_operators(text, self.counters))  # an old trace
            return
        self.counters["events"] += len(events)
        if work:
            self.host = None
            self._take_work(*with_times(work, self.counters))
        if calls:
            self._take_calls(calls)
        self._take_host(by_role)
        if self.host is not None:
            self.host.add(text, host)

    def _take_work(self, events: list[Event], start: Int64, end: Int64) -> None:
        names, arguments = [event.name for event in events], arguments_of(events)
        cls = np.array(self._classes.of(names), np.int64)
        copies = np.array([event.cat in COPIES for event in events], bool)
        cls[copies & (cls != _COMM)] = _COPY
        externals = externals_of(arguments)
        unlinked = np.array([each is None for each in externals], bool)
        self.counters["kernels_unlinked"] += int((unlinked & (cls != _COPY)).sum())
        size = np.full(len(events), NULL, np.int64)
        named = np.array([each.collective is not None for each in arguments], bool)
        for at in np.flatnonzero(named | (cls != _COMPUTE)).tolist():
            said = arguments[at]
            if cls[at] == _COPY:
                size[at] = max(integer(said.bytes), NULL)
                if not _between_devices(_text(names[at])):
                    continue
            elif named[at]:
                cls[at] = _COMM  # its host operator identifies it, whatever its name
            if cls[at] != _UNKNOWN:
                self.described[self._rows + at] = said if named[at] else integer(externals_of([said])[0])
        pairs = list(zip(events, arguments, strict=True))
        device = [event.pid if event.pid is not None else said.device for event, said in pairs]
        stream = [event.tid if event.tid is not None else said.stream for event, said in pairs]
        self._rows += len(events)
        self.work.append(
            {
                "start_ns": start,
                "end_ns": end,
                "name": np.array(self._codes.of(names), np.int64),
                "device": self.devices.codes(device),
                "stream": self.streams.codes(stream),
                "bytes": size,
                "cls": cls,
                "origin": idents(externals),
                "correlation": idents([said.correlation for said in arguments]),
            }
        )

    def _take_calls(self, events: list[Event]) -> None:
        """Keep when calls began, what they launched, and for which operator; when the host waited for the device."""
        start, known = ns_of_values([call.ts for call in events])
        arguments = arguments_of(events)
        ident = idents([said.correlation for said in arguments])
        launching = np.array(self._launching.of([call.name for call in events]), np.int64)
        kept = known & ((ident != NULL) | (launching > _LAUNCH))
        columns = {"start": start, "ident": ident, "operator": idents(externals_of(arguments)), "launching": launching}
        self.calls.append({name: column[kept] for name, column in columns.items()})
        _, begun, ended = with_times(list(compress(events, (launching == _WAITED).tolist())), self.counters)
        self.waits.append({"start": begun, "end": ended})

    def _take_host(self, by_role: Mapping[str, list[Event]]) -> None:
        for mark, start, end in zip(*with_times(by_role["mark"], self.counters), strict=True):
            self.marks.append((str(mark.name), int(start), int(end)))
        parameters = arguments_of(by_role["parameters"])
        for said in parameters:
            external = integer(said.external_id)
            if external != NULL and said.collective is not None:
                self.parameters.setdefault(external, said)
        issuing = parameters + arguments_of(by_role["issuing"])
        issuers = by_role["parameters"] + by_role["issuing"]
        self.issued.update(zip(idents(externals_of(issuing)).tolist(), [str(e.name) for e in issuers], strict=True))
        self.issued.pop(NULL, None)


def _text(name: object) -> str:
    return "" if name is None else str(name)


def _role(name: object) -> str:
    """Return what an event of the host is used for beside a device's rows; empty if it is unused."""
    if not isinstance(name, str):
        return ""
    if name == PARAMETERS:
        return "parameters"
    if launches_communication(name):
        return "issuing"
    return "mark" if MARK.match(name) else ""


def _launching(name: object) -> int:
    """Return whether a call launches a kernel, begins or ends the capture of a graph, or waits for the device; 0 for
    any other.
    """
    text = str(name)
    if "LaunchKernel" in text:
        return _LAUNCH
    if _WAITS.search(text):
        return _WAITED
    return _CAPTURE if "BeginCapture" in text else _CAPTURED if "EndCapture" in text else 0


def _between_devices(name: str) -> bool:
    """Return whether a copy of that name may have moved data between devices ("Memcpy PtoP (Device -> Device)"). Fills,
    and copies to or from the host, do not. CUPTI also calls a copy to another device's mapped memory `DtoD`.
    """
    return "memset" not in name.lower() and _WITH_HOST.search(name) is None


def _on_devices(kept: _Kept, metadata: Metadata, source: TraceInput) -> Trace:
    """Return the rows of all devices. Communication gets its parameters from its arguments or its host operator."""
    path, counters, names, notes = source.place, kept.counters, tuple(kept.names), list[str]()
    rows = joined(kept.work, "start_ns", "end_ns", "name", "device", "stream", "bytes", "cls", "origin", "correlation")
    cls, name, origin, correlation = rows["cls"], rows["name"], rows["origin"], rows.pop("correlation")
    devices, named = kept.devices.numbers()
    rows["device"], rows["stream"] = devices[rows["device"]], kept.streams.numbers()[0][rows["stream"]]
    if len({text.partition("]")[0] for text in named.values() if text.startswith("[")}) > 1:
        notes.append(f"{path}: merged of several processes, whose ids repeat: kernels are not linked to their calls")
        origin[:] = correlation[:] = NULL
        kept.parameters.clear()
        kept.issued.clear()
    if named:
        notes.append(f"{path}: devices are named: " + ", ".join(f"{n} is {text!r}" for n, text in named.items()))

    described = {}
    for row, known in kept.described.items():
        said = known if isinstance(known, Arguments) else kept.parameters.get(known)
        if said is not None:
            described[row] = said
    maybe, known_rows = (np.fromiter(each, np.int64, len(each)) for each in (kept.described, described))
    moved = known_rows[cls[known_rows] == _COPY]
    counters["comm_copies"] = len(moved)
    counters["comm_unlinked"] = int((cls[maybe] == _COMM).sum() - (cls[known_rows] == _COMM).sum())
    unnamed = int((cls[maybe] == _COPY).sum()) - len(moved)
    cls[moved] = _COMM
    may = np.array([not computes(text) for text in names], bool)
    issued = np.flatnonzero((cls == _COMPUTE) & may[name] & np.isin(origin, list(kept.issued)))
    cls[issued] = _COMM
    collectives, kinds = CollectiveColumns(len(cls)), Cached(kind_of)
    communicates = np.flatnonzero(cls == _COMM)
    collectives.kind[communicates] = kinds.of([names[code] for code in name[communicates].tolist()])
    issued = issued[collectives.kind[issued] == NULL]
    collectives.kind[issued] = kinds.of([kept.issued[external] for external in origin[issued].tolist()])
    collectives.describe(described)
    # One collective may be many copies: none of them has all its bytes, and they share its sequence number.
    collectives.seq[moved] = collectives.bytes[moved] = NULL

    calls = _calls(kept)
    launch = look_up(correlation, calls["ident"], calls["start"])
    rows["launch_ns"] = np.where(correlation == NULL, NULL, launch)
    lost = calls["lost"] & ~np.isin(calls["ident"], correlation) & (correlation != NULL).any()
    unseen = None
    if lost.any():
        counters["kernels_lost"] = int(lost.sum())
        notes.append(f"{path}: {int(lost.sum())} launches have no kernel in the trace: the profiler lost them")
    if lost_comm := int(np.isin(calls["operator"][lost], list(kept.issued)).sum()):
        unseen = f"{lost_comm} launches of communication have no kernel in the trace"
    elif unnamed and any(_text(each).startswith(_SYMMETRIC) for each in [*kept.roles, *names]):
        unseen = (
            f"symmetric memory was used, and of {unnamed} copies between devices the trace does not say whether they "
            "are communication: copy engines move the data of such collectives, without a kernel"
        )
    trace = _trace(kept, metadata, source, rows, names, collectives, notes, unseen=unseen, platform=metadata.platform)
    base_ns = metadata.base_ns or 0
    waits = joined(kept.waits, "start", "end")
    waits_ns = IntervalArray(waits["start"] + base_ns, waits["end"] + base_ns)
    return replace(trace, lost=step_of(calls["start"][lost] + base_ns, trace.windows), host_waits=waits_ns)


def _on_host(kept: _Kept, host: HostWork, metadata: Metadata, source: TraceInput) -> Trace:
    """Return the rows of a trace without any of a device: of a CPU, or of a host whose device was not recorded."""
    host.read_kept()
    kept.counters.update(host.counters)
    notes, names = list[str](), tuple(host.names)
    rows, collectives = host_rows(host, (metadata.distributed or DistributedInfo()).world_size, kept.counters, notes)
    on_cpu = any(name.startswith(LABEL) for name in names)
    backend = (metadata.distributed or DistributedInfo()).backend or ""
    evidence = []
    if launches := int(_calls(kept)["lost"].sum()):
        evidence.append(f"{launches} launches of kernels")
    if not on_cpu and _DEVICE_BACKENDS.search(backend):
        evidence.append(f"backend {backend}")
    if not on_cpu and metadata.devices and "gloo" not in backend:
        evidence.append("deviceProperties")
    unseen = (
        f"no device activity in the trace, but it has {', '.join(evidence)}: record with ProfilerActivity.CUDA (or "
        "that of the device) too, and see whether the profiler may read the device"
    )
    trace = _trace(kept, metadata, source, rows, names, collectives, notes, platform="cpu", copies_observed=False)
    if evidence:
        trace = replace(trace, unseen=unseen, compute_unseen=True, platform=metadata.platform)
    return trace


def _calls(kept: _Kept) -> dict[str, Int64]:
    """Return the calls in the order of their time: of those with one number the first counts. `lost` launch kernels, if
    no row has their number; what is launched while a graph is captured does not run.
    """
    calls = joined(kept.calls, "start", "ident", "operator", "launching")
    order = np.argsort(calls["start"], kind="stable")
    calls = {name: column[order] for name, column in calls.items()}
    launching = calls.pop("launching")
    captured = np.cumsum((launching == _CAPTURE).astype(np.int64) - (launching == _CAPTURED))
    return calls | {"lost": (launching == _LAUNCH) & (captured <= 0)}


def _trace(
    kept: _Kept,
    metadata: Metadata,
    source: TraceInput,
    rows: dict[str, Int64],
    names: tuple[str, ...],
    collectives: CollectiveColumns,
    notes: list[str],
    **facts: Any,
) -> Trace:
    path, cls, distributed = source.place, rows["cls"], (metadata.distributed or DistributedInfo())
    if not len(cls):
        why = "; it is partial: its loop ended before a step of this window was finished" if metadata.partial else ""
        raise InputError(
            f"{path}: {kept.counters['events']} events, none of them work on a device, gloo's or an operator's{why}"
        )
    base = metadata.base_ns or 0
    low, high = int(rows["start_ns"].min()) + base, int(rows["start_ns"].max()) + base
    if not -LARGEST_NS < low <= high < LARGEST_NS:
        raise InputError(f"{path}: times from {low} to {high} ns, which no clock shows: baseTimeNanoseconds is {base}")
    config = distributed.pg_config if isinstance(distributed.pg_config, list) else []
    stated = {str(e["pg_name"]): group_ranks(e.get("ranks")) for e in config if isinstance(e, dict) and "pg_name" in e}
    groups = {name: ranks for name, ranks in stated.items() if ranks} | collectives.group_ranks
    if len(groups) == 1:
        # With a single group, collectives that do not name their group ran in it.
        (only,) = groups
        collectives.group[(cls == _COMM) & (collectives.group == NULL)] = collectives.groups[only]
    size = rows.get("bytes", np.full(len(cls), NULL, np.int64))
    rows["bytes"] = np.where(cls == _COMM, collectives.bytes, size)
    columns: dict[str, Any] = {name: getattr(collectives, name) for name in ("kind", "group", "seq", "dtype")}
    strings = {"groups": tuple(collectives.groups), "dtypes": tuple(collectives.dtypes)}
    table = Intervals(**rows, **columns, names=names, **strings)  # type: ignore[arg-type]
    start, end = (np.array([mark[at] for mark in kept.marks], np.int64) for at in (1, 2))
    clock: Clock = "REALTIME" if low >= _UNIX_FROM_NS else "unknown"
    return trace_of(
        source,
        "kineto",
        Process(path, None, metadata.host, distributed.rank, distributed.world_size),
        [table],
        Ranges(start, end, [name for name, *_ in kept.marks]),
        notes=notes,
        since_ns=base,
        clock=clock,
        backend=distributed.backend,
        group_ranks=groups,
        group_sizes=collectives.group_sizes | {name: len(ranks) for name, ranks in groups.items()},
        **facts,
    )
