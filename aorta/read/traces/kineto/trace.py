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
from aorta.read.ledger import COMM, Gap, lacking
from aorta.read.traces.chrome_json import CUT_OFF, LARGEST_NS, EventArray, ns_of_values
from aorta.read.traces.claims import Claims, Launches, launched_by, reconciled
from aorta.read.traces.consistency import incomplete, refuse_other_units
from aorta.read.traces.interval_table import (
    NULL,
    Clock,
    IntervalClass,
    Intervals,
    NameClassifier,
    Trace,
    kind_of,
    look_up,
)
from aorta.read.traces.kineto.events import (
    COPIES,
    COUNTED,
    FOREIGN_CALLS,
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
    metadata_of,
    with_times,
)
from aorta.read.traces.kineto.host import LABEL, HostWork, host_rows
from aorta.read.traces.open import joined
from aorta.read.traces.reader import MARK, SERIALISED, Process, Ranges, TraceInput, trace_of
from aorta.timeline.arrays import Int64, IntervalArray, merge
from aorta.timeline.classes import COMPUTE, computes, copies, launches_communication

_COMPUTE, _COMM, _COPY, _UNKNOWN = map(int, IntervalClass)
_WAITED: Final = -1
_SYMMETRIC: Final = re.compile(r"symm_mem::|.*(?:userbuffers|nvshmem)", re.DOTALL)
"""Operators and kernels beside which copies may go into the memory of other devices: of torch's symmetric memory
(torch/csrc/distributed/c10d/symm_mem), which no `c10d::` operator issues, and of libraries that map it.
"""
_WITH_HOST: Final = re.compile(r"HtoD|DtoH|HtoH|HostToDevice|DeviceToHost|HostToHost|Pageable|Pinned|Host\b")
_DEVICE_BACKENDS: Final = re.compile(r"[nrxh]ccl", re.IGNORECASE)
_DEVICE_LABELS: Final = re.compile(r"(?!mpi:|ucc:)[a-z]\w*:(?!:)")
_UNIX_FROM_NS: Final = 1_000_000_000_000_000_000
"""9 September 2001. Later instants count from 1970 even if no base is given; older torch wrote none."""


def read_kineto(source: TraceInput) -> Iterator[Trace]:
    """Yield the trace in one file.

    Raises:
        InputError: it is not a Kineto trace, is cut off or damaged, or holds nothing that can be measured.
    """
    path, decode = source.origin, EventDecoder()
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
    counters = {name: n for name, n in {**trace.counters, **kept.counters}.items() if n or name == "events"}
    ends = [why for why in pieces.damage if why.startswith(CUT_OFF)]
    ends += [f"Kineto says: {text}" for text in metadata.warnings or () if _LOST.search(_text(text))]
    gaps = incomplete(trace, ends[0]) if ends else ()
    yield replace(trace, counters=counters, notes=(*trace.notes, *damage), gaps=(*trace.gaps, *gaps))


