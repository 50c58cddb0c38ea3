"""Finds the traces in folders and files, and the rank, window and clock base of each; where there is no trace, records.

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

from aorta.analysis.load.chrome_json import LARGEST_NS, Event, NoEventArray, RawEvents, ns_of_value
from aorta.analysis.load.open import is_tar, members, opened
from aorta.analysis.load.trace_source import ranks_in_path
from aorta.errors import InputError
from aorta.records.clocks import CLOCK_SYNC_FILE, TRACE_KEY, ClockSync, decode
from aorta.records.record_file import header_of
from aorta.records.run_files import (
    HISTORY_DIR,
    MANIFEST_FILE,
    RANK_FILE,
    RANK_FILE_NAME,
    RPC_FILE,
    TRACE_FILE,
    rank_files,
)
from aorta.records.schema import WORLD_LIMIT

SUFFIXES: Final = (".json", ".json.gz", ".tar.gz", ".tgz")
_NOT_TRACES = frozenset({MANIFEST_FILE, CLOCK_SYNC_FILE, RPC_FILE, TRACE_FILE, "summary.json"})
_LEFT_OUT = frozenset({HISTORY_DIR, "checkpoints", "logs"})


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
    place = str(path)
    with opened(place) as stream:
        if not is_tar(stream.head()):
            yield RawEvents(stream, place)
            return
        found = False
        for where, content in members(stream, place):
            if not where.endswith(".json"):
                continue
            if found:
                raise InputError(f"{path}: several .json files in one archive, {where} too; give one trace a file")
            found = True
            yield RawEvents(content, where)
            if content.read(1):
                return  # the caller stopped early: do not read on to what follows
        if not found:
            raise InputError(f"{path}: there is no .json file in this archive")


def find_files(paths: Sequence[Path], notes: list[str]) -> list[Path]:
    """List the traces given or found, in order; of folders without any trace the records. Other JSON files in a folder
    are left out with a note.

    Raises:
        InputError: a path does not exist, a file has another extension, or there is neither trace nor record.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = [
                file
                for file in sorted(path.rglob("*"))
                if file.name.endswith(SUFFIXES)
                and file.name not in _NOT_TRACES
                and not _LEFT_OUT & set(file.relative_to(path).parts[:-1])
                and file.is_file()
            ]
            found += [file for file in inside if _is_trace(file, notes)]
        elif not path.exists():
            raise InputError(f"{path}: no such file or folder")
        elif not path.name.endswith(SUFFIXES) and not RANK_FILE_NAME.match(path.name):
            raise InputError(f"{path}: a trace ends in {', '.join(SUFFIXES)}")
        else:
            found.append(path)
    found = found or [record for path in paths for record in rank_files(path)]
    if not found:
        raise InputError(
            f"neither trace nor record in {', '.join(map(str, paths))}: expected {', '.join(SUFFIXES)} files of "
            f"torch.profiler, or {RANK_FILE.format(rank='<rank>')}"
        )
    return list(dict.fromkeys(found))


def _is_trace(path: Path, notes: list[str]) -> bool:
    """Return whether a file found in a folder is a trace. A file that is not JSON at all is kept, and reported as a
    broken trace later.
    """
    try:
        with scanning(path):
            return True
    except NoEventArray:
        notes.append(f"{path}: left out: JSON, but no trace")
        return False


def describe(path: Path) -> TraceFile:
    """Read what stands before the events; the whole file only if the base of its times stands behind them. Of a record,
    read its header.

    Raises:
        InputError: the file is broken, or nothing says which rank it belongs to.
    """
    found = _described_record(path) if RANK_FILE_NAME.match(path.name) else _described_trace(path)
    if not 0 <= found.rank < WORLD_LIMIT:
        raise InputError(f"{path}: it says that it is rank {found.rank}; from 0 to {WORLD_LIMIT - 1} is possible")
    if found.world_size is not None and found.world_size > WORLD_LIMIT:
        raise InputError(f"{path}: it says that its world has {found.world_size} ranks; {WORLD_LIMIT} are possible")
    if found.base_ns is not None and abs(found.base_ns) >= LARGEST_NS:
        raise InputError(f"{path}: its times begin at {found.base_ns} ns, which no clock shows")
    return found


