"""Reads one Kineto trace: Chrome JSON of torch.profiler, as intervals and marks of steps.

The rows are those of the devices, or for a trace of a CPU gloo's rows and operators (`kineto_host`). A row's call
(`correlation`) tells when it was launched, its operator (`External id`) which collective it is.

Collectives whose data is moved by copy engines launch no kernel (NCCL with zero-CTA collectives, torch's symmetric
memory). Of the copies between devices those are communication whose arguments, or those of the operator that launched
them, name a collective; copies that may be either make communication unobserved, with this reason.

Must not: merge devices (W15), drop a row without counting it (W16), trust the order of events, or select work by
anything but its category (W13).
"""

from __future__ import annotations

import io
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from aorta.analysis.load import microseconds
from aorta.analysis.load.chrome_json import EventArray
from aorta.analysis.load.interval_table import (
    NULL,
    Clock,
    Gemms,
    Interner,
    IntervalClass,
    Trace,
    intervals,
    look_up,
    step_of,
)
from aorta.analysis.load.kernel_classifier import MARK, NameClassifier, kind_of, step_windows
from aorta.analysis.load.kernels import GEMM_OPERATORS, gemm_of, gemms_of
from aorta.analysis.load.kineto_events import (
    COPIES,
    LARGEST_DEVICE,
    OPERATORS,
    PARAMETERS,
    Arguments,
    Cached,
    Collectives,
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
    inputs_of,
    integer,
    joined,
    metadata_of,
    with_times,
)
from aorta.analysis.load.kineto_host import LABEL, HostWork, host_gemms, host_rows
from aorta.analysis.load.rank_inference import Process, place
from aorta.errors import InputError
from aorta.timeline.arrays import Int64
from aorta.timeline.kernel_names import computes, launches_communication

_COPY, _COMPUTE, _COMM = int(IntervalClass.COPY), int(IntervalClass.COMPUTE), int(IntervalClass.COMM)
_LAUNCH, _CAPTURE, _CAPTURED = 1, 2, 3
_SYMMETRIC: Final = "symm_mem::"
"""Operators of torch's symmetric memory (torch/csrc/distributed/c10d/symm_mem); they do not go through a `c10d::`
operator.
"""
_WITH_HOST: Final = re.compile(r"HtoD|DtoH|HtoH|HostToDevice|DeviceToHost|HostToHost|Pageable|Pinned|Host\b")
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
    decode = EventDecoder()
    kept = _Kept(classifier, decode)
    event_array = EventArray(stream, lambda text: (text, decode(text)), path, tolerant=True)
    # Devices in the metadata prove nothing: torch built for CUDA lists them in traces of CPU work too.
    if kept.host is not None and metadata_of(event_array.head, {}, path).devices == []:
        kept.host.read_kept()
    for text, events in event_array.pieces():
        kept.take(text, events)
    metadata = metadata_of(event_array.head, event_array.tail, path)
    damage = [
        f"{path}: {why}" + (f" ({times} times)" if times > 1 else "") for why, times in event_array.damage.items()
    ]
    return _trace(kept, metadata, path, damage)