_LOST: Final = re.compile(r"(?i)dropped \d|exceeded max")
"""Of buffers that were full (libkineto/src/CuptiActivityApi.cpp, CuptiActivityProfiler.cpp)."""
_WAITS: Final = re.compile(r"Synchronize|Memcpy(?:2D|3D|WithStream)?$")
"""Calls in which the host waits for the device: cudaStreamSynchronize, hipEventSynchronize, cudaMemcpy."""
_WAITS_FOR_ALL: Final = re.compile(r"(?:cuda|hip)DeviceSynchronize$|cuCtxSynchronize$")


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
        labels: gloo's rows, which the host runs beside a device, too.
        claims: name -> how many operators and ranges of that name issue communication; `silent`: see `Claims`.
        unknown: rows of categories that no account knows; `hosts`: the processes of the host.
        foreign: calls that use a device whose rows are not read.
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
        self.labels: list[dict[str, Int64]] = []
        self.claims: Counter[str] = Counter()
        self.silent = 0
        self.unknown: list[tuple[str, Any, int, int]] = []
        self.hosts: set[Any] = set()
        self.foreign = 0
        self.roles = Cached(_role)
        self._decode = decode
        self._rows = 0
        self._codes = Cached(lambda name: self.names[_text(name)])
        self._classes = Cached(lambda name: int(classifier.class_of(_text(name))))
        self._launching = Cached(_launching)

    def take(self, text: bytes | memoryview, events: list[Event]) -> None:
        """Keep what matters of one piece of the event array."""
        work, calls, host, unknown = by_category(events)
        by_role = defaultdict[str, list[Event]](list)
        for name, named in host.items():
            by_role[self.roles[name]] += named
        timed = by_role["mark"] + by_role["label"]
        if self._decode.operators == "untimed" and any(event.cat in OPERATORS for event in timed):
            self.take(text, self._decode.with_operators(text, self.counters))  # an old trace
            return
        self.counters["events"] += len(events)
        self.foreign += sum(event.cat in FOREIGN_CALLS for event in calls)
        if unknown:
            rows = zip(*with_times(unknown, self.counters), strict=True)
            self.unknown += [(str(row.cat), row.pid, start, end) for row, start, end in rows if end > start]
            self.hosts.update(event.pid for named in host.values() for event in named if hasattr(event, "pid"))
        if work:
            self.host = None
            self._take_work(work)
        if calls:
            self._take_calls(calls)
        self._take_host(by_role)
        if self.host is not None:
            self.host.add(text, host)

    def _take_work(self, events: list[Event]) -> None:
        start, known = ns_of_values([event.ts for event in events])
        length, lasts = ns_of_values([event.dur for event in events])
        self.counters["without_times"] += int((~known).sum())
        start, end = start[known], (start + np.where(lasts, length, -1))[known]  # without an end: it has none
        events = list(compress(events, known.tolist()))
        names, arguments = [event.name for event in events], arguments_of(events)
        cls = np.array(self._classes.of(names), np.int64)
        copies = np.array([event.cat in COPIES for event in events], bool)
        cls[copies & (cls != _COMM)] = _COPY
        externals = externals_of(arguments)
        unlinked = np.array([external is None for external in externals], bool)
        self.counters["kernels_unlinked"] += int((unlinked & (cls != _COPY)).sum())
        size, second = np.full((2, len(events)), NULL, np.int64)
        named = np.array([argument.collective is not None for argument in arguments], bool)
        for index in np.flatnonzero(named | (cls != _COMPUTE)).tolist():
            own = arguments[index]
            if cls[index] == _COPY:
                size[index] = max(integer(own.bytes), NULL)
                if not _between_devices(_text(names[index])):
                    continue
            elif named[index]:
                # Its host operator identifies it, whatever its name, unless that is known to compute.
                second[index] = _COMPUTE if cls[index] == _COMPUTE and computes(_text(names[index])) else NULL
                cls[index] = _COMM
            if cls[index] != _UNKNOWN:
                self.described[self._rows + index] = own if named[index] else integer(externals_of([own])[0])
        pairs = list(zip(events, arguments, strict=True))
        device = [event.pid if event.pid is not None else own.device for event, own in pairs]
        stream = [event.tid if event.tid is not None else own.stream for event, own in pairs]
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
                "second": second,
                "origin": idents(externals),
                "correlation": idents([own.correlation or None for own in arguments]),  # 0: of no call
                "graph": idents([own.graph for own in arguments]),
            }
        )

    def _take_calls(self, events: list[Event]) -> None:
        """Keep when calls began, what they launched, and for which operator; when the host waited for the device."""
        start, known = ns_of_values([call.ts for call in events])
        arguments = arguments_of(events)
        ident = idents([of_call.correlation for of_call in arguments])
        names = [call.name for call in events]
        launching = np.array(self._launching.of(names), np.int64)
        kept = known & ((ident != NULL) | (launching > Launches.NOTHING))
        columns = {"start": start, "ident": ident, "operator": idents(externals_of(arguments)), "launching": launching}
        columns["lasted"] = np.full(len(events), NULL)
        if not self.calls:  # those of the first piece are enough to tell their unit
            length, ends = ns_of_values([call.dur for call in events])
            columns["lasted"] = np.where(ends, length, NULL)
        columns["name"] = np.array(self._codes.of(names), np.int64)
        self.calls.append({name: column[kept] for name, column in columns.items()})
        waits, begun, ended = with_times(list(compress(events, (launching == _WAITED).tolist())), self.counters)
        whole = [_WAITS_FOR_ALL.match(_text(call.name)) is not None for call in waits]
        self.waits.append({"start": begun, "end": ended, "whole": np.array(whole, np.int64)})

    def _take_host(self, by_role: Mapping[str, list[Event]]) -> None:
        for mark, start, end in zip(*with_times(by_role["mark"], self.counters), strict=True):
            self.marks.append((str(mark.name), int(start), int(end)))
        if by_role["label"]:
            labels, start, end = with_times(by_role["label"], self.counters)
            name = np.array(self._codes.of([label.name for label in labels]), np.int64)
            self.labels.append({"start_ns": start, "end_ns": end, "name": name})
        parameters = arguments_of(by_role["parameters"])
        for of_call in parameters:
            external = integer(of_call.external_id)
            if external != NULL and of_call.collective is not None:
                self.parameters.setdefault(external, of_call)
        self.silent += sum(of_call.silent for of_call in parameters)
        issuing = parameters + arguments_of(by_role["issuing"])
        issuers = by_role["parameters"] + by_role["issuing"]
        names = [str(event.name) for event in issuers]
        self.claims.update(names)
        self.issued.update(zip(idents(externals_of(issuing)).tolist(), names, strict=True))
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
    return "label" if name.startswith(LABEL) else "mark" if MARK.match(name) else ""