def _described_record(path: Path) -> TraceFile:
    header = header_of(path)
    begun, run = header.clock.realtime_ns, (header.run_id, header.attempt)
    return TraceFile(path, header.rank, header.host, header.world_size, begun, None, begun, {}, run=run)


def _described_trace(path: Path) -> TraceFile:
    with scanning(path) as scanner:
        first = next((time_ns(event, "ts", path) for event in scanner.events() if "ts" in event), 0)
        head = dict(scanner.head)
    if "baseTimeNanoseconds" not in head or "distributedInfo" not in head:
        with scanning(path) as scanner:
            for _ in scanner.events():
                pass
            head |= scanner.tail
    info = _value(head, "distributedInfo", dict, path) or {}
    rank = info.get("rank", _value(head, "global_rank", int, path))
    if type(rank) is not int:
        names = ranks_in_path(f"{path.parent.name}/{path.name}")  # folders further up are not the rank's own
        if len(names) != 1:
            said = f"several ranks ({', '.join(map(str, sorted(names)))})" if names else "no rank<N>"
            raise InputError(
                f"{path}: which rank is this? It has no distributedInfo.rank and {said} in its name; rename it"
            )
        (rank,) = names
    world, base_ns = info.get("world_size"), _value(head, "baseTimeNanoseconds", int, path)
    clock = decode(head[TRACE_KEY], str(path), f"the {TRACE_KEY}") if TRACE_KEY in head else None
    return TraceFile(
        path,
        rank,
        _value(head, "host_name", str, path),
        world if type(world) is int else None,
        base_ns,
        _value(head, "trace_id", str, path),
        (base_ns or 0) + first,
        head,
        clock=clock,
        run=(clock.run_id, clock.attempt) if clock is not None else None,
    )


def time_ns(event: Event, key: str, path: Path) -> int:
    """Return `event[key]` in nanoseconds.

    Raises:
        InputError: it is not a number; names the file.
    """
    try:
        return ns_of_value(bytes(event[key]))
    except ValueError as error:
        raise InputError(f"{path}: not a trace event: its {key}: {error}") from error


def _value(head: dict[str, msgspec.Raw], key: str, kind: type, path: Path) -> Any:
    if key not in head:
        return None
    try:
        value = msgspec.json.decode(head[key])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path}: its {key} is not JSON that can be used: {error}") from error
    return value if isinstance(value, kind) and not isinstance(value, bool) else None


def choose(traces: Sequence[TraceFile], window: str | None, notes: list[str]) -> list[TraceFile]:
    """Choose one trace per rank, or the windows asked for, ordered by rank and time.

    Args:
        window: None = each rank must have just one; "all"; or a number, counted from 0 in order of time.

    Raises:
        InputError: a rank has several traces and no window was given, or the window does not exist.
    """
    chosen: list[TraceFile] = []
    for rank in sorted({trace.rank for trace in traces}):
        mine: list[TraceFile] = []
        for trace in sorted((t for t in traces if t.rank == rank), key=lambda t: t.start_ns):
            twin = next((t for t in mine if t.trace_id is not None and t.trace_id == trace.trace_id), None)
            if twin is None:
                mine.append(trace)
            else:
                notes.append(f"{trace.path}: left out: the same capture as {twin.path} (trace_id {trace.trace_id})")
        if len(mine) > 1 and mine[0].is_record:
            places = ", ".join(str(trace.path) for trace in mine)
            raise InputError(f"rank {rank} has {len(mine)} records: {places}; give the folder of one run")
        if window is None and len(mine) > 1:
            raise InputError(
                f"rank {rank} has {len(mine)} traces: {', '.join(str(t.path) for t in mine)}; give one, or --window "
                "all, or --window N (from 0, in order of time)"
            )
        if window is not None and window != "all":
            if int(window) >= len(mine):
                raise InputError(f"--window {window}: rank {rank} has {len(mine)} trace(s), numbered from 0")
            mine = [mine[int(window)]]
        chosen += [replace(trace, window=number) for number, trace in enumerate(mine)]
    return chosen
