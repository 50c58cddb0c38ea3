"""Finds the traces to merge, or records where there is no trace.

Accepts `.json`, `.json.gz` and `.tar.gz`/`.tgz` (one JSON file inside), or folders with them. Must not: unpack to disk,
or choose silently between two traces of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from aorta.errors import InputError
from aorta.read.traces.chrome_json import LARGEST_NS, Event, NoEventArray, RawEvents, ns_of_value
from aorta.read.traces.open import is_tar, members, opened
from aorta.read.traces.reader import ranks_in_path
from aorta.records.clocks import CLOCK_SYNC_FILE, TRACE_KEY, ClockSync, decode
from aorta.records.record_file import header_of
from aorta.records.run_files import (
    HISTORY_DIR,
    MANIFEST_FILE,
    RANK_FILE,
    RANK_FILE_GLOB,
    RANK_FILE_NAME,
    RPC_FILE,
    TRACE_FILE,
    in_history,
    rank_files,
)
from aorta.records.schema import WORLD_LIMIT

_SUFFIXES: Final = (".json", ".json.gz", ".tar.gz", ".tgz")
_NOT_TRACES = frozenset({MANIFEST_FILE, CLOCK_SYNC_FILE, RPC_FILE, TRACE_FILE, "summary.json"})
_LEFT_OUT = frozenset({HISTORY_DIR, "checkpoints", "logs"})
_FOLDERS_ABOVE = 4
"""A trace lies in `torch_profiler/rank<N>/` of its run, at most this many folders below the run's own."""


@dataclass(frozen=True)
class TraceFile:
    """One trace file, or a record.

    Attributes:
        base_ns: None where `ts` is absolute.
        start_ns: orders the windows of a rank.
        clock: what the trace itself says of its rank's clock.
        run: id and attempt of its run; None where it does not say.
    """

    path: Path
    rank: int
    host: str | None
    world_size: int | None
    base_ns: int | None
    trace_id: str | None
    start_ns: int
    head: dict[str, msgspec.Raw]
    window: int = 0
    clock: ClockSync | None = None
    run: tuple[str, int] | None = None

    @property
    def is_record(self) -> bool:
        """Whether it is a record of AORTA."""
        return RANK_FILE_NAME.match(self.path.name) is not None


@contextmanager
def scanning(path: Path) -> Iterator[RawEvents]:
    """Open the events of one file.

    Raises:
        NoEventArray: it is JSON, but no trace.
        InputError: it cannot be read or inflated, or is no trace; names the file.
    """
    name = str(path)
    with opened(name) as stream:
        if not is_tar(stream.head()):
            yield RawEvents(stream, name)
            return
        seen = False
        for where, content in members(stream, name):
            if not where.endswith(".json"):
                continue
            if seen:
                raise InputError(f"{path}: several .json files in one archive, {where} too; give one trace a file")
            seen = True
            yield RawEvents(content, where)
            if content.read(1):
                return  # the caller stopped early: do not read on to what follows
        if not seen:
            raise InputError(f"{path}: there is no .json file in this archive")