def _launching(name: object) -> int:
    """Return what a call launches (`Launches`), or whether the host waits for the device in it."""
    text = str(name)
    return int(launched_by(text)) or (_WAITED if _WAITS.search(text) else int(Launches.NOTHING))


def _between_devices(name: str) -> bool:
    """Return whether a copy of that name may have moved data between devices ("Memcpy PtoP (Device -> Device)"). Fills,
    and copies to or from the host, do not. CUPTI also calls a copy to another device's mapped memory `DtoD`.
    """
    return "memset" not in name.lower() and _WITH_HOST.search(name) is None


def _on_devices(kept: _Kept, metadata: Metadata, source: TraceInput) -> Trace:
    """Return the rows of all devices. Communication gets its parameters from its arguments or its host operator."""
    path, counters, names, notes = source.origin, kept.counters, tuple(kept.names), list[str]()
    columns = "start_ns end_ns name device stream bytes cls second origin correlation graph"
    rows = joined(kept.work, *columns.split())
    beside = joined(kept.labels, "start_ns", "end_ns", "name")
    if len(beside["name"]):  # gloo's collectives run on the host, beside the busiest device of the process
        busiest = np.bincount(rows["device"]).argmax() if len(rows["device"]) else kept.devices.codes([None])[0]
        most = {"device": busiest, "cls": _COMM}
        filled = {each: np.full(len(beside["name"]), most.get(each, NULL), np.int64) for each in rows}
        filled["stream"] = kept.streams.codes([None] * len(beside["name"]))
        rows = {each: np.concatenate((column, (filled | beside)[each])) for each, column in rows.items()}
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
        of_row = known if isinstance(known, Arguments) else kept.parameters.get(known)
        if of_row is not None:
            described[row] = of_row
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
    if count := len(beside["name"]):  # the host launches its own rows
        rows["launch_ns"][-count:] = rows["start_ns"][-count:]
    graph = rows.pop("graph")
    trace = _trace(kept, metadata, source, rows, names, collectives, notes, platform=metadata.platform)
    base_ns = metadata.base_ns or 0
    claims = Claims(
        calls["start"] + base_ns,
        calls["ident"],
        calls["launching"],
        calls["name"],
        np.isin(calls["operator"], list(kept.issued)),
        correlation,
        calls["lasted"],
        graph,
        kept.claims,
        silent=kept.silent,
    )
    waits = joined(kept.waits, "start", "end", "whole")
    waits_ns = IntervalArray(waits["start"] + base_ns, waits["end"] + base_ns)
    for_all = waits["whole"] == 1
    of_device = IntervalArray(waits_ns.start[for_all], waits_ns.end[for_all])
    unknown, why = _unknown(kept)
    unknown_ns = {why: merge(IntervalArray(unknown.start + base_ns, unknown.end + base_ns))}
    symmetric = unnamed and any(_SYMMETRIC.match(_text(each)) for each in [*kept.roles, *names])
    if symmetric:
        moves = trace.intervals.named(lambda text: copies(text) and _between_devices(text))
        trace.intervals.second[moves & (trace.intervals.cls == _COPY)] = _COMM
    return reconciled(replace(trace, host_waits=waits_ns, device_waits=of_device, unknown=unknown_ns), claims)


