"""Writes a trace file event by event, and gives the processes, threads and flow events of many traces ids of their own.

The file is JSON, compressed where its name ends in .gz, and appears under its name only when it is complete. A rank's
own pids, tids and ids, numbers or text, become integers below 2^53 (which JSON readers keep exact); no two traces share
one, and the same rank and name always give the same integer. Must not: replace a file unless asked to, leave an
incomplete one, drop an event, or join the flows of two ranks.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import msgspec

from aorta.analysis.load.chrome_json import Event
from aorta.errors import InputError
from aorta.records.files import whole_file
from aorta.redaction import redact

PIDS_PER_RANK: Final = 1_000
TIDS_PER_RANK: Final = 100_000
_IDS_PER_TRACE: Final = 1 << 32
"""Kineto's correlation ids have 32 bits. Flows of trace n get n * 2^33 + id; other ids are numbered above them."""
_ID_KEYS = ("id", "bind_id")
_GZIP_LEVEL = 4
_BUFFER = 1 << 20


class TraceWriter:
    """Appends events; the file is well-formed once `finish` was called."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray(b'{"traceEvents":[\n')
        self._first = True
        self.count = 0

    def write(self, event: dict[str, Any]) -> None:
        """Write one event; undecoded values are written unchanged."""
        if not self._first:
            self._buffer += b",\n"
        self._first = False
        self.count += 1
        self._buffer += self._encoder.encode(event)
        if len(self._buffer) >= _BUFFER:
            self._flush()

    def finish(self, metadata: dict[str, Any]) -> None:
        """Write what stands behind the events."""
        self._buffer += b"\n]"
        for key, value in metadata.items():
            self._buffer += b",\n" + self._encoder.encode(key) + b":" + self._encoded(value)
        self._buffer += b"}\n"
        self._flush()

    def _flush(self) -> None:
        """Write whole events, without secrets."""
        self._file.write(redact(self._buffer.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape"))
        self._buffer.clear()

    def _encoded(self, value: Any) -> bytes:
        try:
            return self._encoder.encode(value)
        except UnicodeEncodeError:  # a path that is not UTF-8
            return json.dumps(value, default=_plain).encode()


def _plain(raw: object) -> Any:
    return json.loads(bytes(raw)) if isinstance(raw, msgspec.Raw) else str(raw)


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


def named_process(pid: int, name: str) -> Iterator[dict[str, Any]]:
    """Yield the events that name a process and place it by its id."""
    yield metadata_event("process_name", pid, {"name": name})
    yield metadata_event("process_sort_index", pid, {"sort_index": pid})


def named_thread(pid: int, tid: int, name: str, order: int) -> Iterator[dict[str, Any]]:
    """Yield the events that name a thread and place it among those of its process."""
    yield metadata_event("thread_name", pid, {"name": name}, tid)
    yield metadata_event("thread_sort_index", pid, {"sort_index": order}, tid)


class TrackIdentity:
    """The ids of one rank: pids from (rank + 1) * 1000, tids from (rank + 1) * 100,000.

    Args:
        label: name of its processes, for example "rank 3 (node7)".
        main_pid: pid of its first process; None = the first of its range.
    """

    def __init__(self, rank: int, label: str, main_pid: int | None = None) -> None:
        self.rank, self.label = rank, label
        self._main_pid = main_pid
        self._pids: dict[bytes, int] = {}
        self._tids: dict[tuple[bytes, bytes], int] = {}
        self._named: set[int] = set()
        self._sorted: set[int] = set()
        self._named_tids: set[int] = set()
        self._used_tids: set[int] = set()
        self._other_ids: dict[tuple[int, bytes], int] = {}

    def pid(self, raw: bytes) -> int:
        """Return the new pid of a process.

        Raises:
            InputError: the rank has more processes than its range holds.
        """
        if raw not in self._pids:
            count = len(self._pids)
            if count >= PIDS_PER_RANK:
                raise InputError(f"rank {self.rank}: its traces name more than {PIDS_PER_RANK} processes")
            self._pids[raw] = self._in_range(count) if count or self._main_pid is None else self._main_pid
        return self._pids[raw]

    def tid(self, pid: bytes, raw: bytes) -> int:
        """Return the new tid of a thread; no two processes share one."""
        if (pid, raw) not in self._tids:
            if len(self._tids) >= TIDS_PER_RANK:
                raise InputError(f"rank {self.rank}: its traces name more than {TIDS_PER_RANK} threads")
            self._tids[pid, raw] = (self.rank + 1) * TIDS_PER_RANK + len(self._tids)
        return self._tids[pid, raw]

    def rename(self, event: Event, trace: int) -> None:
        """Replace the ids of `event`, in place. `trace` is the number of its trace in the whole merge."""
        pid = bytes(event.get("pid", b"0"))
        new_pid = self.pid(pid)
        event["pid"] = _number(new_pid)
        metadata = bytes(event.get("ph", b"")) == b'"M"'
        if "tid" in event:
            new_tid = self.tid(pid, bytes(event["tid"]))
            event["tid"] = _number(new_tid)
            if not metadata:
                self._used_tids.add(new_tid)
        for key in _ID_KEYS:
            if key in event:
                event[key] = _number(self._id(trace, bytes(event[key])))
        if "id2" in event:
            scopes = msgspec.json.decode(event["id2"], type=dict[str, msgspec.Raw])
            new = {key: self._id(trace, bytes(value)) for key, value in scopes.items()}
            event["id2"] = msgspec.Raw(msgspec.json.encode(new))
        if metadata:
            self._metadata(event, pid, new_pid)

    def missing_names(self) -> Iterator[dict[str, Any]]:
        """Yield metadata events for processes and threads that the traces did not name."""
        for raw, pid in self._pids.items():
            if pid not in self._named:
                yield metadata_event(
                    "process_name", pid, {"name": self._name(raw, pid, None), "original_pid": _decoded(raw)}
                )
            if pid not in self._sorted:
                yield metadata_event("process_sort_index", pid, {"sort_index": self._sort_index(pid)})
        for (pid_raw, raw), tid in self._tids.items():
            if tid in self._used_tids - self._named_tids:
                args = {"name": str(_decoded(raw)), "original_tid": _decoded(raw)}
                yield metadata_event("thread_name", self._pids[pid_raw], args, tid)

    def _metadata(self, event: Event, pid: bytes, new_pid: int) -> None:
        name = msgspec.json.decode(event["name"])
        if name not in ("process_name", "process_sort_index", "thread_name"):
            return
        args: dict[str, Any] = msgspec.json.decode(event.get("args", b"{}"), type=dict[str, msgspec.Raw])
        if name == "process_name":
            self._named.add(new_pid)
            args |= {
                "name": self._name(pid, new_pid, _decoded(bytes(args.get("name", b"null")))),
                "original_pid": _decoded(pid),
            }
        elif name == "process_sort_index":
            self._sorted.add(new_pid)
            args["sort_index"] = self._sort_index(new_pid)
        elif "tid" in event:
            self._named_tids.add(int(bytes(event["tid"])))
        event["args"] = msgspec.Raw(msgspec.json.encode(args))

    def _name(self, raw: bytes, pid: int, name: object) -> str:
        """Name a process: the rank's first gets the label of the rank, the others append their own name to it."""
        if next(iter(self._pids.values())) == pid:
            return self.label
        return f"{self.label}: {name or 'process'} {_decoded(raw)}".rstrip()

    def _sort_index(self, pid: int) -> int:
        return self._in_range(list(self._pids.values()).index(pid))

    def _in_range(self, count: int) -> int:
        return (self.rank + 1) * PIDS_PER_RANK + count

    def _id(self, trace: int, raw: bytes) -> int:
        base = trace * 2 * _IDS_PER_TRACE
        if len(raw) <= 10 and raw.isdigit() and (number := int(raw)) < _IDS_PER_TRACE:
            return base + number
        return base + _IDS_PER_TRACE + self._other_ids.setdefault((trace, raw), len(self._other_ids))


def _number(value: int) -> msgspec.Raw:
    return msgspec.Raw(b"%d" % value)


def _decoded(raw: bytes) -> Any:
    """Decode an id or name of a trace; as text where it cannot be a value, such as a number of more than 64 bits."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return raw.decode()
    return value if not isinstance(value, int) or abs(value) < 2**63 else raw.decode()
