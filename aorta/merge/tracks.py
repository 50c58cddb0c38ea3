"""Writes a trace file event by event, gives the processes, threads and flow events of many traces ids of their own, and
turns records into tracks.

The file is JSON, compressed where its name ends in .gz, and appears under its name only when it is complete. A rank's
own pids, tids and ids, numbers or text, become integers below 2^53 (which JSON readers keep exact); no two traces share
one, and the same rank and name always give the same integer.

Tracks of a record: steps, ranges of the caller, passes of blocks, active lanes (pipeline bubbles too), stalls, waits,
other work, copies, every collective, and samples of the device; begin and end events on threads of a separate process
(complete events, `ph` X, remain those of the traces). Must not: replace a file unless asked to, leave an incomplete
one, drop an event, join the flows of two ranks, or hold a whole record.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, cast

import msgspec

from aorta.errors import InputError
from aorta.merge.sources import RankAlignment, TraceFile, scanning
from aorta.read.traces.chrome_json import Event, ns_as_text
from aorta.records.clocks import WallTime
from aorta.records.files import whole_file
from aorta.records.record_file import stream
from aorta.records.schema import Anchor, Footer, Header, Step
from aorta.redaction import redact
from aorta.timeline.arrays import interval_array, merge, pairs

PIDS_PER_RANK: Final = 1_000
TIDS_PER_RANK: Final = 100_000
_IDS_PER_TRACE: Final = 1 << 32
"""Kineto's correlation ids have 32 bits. Flows of trace n get n * 2^33 + id; other ids are numbered above them."""
_GZIP_LEVEL = 4
_BUFFER = 1 << 20