def _unknown(kept: _Kept) -> tuple[IntervalArray, str]:
    """Return rows of categories that no account knows, without those of the host's processes, and what to say."""
    rows = [row for row in kept.unknown if row[1] not in kept.hosts and row[0] != COUNTED]
    times = IntervalArray(*(np.array([row[column] for row in rows], np.int64) for column in (2, 3)))
    lasted: Counter[str] = Counter()
    for category, _, start, end in rows:
        lasted[category] += int(end - start)
    longest = ", ".join(f"{category!r} ({total / 1e6:.4g} ms)" for category, total in lasted.most_common(3))
    return times, f"{len(rows)} rows are of categories that are not read: {longest}" if rows else ""


def _on_host(kept: _Kept, host: HostWork, metadata: Metadata, source: TraceInput) -> Trace:
    """Return the rows of a trace without any of a device: of a CPU, or of a host whose device was not recorded."""
    host.read_kept()
    kept.counters.update(host.counters)
    notes, gaps, names = list[str](), list[Gap](), tuple(host.names)
    world_size = (metadata.distributed or DistributedInfo()).world_size
    rows, collectives = host_rows(host, world_size, kept.counters, notes, gaps)
    operators, _ = host.rows
    refuse_other_units(source.origin, "operators", operators.end - operators.start, some_short=True)
    on_cpu = any(name.startswith(LABEL) for name in names)
    backend = (metadata.distributed or DistributedInfo()).backend or ""
    evidence, calls = [], _calls(kept)
    if launches := int(np.isin(calls["launching"], (Launches.KERNEL, Launches.GRAPH)).sum()):
        evidence.append(f"{launches} launches of kernels")
    if not (on_cpu and "gloo" in backend) and _DEVICE_BACKENDS.search(backend):
        evidence.append(f"backend {backend}")
    if labels := sum(count for name, count in kept.claims.items() if _DEVICE_LABELS.match(name)):
        evidence.append(f"{labels} labels of a device's collectives")
    if kept.foreign:
        evidence.append(f"{kept.foreign} calls of a device")
    _, unknown = _unknown(kept)
    if unknown:
        evidence.append(unknown)
    if not on_cpu and metadata.devices and "gloo" not in backend:
        evidence.append("deviceProperties")
    unseen = f"no device activity in the trace, but it has {', '.join(evidence)}"
    if not unknown:
        unseen += (
            ": record with ProfilerActivity.CUDA (or that of the device) too, and see whether the profiler may read "
            "the device"
        )
    trace = _trace(kept, metadata, source, rows, names, collectives, notes, platform="cpu", copies_observed=False)
    if evidence:
        return replace(trace, gaps=lacking(unseen, COMPUTE, COMM, seen=False), platform=metadata.platform)
    gloo = Counter(names[code] for code in rows["name"][rows["cls"] == _COMM].tolist())  # its labels are its rows
    none = np.zeros(0, np.int64)
    claims = Claims(
        none, none, none, none, none != 0, np.full(len(trace.intervals), NULL), none, issued=kept.claims + gloo
    )
    return reconciled(replace(trace, gaps=(*trace.gaps, *gaps)), claims)


def _calls(kept: _Kept) -> dict[str, Int64]:
    """Return the calls in the order of their time: of those with one number the first counts."""
    calls = joined(kept.calls, "start", "ident", "operator", "launching", "name", "lasted")
    order = np.argsort(calls["start"], kind="stable")
    return {name: column[order] for name, column in calls.items()}


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
    path, cls, distributed = source.origin, rows["cls"], (metadata.distributed or DistributedInfo())
    if not len(cls):
        why = "; it is partial: its loop ended before a step of this window was finished" if metadata.partial else ""
        why += f"; {_unknown(kept)[1]}" if kept.unknown else ""
        why += f"; {untimed} have no time that can be read" if (untimed := kept.counters["without_times"]) else ""
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
    start, end = (np.array([mark[column] for mark in kept.marks], np.int64) for column in (1, 2))
    clock: Clock = "REALTIME" if low >= _UNIX_FROM_NS else "unknown"
    return trace_of(
        source,
        "kineto",
        Process(path, None, metadata.host, distributed.rank, distributed.world_size),
        [table],
        Ranges(start, end, [name for name, *_ in kept.marks]),
        notes=notes,
        gaps=SERIALISED if any(category == COUNTED for category, *_ in kept.unknown) else (),
        since_ns=base,
        clock=clock,
        backend=distributed.backend,
        group_ranks=groups,
        **facts,
    )