class _Kept:
    """What is kept of the events, piece by piece: columns of numbers and codes, so that memory grows with the rows that
    are kept, not with the trace. A trace holds millions of events, so little is done for each of them in Python.

    Attributes:
        host: the work of the host; None once there is work on a device.
        linked: row of a device -> arguments, of communication.
        copies: row of a copy between devices -> its arguments where they name a collective, else its `External id`.
        parameters: `External id` -> arguments of `record_param_comms`.
        issued: `External id` of each operator or range that issues communication -> its name.
        marks: name, start and end in ns of the marks of steps.
    """

    def __init__(self, classifier: NameClassifier, decode: EventDecoder) -> None:
        self.host: HostWork | None = HostWork(decode)
        self._decode = decode
        self.counters = Counter(events=0)
        self.names = Interner()
        self.devices, self.streams = Identifiers(LARGEST_DEVICE), Identifiers()
        self.linked: dict[int, Arguments] = {}
        self.copies: dict[int, Arguments | int] = {}
        self.parameters: dict[int, Arguments] = {}
        self.issued: dict[int, str] = {}
        self.marks: list[tuple[str, int, int]] = []
        self.shapes = Cached[int](lambda _: len(self.shapes))
        self._work: list[dict[str, Int64]] = []
        self._rows = 0
        self._calls: list[dict[str, Int64]] = []
        self._products: list[dict[str, Int64]] = []
        self._codes = Cached(lambda name: self.names(_text(name)))
        self._classes = Cached(lambda name: int(classifier.class_of(_text(name))))
        self._roles, self._launching = Cached(_role), Cached(_launching)

    def take(self, text: bytes | memoryview, events: list[Event]) -> None:
        """Keep what matters of one piece of the event array."""
        work, host, calls = by_category(events)
        by_role = defaultdict[str, list[Event]](list)
        for event in host:
            if role := self._roles[event.name]:
                by_role[role].append(event)
        if self._decode.operators == "untimed" and any(mark.cat in OPERATORS for mark in by_role["mark"]):
            self._decode.operators = "timed"  # an old trace
            self.take(text, self._decode(text))
            return
        self.counters["events"] += len(events)
        if work:
            self.host = None
            self._take_work(*with_times(work, self.counters))
        if calls:
            self._take_calls(calls)
        if by_role:
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
                if _between_devices(_text(names[at])):
                    self.copies[self._rows + at] = said if named[at] else _external(said)
            elif named[at] or cls[at] == _COMM:
                cls[at] = _COMM  # its host operator identifies it, whatever its name
                self.linked[self._rows + at] = said
        pairs = list(zip(events, arguments, strict=True))
        device = [event.pid if event.pid is not None else said.device for event, said in pairs]
        stream = [event.tid if event.tid is not None else said.stream for event, said in pairs]
        self._rows += len(events)
        self._work.append(
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
        """Keep when calls began, what they launched, and for which operator."""
        start, known = microseconds.of_values([call.ts for call in events])
        arguments = arguments_of(events)
        ident = idents([said.correlation for said in arguments])
        launching = np.array(self._launching.of([call.name for call in events]), np.int64)
        kept = known & ((ident != NULL) | (launching > _LAUNCH))
        columns = {"start": start, "ident": ident, "operator": idents(externals_of(arguments)), "launching": launching}
        self._calls.append({name: column[kept] for name, column in columns.items()})

    def _take_host(self, by_role: Mapping[str, list[Event]]) -> None:
        for mark, start, end in zip(*with_times(by_role["mark"], self.counters), strict=True):
            self.marks.append((str(mark.name), int(start), int(end)))
        products = [event for event in by_role["product"] if event.cat in OPERATORS]
        inputs = inputs_of(products)
        shapes = zip(
            [event.name for event in products],
            map(bytes, [each.dims for each in inputs]),
            map(bytes, [each.types for each in inputs]),
            strict=True,
        )
        self._products.append(
            {"origin": idents(externals_of(inputs)), "shape": np.array(self.shapes.of(shapes), np.int64)}
        )
        parameters = arguments_of(by_role["parameters"])
        for said in parameters:
            external = integer(said.external_id)
            if external != NULL and said.collective is not None:
                self.parameters.setdefault(external, said)
        issuing = parameters + arguments_of(by_role["issuing"])
        issuers = by_role["parameters"] + by_role["issuing"]
        self.issued.update(zip(idents(externals_of(issuing)).tolist(), [str(e.name) for e in issuers], strict=True))
        self.issued.pop(NULL, None)

    def work(self) -> dict[str, Int64]:
        """Return the rows of devices, with codes of devices and streams."""
        names = ("start_ns", "end_ns", "name", "device", "stream", "bytes", "cls", "origin", "correlation")
        return joined(self._work, *names)

    def calls(self) -> dict[str, Int64]:
        """Return the calls in the order of their time: of those with one number the first counts."""
        calls = joined(self._calls, "start", "ident", "operator", "launching")
        order = np.argsort(calls["start"], kind="stable")
        return {name: column[order] for name, column in calls.items()}

    def symmetric(self) -> bool:
        """Return whether symmetric memory was used."""
        return any(isinstance(name, str) and name.startswith(_SYMMETRIC) for name in [*self._roles, *self._codes])

    def gemms(self) -> Gemms:
        """Return the matrix products of the trace."""
        products = joined(self._products, "origin", "shape")
        return gemms_of(products["origin"], products["shape"], [gemm_of(*shape) for shape in self.shapes])


def _text(name: object) -> str:
    return "" if name is None else str(name)


def _external(said: Arguments) -> int:
    return integer(externals_of([said])[0])


def _role(name: object) -> str:
    """Return what an event of the host is used for beside a device's rows; empty if it is unused."""
    if not isinstance(name, str):
        return ""
    if name == PARAMETERS:
        return "parameters"
    if name in GEMM_OPERATORS:
        return "product"
    if launches_communication(name):
        return "issuing"
    return "mark" if MARK.match(name) else ""


def _launching(name: object) -> int:
    """Return whether a call launches a kernel, begins or ends the capture of a graph; 0 for any other."""
    text = str(name)
    if "LaunchKernel" in text:
        return _LAUNCH
    return _CAPTURE if "BeginCapture" in text else _CAPTURED if "EndCapture" in text else 0


def _between_devices(name: str) -> bool:
    """Return whether a copy of that name may have moved data between devices ("Memcpy PtoP (Device -> Device)"). Fills,
    and copies to or from the host, do not. CUPTI also calls a copy to another device's mapped memory `DtoD`.
    """
    return "memset" not in name.lower() and _WITH_HOST.search(name) is None


def _trace(kept: _Kept, metadata: Metadata, path: str, damage: list[str]) -> Trace:
    counters, notes, host = kept.counters, list[str](), kept.host
    distributed = metadata.distributed or DistributedInfo()
    calls = kept.calls()
    if host is None:
        rows, collectives = _device_rows(kept, calls, path, notes)
    else:
        host.read_kept()
        counters.update(host.counters)
        rows, collectives = host_rows(host, distributed.world_size, counters, notes)
    cls = rows["cls"]
    if not len(cls):
        why = "; it is partial: its loop ended before a step of this window was finished" if metadata.partial else ""
        raise InputError(
            f"{path}: {counters['events']} events, none of them work on a device, gloo's or an operator's{why}"
        )
    placed = place(
        Process(
            path,
            host=metadata.host,
            environment_rank=distributed.rank,
            environment_world=distributed.world_size,
        )
    )
    base, clock = _base(rows["start_ns"], metadata, path)
    starts, ends = (np.array([mark[at] for mark in kept.marks], np.int64) + base for at in (1, 2))
    steps, step_notes = step_windows([name for name, *_ in kept.marks], starts, ends, placed.rank)
    no_marks = ("no step marks (ProfilerStep#N): only the whole trace is measured",)
    notes += [*placed.notes, *(step_notes if kept.marks else no_marks)]
    groups = _groups(distributed.pg_config) | collectives.group_ranks
    if len(groups) == 1:
        # With a single group, collectives that do not name their group ran in it.
        (only,) = groups
        collectives.group[(cls == _COMM) & (collectives.group == NULL)] = collectives.groups(only)

    correlation = rows.pop("correlation", np.zeros(0, np.int64))
    lost = _lost(calls, correlation)
    lost_at, unseen = np.zeros(0, np.int64), None
    unnamed = len(kept.copies) - counters["comm_copies"]
    if host is not None:
        unseen = _device_unseen(host, metadata, int(lost.sum()))
    elif lost.any() and (correlation != NULL).any():
        lost_at = calls["start"][lost] + base
        counters["kernels_lost"] = len(lost_at)
        notes.append(f"{path}: {len(lost_at)} launches have no kernel in the trace: the profiler lost them")
        if lost_comm := int(np.isin(calls["operator"][lost], list(kept.issued)).sum()):
            unseen = f"{lost_comm} launches of communication have no kernel in the trace"
    if unseen is None and unnamed and kept.symmetric():
        unseen = (
            f"symmetric memory was used, and of {unnamed} copies between devices the trace does not say whether they "
            "are communication: copy engines move the data of such collectives, without a kernel"
        )
    nothing = np.full(len(cls), NULL, np.int64)
    launch = rows.get("launch_ns", nothing)
    rank, start = np.full(len(cls), placed.rank, np.int32), rows["start_ns"] + base
    rows |= {
        "start_ns": start,
        "end_ns": rows["end_ns"] + base,
        "launch_ns": np.where(launch == NULL, NULL, launch + base),
        "bytes": np.where(cls == _COMM, collectives.bytes, rows.get("bytes", nothing)),
        "step": step_of(rank, start, steps),
    }
    table = intervals(
        **rows,
        rank=rank,
        kind=collectives.kind,
        group=collectives.group,
        seq=collectives.seq,
        dtype=collectives.dtype,
        names=(kept if host is None else host).names.strings,
        groups=collectives.groups.strings,
        dtypes=collectives.dtypes.strings,
    )
    return Trace(
        path=path,
        format="kineto",
        clock=clock,
        intervals=table,
        windows=steps,
        ranks=(placed.rank,),
        world_size=placed.world_size if placed.world_size is not None else distributed.world_size,
        platform=_platform(metadata, host is None or unseen is not None),
        backend=distributed.backend,
        host=metadata.host,
        group_ranks=groups,
        group_sizes=collectives.group_sizes | {name: len(ranks) for name, ranks in groups.items()},
        counters={name: count for name, count in counters.items() if count or name == "events"},
        notes=(*notes, *damage),
        copies_observed=host is None,
        unseen=unseen,
        compute_unseen=host is not None and unseen is not None,
        lost=step_of(np.full(len(lost_at), placed.rank, np.int32), lost_at, steps),
        gemms=kept.gemms() if host is None else host_gemms(kept.gemms(), host),
    )


def _device_rows(
    kept: _Kept, calls: dict[str, Int64], path: str, notes: list[str]
) -> tuple[dict[str, Int64], Collectives]:
    """Return rows of all devices. Communication gets its parameters from its arguments or its host operator."""
    rows, names = kept.work(), kept.names.strings
    devices, named = kept.devices.numbers()
    streams, _ = kept.streams.numbers()
    rows["device"], rows["stream"] = devices[rows["device"]], streams[rows["stream"]]
    if len({text.partition("]")[0] for text in named.values() if text.startswith("[")}) > 1:
        notes.append(f"{path}: merged of several processes, whose ids repeat: kernels are not linked to their calls")
        rows["origin"][:] = rows["correlation"][:] = NULL
        kept.parameters.clear()
        kept.issued.clear()
    if named:
        notes.append(f"{path}: devices are named: " + ", ".join(f"{n} is {text!r}" for n, text in named.items()))

    copies = {}
    for row, known in kept.copies.items():
        said = known if isinstance(known, Arguments) else kept.parameters.get(known)
        if said is not None:
            copies[row] = said
    kept.counters["comm_copies"] += len(copies)
    linked = {}
    for row, arguments in kept.linked.items():
        said = arguments if arguments.collective is not None else kept.parameters.get(_external(arguments))
        if said is not None:
            linked[row] = said
    kept.counters["comm_unlinked"] += len(kept.linked) - len(linked)

    cls, name, origin = rows["cls"], rows["name"], rows["origin"]
    moved = np.fromiter(copies, np.int64, len(copies))
    cls[moved] = _COMM
    may = np.array([not computes(text) for text in names], bool)
    issued = np.flatnonzero((cls == _COMPUTE) & may[name] & np.isin(origin, list(kept.issued)))
    cls[issued] = _COMM
    collectives, kinds = Collectives.unknown(len(cls)), Cached(kind_of)
    communicates = np.flatnonzero(cls == _COMM)
    collectives.kind[communicates] = kinds.of([names[code] for code in name[communicates].tolist()])
    issued = issued[collectives.kind[issued] == NULL]
    collectives.kind[issued] = kinds.of([kept.issued[external] for external in origin[issued].tolist()])
    collectives.describe(linked | copies)
    # One collective may be many copies: none of them has all its bytes, and they share its sequence number.
    collectives.seq[moved] = collectives.bytes[moved] = NULL
    known = rows["correlation"] != NULL
    rows["launch_ns"] = np.where(known, look_up(rows["correlation"], calls["ident"], calls["start"]), NULL)
    return rows, collectives


def _lost(calls: dict[str, Int64], correlation: Int64) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which calls launched kernels that no row is (`correlation`: of all rows on devices). What is launched
    while a graph is captured does not run.
    """
    launching = calls["launching"]
    captured = np.cumsum((launching == _CAPTURE).astype(np.int64) - (launching == _CAPTURED))
    lost: np.ndarray[Any, np.dtype[np.bool_]] = (
        (launching == _LAUNCH) & (captured <= 0) & ~np.isin(calls["ident"], correlation)
    )
    return lost


def _device_unseen(host: HostWork, metadata: Metadata, launches: int) -> str | None:
    """Return why a trace without rows of a device says nothing of the work; None where it is the trace of a CPU."""
    on_cpu = any(name.startswith(LABEL) for name in host.names.strings)
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


def _base(starts: Int64, metadata: Metadata, path: str) -> tuple[int, Clock]:
    """Return the nanoseconds to add to the times, and the clock that they then refer to."""
    base = metadata.base_ns or 0
    low, high = int(starts.min()) + base, int(starts.max()) + base
    if not -microseconds.LARGEST_NS < low <= high < microseconds.LARGEST_NS:
        raise InputError(f"{path}: times from {low} to {high} ns, which no clock shows: baseTimeNanoseconds is {base}")
    return base, "REALTIME" if low >= _UNIX_FROM_NS else "unknown"


def _groups(config: object) -> dict[str, tuple[int, ...]]:
    """Group name -> ranks, from `distributedInfo.pg_config`."""
    entries = config if isinstance(config, list) else []
    named = [entry for entry in entries if isinstance(entry, dict) and "pg_name" in entry]
    found = {str(entry["pg_name"]): group_ranks(entry.get("ranks")) for entry in named}
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