class TraceWriter:
    """Appends events; the file is well-formed once `finish` was called."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray(b'{"traceEvents":[\n')
        self._separator = b""

    def write(self, event: dict[str, Any]) -> None:
        """Write one event; undecoded values are written unchanged."""
        self._buffer += self._separator + self._encoder.encode(event)
        self._separator = b",\n"
        if len(self._buffer) >= _BUFFER:
            self._flush()

    def finish(self, metadata: dict[str, Any]) -> None:
        """Write what stands behind the events."""

        def plain(raw: object) -> Any:
            return json.loads(bytes(raw)) if isinstance(raw, msgspec.Raw) else str(raw)

        self._buffer += b"\n]"
        for key, value in metadata.items():
            try:
                encoded = self._encoder.encode(value)
            except UnicodeEncodeError:  # a path that is not UTF-8
                encoded = json.dumps(value, default=plain).encode()
            self._buffer += b",\n" + self._encoder.encode(key) + b":" + encoded
        self._buffer += b"}\n"
        self._flush()

    def _flush(self) -> None:
        """Write whole events, without secrets."""
        shown = redact(self._buffer.decode("utf-8", "surrogateescape"), part_of_json=True)
        self._file.write(shown.encode("utf-8", "surrogateescape"))
        self._buffer.clear()


@contextmanager
def trace_file(path: Path, *, overwrite: bool) -> Iterator[TraceWriter]:
    """Yield a writer whose file appears under `path` when the block ends without an error.

    Raises:
        InputError: it exists and may not be replaced, or cannot be written.
    """
    if path.exists() and not overwrite:
        raise InputError(f"{path}: exists; --overwrite replaces it")
    if not path.name.endswith((".json", ".json.gz")):
        raise InputError(f"{path}: its name has to end in .json or .json.gz")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as part, part.open("wb") as raw:
            if path.name.endswith(".gz"):
                with gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=_GZIP_LEVEL, mtime=0) as packed:
                    yield TraceWriter(cast(BinaryIO, packed))
            else:
                yield TraceWriter(raw)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error


def metadata_event(what: str, pid: int, args: dict[str, Any], tid: int = 0) -> dict[str, Any]:
    """Return an event that names or orders a process or a thread, as `what` says."""
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


class TrackIdentity:
    """The ids of one rank: pids from (rank + 1) * 1000, tids from (rank + 1) * 100,000.

    Args:
        label: name of its processes, for example "rank 3 (node7)".
        main_pid: pid of its first process; None = the first of its range.
    """

    def __init__(self, rank: int, label: str, main_pid: int | None = None) -> None:
        self.rank, self.label = rank, label
        self._main_pid = main_pid
        self._pids: dict[bytes, tuple[int, int]] = {}  # pid, and where it is sorted
        self._tids: dict[tuple[bytes, bytes], int] = {}
        self._stated: set[tuple[str, int | None]] = set()  # what a trace says of which pid or tid
        self._used_tids: set[int] = set()
        self._other_ids: dict[tuple[int, bytes], int] = {}

    def rename(self, event: Event, trace: int) -> None:
        """Replace the ids of `event`, in place. `trace` is the number of its trace in the whole merge.

        Raises:
            InputError: the rank has more processes or threads than its range holds.
        """
        raw = bytes(event.get("pid", b"0"))
        if raw not in self._pids:
            count = len(self._pids)
            if count >= PIDS_PER_RANK:
                raise InputError(f"rank {self.rank}: its traces name more than {PIDS_PER_RANK} processes")
            order = (self.rank + 1) * PIDS_PER_RANK + count
            self._pids[raw] = order if count or self._main_pid is None else self._main_pid, order
        pid, order = self._pids[raw]
        event["pid"] = msgspec.Raw(b"%d" % pid)
        metadata = bytes(event.get("ph", b"")) == b'"M"'
        tid = None
        if "tid" in event:
            thread = raw, bytes(event["tid"])
            if thread not in self._tids and len(self._tids) >= TIDS_PER_RANK:
                raise InputError(f"rank {self.rank}: its traces name more than {TIDS_PER_RANK} threads")
            tid = self._tids.setdefault(thread, (self.rank + 1) * TIDS_PER_RANK + len(self._tids))
            event["tid"] = msgspec.Raw(b"%d" % tid)
            if not metadata:
                self._used_tids.add(tid)
        for key in ("id", "bind_id"):
            if key in event:
                event[key] = msgspec.Raw(b"%d" % self._id(trace, bytes(event[key])))
        if "id2" in event:
            scopes = msgspec.json.decode(event["id2"], type=dict[str, msgspec.Raw])
            new = {key: self._id(trace, bytes(value)) for key, value in scopes.items()}
            event["id2"] = msgspec.Raw(msgspec.json.encode(new))
        what = msgspec.json.decode(event["name"]) if metadata else None
        if what in ("process_name", "process_sort_index", "thread_name"):
            args: dict[str, Any] = msgspec.json.decode(event.get("args", b"{}"), type=dict[str, msgspec.Raw])
            self._stated.add((what, tid if what == "thread_name" else pid))
            if what == "process_name":
                name = self._name(raw, _decoded(bytes(args.get("name", b"null"))))
                args |= {"name": name, "original_pid": _decoded(raw)}
            elif what == "process_sort_index":
                args["sort_index"] = order
            event["args"] = msgspec.Raw(msgspec.json.encode(args))

    def missing_names(self) -> Iterator[dict[str, Any]]:
        """Yield metadata events for processes and threads that the traces did not name."""
        for raw, (pid, order) in self._pids.items():
            if ("process_name", pid) not in self._stated:
                args = {"name": self._name(raw, None), "original_pid": _decoded(raw)}
                yield metadata_event("process_name", pid, args)
            if ("process_sort_index", pid) not in self._stated:
                yield metadata_event("process_sort_index", pid, {"sort_index": order})
        for (raw, thread), tid in self._tids.items():
            if tid in self._used_tids and ("thread_name", tid) not in self._stated:
                args = {"name": str(_decoded(thread)), "original_tid": _decoded(thread)}
                yield metadata_event("thread_name", self._pids[raw][0], args, tid)

    def _name(self, raw: bytes, name: object) -> str:
        """Name a process: the rank's first gets the label of the rank, the others append their own name to it."""
        if next(iter(self._pids)) == raw:
            return self.label
        return f"{self.label}: {name or 'process'} {_decoded(raw)}".rstrip()

    def _id(self, trace: int, raw: bytes) -> int:
        base = trace * 2 * _IDS_PER_TRACE
        if len(raw) <= 10 and raw.isdigit() and (number := int(raw)) < _IDS_PER_TRACE:
            return base + number
        return base + _IDS_PER_TRACE + self._other_ids.setdefault((trace, raw), len(self._other_ids))