def find_files(paths: Sequence[Path], notes: list[str]) -> list[Path]:
    """List the traces given or found, in order; of folders without any trace the records. Other JSON files in a folder
    are left out with a note.

    Raises:
        InputError: a path does not exist, a file has another extension, or there is neither trace nor record.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            for file in sorted(path.rglob("*")):
                hidden = file.name in _NOT_TRACES or _LEFT_OUT & set(file.relative_to(path).parts[:-1])
                if hidden or not file.name.endswith(_SUFFIXES) or not file.is_file():
                    continue
                try:
                    with scanning(file):
                        files.append(file)  # also if it is not JSON at all, which is reported later
                except NoEventArray:
                    notes.append(f"{file}: left out: JSON, but no trace")
        elif not path.exists():
            raise InputError(f"{path}: no such file or folder")
        elif not path.name.endswith(_SUFFIXES) and not RANK_FILE_NAME.match(path.name):
            raise InputError(f"{path}: a trace ends in {', '.join(_SUFFIXES)}")
        else:
            files.append(path)
    files = files or [record for path in paths for record in rank_files(path)]
    if not files:
        below = sorted({str(record.parent) for path in paths for record in path.rglob(RANK_FILE_GLOB)})
        hint = f"; there are records in {', '.join(below)}: give the folders of one run" if below else ""
        raise InputError(
            f"neither trace nor record in {', '.join(map(str, paths))}: expected {', '.join(_SUFFIXES)} files of "
            f"torch.profiler, or {RANK_FILE.format(rank='<rank>')}{hint}"
        )
    return list(dict.fromkeys(files))


def describe(path: Path) -> TraceFile:
    """Read what stands before the events; the whole file only if the base of its times stands behind them. Of a record,
    read its header.

    Raises:
        InputError: the file is broken, or nothing says which rank it belongs to.
    """
    if RANK_FILE_NAME.match(path.name):
        header = header_of(path)
        begun, run = header.clock.realtime_ns, (header.run_id, header.attempt)
        trace = TraceFile(path, header.rank, header.host, header.world_size, begun, None, begun, {}, run=run)
    else:
        trace = _described_trace(path)
    if not 0 <= trace.rank < WORLD_LIMIT:
        raise InputError(f"{path}: it says that it is rank {trace.rank}; from 0 to {WORLD_LIMIT - 1} is possible")
    if trace.world_size is not None and trace.world_size > WORLD_LIMIT:
        raise InputError(f"{path}: it says that its world has {trace.world_size} ranks; {WORLD_LIMIT} are possible")
    if trace.base_ns is not None and abs(trace.base_ns) >= LARGEST_NS:
        raise InputError(f"{path}: its times begin at {trace.base_ns} ns, which no clock shows")
    return trace


def _described_trace(path: Path) -> TraceFile:
    with scanning(path) as scanner:
        first = next((time_ns(event, path) for event in scanner.events() if "ts" in event), 0)
        head = dict(scanner.head)
    if "baseTimeNanoseconds" not in head or "distributedInfo" not in head:
        with scanning(path) as scanner:
            for _ in scanner.events():
                pass
            head |= scanner.tail

    def value(key: str, kind: type) -> Any:
        if key not in head:
            return None
        try:
            content = msgspec.json.decode(head[key])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InputError(f"{path}: its {key} is not JSON that can be used: {error}") from error
        return content if isinstance(content, kind) and not isinstance(content, bool) else None

    info = value("distributedInfo", dict) or {}
    rank, world, base_ns = (
        info.get("rank", value("global_rank", int)),
        info.get("world_size"),
        value("baseTimeNanoseconds", int),
    )
    if type(rank) is not int:
        names = ranks_in_path(f"{path.parent.name}/{path.name}")  # folders further up are not the rank's own
        if len(names) != 1:
            ranks = f"several ranks ({', '.join(map(str, sorted(names)))})" if names else "no rank<N>"
            raise InputError(
                f"{path}: which rank is this? It has no distributedInfo.rank and {ranks} in its name; rename it"
            )
        (rank,) = names
    clock = decode(head[TRACE_KEY], str(path), f"the {TRACE_KEY}") if TRACE_KEY in head else None
    return TraceFile(
        path,
        rank,
        value("host_name", str),
        world if type(world) is int else None,
        base_ns,
        value("trace_id", str),
        (base_ns or 0) + first,
        head,
        clock=clock,
        run=(clock.run_id, clock.attempt) if clock is not None else None,
    )


def time_ns(event: Event, path: Path) -> int:
    """Return the `ts` of an event in nanoseconds."""
    try:
        return ns_of_value(bytes(event["ts"]))
    except ValueError as error:
        raise InputError(f"{path}: not a trace event: its ts: {error}") from error


def choose(traces: Sequence[TraceFile], window: str | None, notes: list[str]) -> list[TraceFile]:
    """Choose one trace per rank, or the windows asked for, ordered by rank and time.

    Args:
        window: None = each rank must have just one; "all"; or a number, counted from 0 in order of time.

    Raises:
        InputError: a rank has several traces and no window was given, or the window does not exist.
    """
    chosen: list[TraceFile] = []
    for rank in sorted({trace.rank for trace in traces}):
        captures: list[TraceFile] = []
        for trace in sorted((t for t in traces if t.rank == rank), key=lambda t: t.start_ns):
            twin = next((t for t in captures if t.trace_id is not None and t.trace_id == trace.trace_id), None)
            if twin is None:
                captures.append(trace)
            else:
                notes.append(f"{trace.path}: left out: the same capture as {twin.path} (trace_id {trace.trace_id})")
        paths = ", ".join(str(trace.path) for trace in captures)
        if len(captures) > 1 and captures[0].is_record:
            raise InputError(f"rank {rank} has {len(captures)} records: {paths}; give the folder of one run")
        if window is None and len(captures) > 1:
            raise InputError(
                f"rank {rank} has {len(captures)} traces: {paths}; give one, or --window all, or --window N (from 0, "
                "in order of time)"
            )
        if window is not None and window != "all":
            if int(window) >= len(captures):
                raise InputError(f"--window {window}: rank {rank} has {len(captures)} trace(s), numbered from 0")
            captures = [captures[int(window)]]
        chosen += [replace(trace, window=number) for number, trace in enumerate(captures)]
    return chosen


def record_of(trace: TraceFile, folders: Sequence[Path]) -> Path | None:
    """Return the record of the trace's rank: the nearest to it or in `folders`, of the trace's own run where it names
    one, be it in the history of a run that was resumed; None where there is none.
    """
    if trace.is_record:
        return trace.path
    name = RANK_FILE.format(rank=trace.rank)
    near = [path for folder in (*folders_above(trace), *folders) if (path := folder / name).is_file()]
    for path in (*near, *(past / name for past in folders_moved(trace, folders))):
        try:
            header = header_of(path)
        except InputError:
            continue
        if trace.run == (header.run_id, header.attempt):
            return path
    return next(iter(near), None)


def folders_above(trace: TraceFile) -> list[Path]:
    """Return the folders in which the files of a trace's run may lie, the nearest first."""
    return list(trace.path.absolute().parents)[: 1 if trace.is_record else _FOLDERS_ABOVE]


def folders_moved(trace: TraceFile, folders: Sequence[Path]) -> list[Path]:
    """Return where a resumed run has moved the files of a trace's run."""
    return [
        past for folder in (*folders_above(trace), *folders) if trace.run for past in in_history(folder, *trace.run)
    ]