def _decoded(raw: bytes) -> Any:
    """Decode an id or name of a trace; as text where it cannot be a value, such as a number of more than 64 bits."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return raw.decode()
    return value if not isinstance(value, int) or abs(value) < 2**63 else raw.decode()


def copy_events(
    writer: TraceWriter,
    traces: Mapping[int, TraceFile],
    identity: TrackIdentity,
    alignment: RankAlignment,
    base_ns: int,
    see: Callable[[Event, int | None], None],
) -> None:
    """Copy every event of one rank's traces, with its new ids and on the reference clock.

    Args:
        traces: number of a trace in the whole merge -> the trace.
        see: gets the event, which it may change, and its start; None without a time.

    Raises:
        InputError: something is no trace event; names the file and the event.
    """
    for number, trace in traces.items():
        with scanning(trace.path) as scanner:
            for event in scanner.events():
                try:
                    identity.rename(event, number)
                    see(event, alignment.move(event, trace.base_ns or 0, base_ns))
                except (KeyError, ValueError, AttributeError, TypeError, RecursionError) as error:
                    raise InputError(f"{trace.path}: event {scanner.count}: not a trace event ({error!r})") from error
                writer.write(event)
    for missing in identity.missing_names():
        writer.write(missing)


_TRACKS: Final = ("steps", "ranges of", "blocks", "lane compute", "stalls", "waits", "lane", "collectives")
"""Order of the tracks of a rank, by how their names begin; others follow."""
_COUNTERS: Final = ("temp_c", "power_w", "sclk_mhz", "mclk_mhz", "util_pct", "mem_used_bytes")


@dataclass(frozen=True)
class MergedCollective:
    """One collective on one rank, on the reference clock. Its bounds are None where those of the clocks are unknown."""

    kind: str
    group: str
    seq: int
    issue_ns: int
    end_ns: int | None
    issue_bound_ns: int | None
    end_bound_ns: int | None


class _Slice(NamedTuple):
    """A slice on a track, in ns from the start of its step."""

    track: str
    name: str
    begin_ns: int
    end_ns: int
    args: dict[str, Any] | None = None


@dataclass
class RecordTracks:
    """What one record contributes to a merge. `events` must be exhausted before the last five attributes are read.

    Attributes:
        span_ns: first and last instant of the rank's trace, on the reference clock; steps outside are left out. None:
            all are in it.
        groups: process group -> its ranks, from the footer.
        bound_ns: largest error of a time, between the ends of its steps; None where it was not measured.
    """

    path: Path
    rank: int
    alignment: RankAlignment
    span_ns: tuple[int, int] | None
    label: str
    base_ns: int
    groups: dict[str, list[int]] = field(default_factory=dict)
    collectives: list[MergedCollective] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    steps: int = 0
    bound_ns: int | None = 0

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of all steps that touch the span.

        Raises:
            InputError: the record cannot be read.
        """
        readings, lanes = [], tuple[str, ...]()
        for line in stream(self.path, []):
            if isinstance(line, Header | Anchor | Footer):
                readings.append(line.clock)
            if isinstance(line, Footer):
                self.groups = line.groups
        if not readings:
            self.problems.append(f"{self.path}: no header; its tracks are left out")
            return
        wall = WallTime(readings)
        tids: dict[str, int] = {}
        free: dict[str, list[int]] = {}  # track -> when each of its threads is free
        pid, last_tid = ((self.rank + 1) * ids + ids - 1 for ids in (PIDS_PER_RANK, TIDS_PER_RANK))

        def ts(instant_ns: int) -> msgspec.Raw:
            return msgspec.Raw(ns_as_text(instant_ns - self.base_ns))

        for line in stream(self.path, self.problems):
            if isinstance(line, Header):
                lanes = line.lanes
            if not isinstance(line, Step):
                continue
            origin, length = line.start_mono_ns, line.end_mono_ns - line.start_mono_ns

            def at(offset_ns: int, origin: int = origin) -> int:
                return self.alignment.to_reference(wall.realtime_ns(origin + offset_ns))

            def bound(offset_ns: int, origin: int = origin) -> int | None:
                clocks = self.alignment.bound_ns(wall.realtime_ns(origin + offset_ns))
                return None if clocks is None else clocks + wall.uncertainty_ns

            if self.span_ns is not None and (at(length) < self.span_ns[0] or at(0) > self.span_ns[1]):
                continue
            self.steps += 1
            bounds = self.bound_ns, bound(0), bound(length)
            self.bound_ns = None if None in bounds else max(bounds)  # type: ignore[type-var]
            for row in line.collectives:
                end_ns, end_bound_ns = (None if row.end_ns is None else of(row.end_ns) for of in (at, bound))
                issue_ns, issue_bound_ns = at(row.issue_ns), bound(row.issue_ns)
                self.collectives.append(
                    MergedCollective(row.kind, row.group, row.seq, issue_ns, end_ns, issue_bound_ns, end_bound_ns)
                )
            for part in sorted(_slices(line, lanes), key=lambda part: part.begin_ns):
                begin, end = at(part.begin_ns), max(at(part.begin_ns), at(part.end_ns))
                # What is on a track may overlap, slices of a thread may not: the first thread that is free.
                ends = free.setdefault(part.track, [])
                thread = next((number for number, until in enumerate(ends) if until <= begin), len(ends))
                ends[thread : thread + 1] = [end]
                track = f"{part.track} ({thread + 1})" if thread else part.track
                tid = tids.setdefault(track, last_tid - len(tids))
                common = {"cat": "aorta", "pid": pid, "tid": tid, "name": part.name}
                yield {"ph": "B", **common, "ts": ts(begin), **({"args": part.args} if part.args else {})}
                yield {"ph": "E", **common, "ts": ts(end)}
            for sample in line.device or ():
                instant = ts(at((sample.start_mono_ns + sample.end_mono_ns) // 2 - origin))
                for name in _COUNTERS:
                    if (value := getattr(sample, name)) is not None:
                        counter = {"ph": "C", "cat": "aorta", "pid": pid, "name": name, "ts": instant}
                        yield {**counter, "args": {name: value}}
        if self.steps:
            yield metadata_event("process_name", pid, {"name": f"{self.label}: AORTA record"})
            yield metadata_event("process_sort_index", pid, {"sort_index": pid})

            def order(track: str) -> tuple[int, str]:
                kinds = (number for number, prefix in enumerate(_TRACKS) if track.startswith(prefix))
                return next(kinds, len(_TRACKS)), track

            for number, track in enumerate(sorted(tids, key=order)):
                yield metadata_event("thread_name", pid, {"name": track}, tids[track])
                yield metadata_event("thread_sort_index", pid, {"sort_index": number}, tids[track])


def _slices(step: Step, lanes: Sequence[str]) -> Iterator[_Slice]:
    """Yield what ran when in one step, on the track of its kind."""
    numbered = f"step {step.global_step}" if step.phase == "train" else f"{step.phase} step {step.global_step}"
    facts = {"global_step": step.global_step, "overlap_ratio": step.overlap.get("overlap_ratio")}
    yield _Slice("steps", numbered, 0, step.end_mono_ns - step.start_mono_ns, facts)
    for part in step.ranges or ():  # ranges of one thread and depth share a track, as they never overlap
        track = f"ranges of thread {part.thread}" + (f", level {part.depth + 1}" if part.depth else "")
        error = {"error": part.error} if part.error is not None else None
        yield _Slice(track, part.name, part.start_ns, part.end_ns, error)
    for block in step.compute:
        yield _Slice("blocks", f"{block.block} {block.phase}", block.start_ns, block.end_ns)
    for bit, lane in enumerate(lanes):
        # Adjacent segments that differ only in other lanes do not split a stretch (W7).
        active = ((part.start_ns, part.end_ns) for part in step.active_segments if part.lanes >> bit & 1)
        for first, last in pairs(merge(interval_array(active))):
            yield _Slice(f"lane {lane}", lane, first, last)
    for stall in step.stalls:
        yield _Slice("stalls", stall.cause or "stall", stall.start_ns, stall.end_ns)
    for wait in step.waits or ():
        name = f"wait for {wait.kind or 'collective'}#{wait.seq} of group {wait.group}"
        yield _Slice("waits", name, wait.enter_ns, wait.leave_ns)
    for work in step.aux:
        yield _Slice("other work", work.name, work.start_ns, work.end_ns)
    for copy in step.copies or ():
        if copy.start_ns is not None and copy.end_ns is not None:
            yield _Slice("copies", copy.direction, copy.start_ns, copy.end_ns, {"bytes": copy.bytes})
    for row in step.collectives:
        if row.start_ns is not None and row.end_ns is not None:
            queued_us = (row.start_ns - row.issue_ns) / 1e3
            args = {"seq": row.seq, "group": row.group, "bytes": row.bytes, "queued_us": queued_us}
            yield _Slice(f"collectives {row.group}", f"{row.kind}#{row.seq}", row.start_ns, row.end_ns, args)
