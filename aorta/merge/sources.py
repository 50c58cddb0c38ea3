"""Finds the traces to merge, or records where there is no trace, and the clock that each rank's times are on.

Accepts `.json`, `.json.gz` and `.tar.gz`/`.tgz` (one JSON file inside), or folders with them. Times are absolute Unix
nanoseconds of a rank; what `clock_sync.json`, or else the trace itself, says about its clock gives the correction to
that of the reference rank and a bound on its error. Must not: unpack to disk, choose silently between two traces of one
rank, put an absolute time through a float (W14), or silently align by another method than the one asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec

from aorta.errors import InputError
from aorta.read.traces.chrome_json import LARGEST_NS, Event, NoEventArray, RawEvents, ns_as_text, ns_of_value
from aorta.read.traces.open import is_tar, members, opened
from aorta.read.traces.reader import ranks_in_path
from aorta.records.clocks import CLOCK_SYNC_FILE, TRACE_KEY, ClockSync, RankClock, decode, read_clock_sync
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
Align: TypeAlias = Literal["clock", "none", "start_profile"]
_STARTS: Final = (b'"__start_profile"', b'"Iteration Start: PyTorch Profiler"', b'"PyTorch Profiler (0)"')
"""Events that mark the start of a profiler: torch's legacy profiler, and Kineto's two."""


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
    rank, world = info.get("rank", value("global_rank", int)), info.get("world_size")
    base_ns = value("baseTimeNanoseconds", int)
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


class RankAlignment:
    """Aligns one rank's clock with the reference.

    Args:
        clock: what was measured of the rank's clock; None = nothing.
        align: the method of correction.
        shift_ns: what `start_profile` adds.
        one_host: all ranks ran on one host, whose clock they share: there is nothing to correct.

    Attributes:
        aligned: whether times are corrected at all; otherwise the rank stays on its own clock.
    """

    def __init__(self, clock: RankClock | None, align: Align, shift_ns: int = 0, *, one_host: bool = False) -> None:
        self.clock, self.one_host = clock, one_host
        self._align, self._shift_ns = align, shift_ns
        self._known = clock if clock is not None and clock.known else None
        self.aligned = align == "start_profile" or (align == "clock" and (self._known is not None or one_host))

    def to_reference(self, own_ns: int) -> int:
        """Correct `own_ns`, a time of the host's clock. A skew injected for tests (`clock.fake_*`) is applied first."""
        shown = own_ns if self.clock is None else self.clock.shown_ns(own_ns)
        if self._align == "start_profile":
            return shown + self._shift_ns
        return shown if self._align == "none" or self._known is None else self._known.to_reference(shown)

    def bound_ns(self, own_ns: int) -> int | None:
        """Bound on the error of the clock itself at that time, by whatever method it is aligned; None if unknown."""
        return None if self._known is None else self._known.bound_ns(self._known.shown_ns(own_ns))

    def move(self, event: Event, base_ns: int, new_base_ns: int) -> int | None:
        """Move `event` to the reference clock, in place. Both ends are corrected and the duration is their distance, so
        that nested events stay nested.

        Returns:
            Its absolute start on the reference clock; None without a `ts`.
        """
        if "ts" not in event:
            return None
        begin = base_ns + ns_of_value(bytes(event["ts"]))
        moved = self.to_reference(begin)
        event["ts"] = type(event["ts"])(ns_as_text(moved - new_base_ns))
        if "dur" in event:
            end = self.to_reference(begin + ns_of_value(bytes(event["dur"])))
            event["dur"] = type(event["dur"])(ns_as_text(end - moved))
        return moved


@dataclass(frozen=True)
class KnownClocks:
    """Clock measurements of a run, and their source: a file of the run, or the traces themselves."""

    sync: ClockSync | None = None
    source: Path | Literal["the traces"] | None = None

    def as_json(self, align: Align, alignments: Mapping[int, RankAlignment]) -> dict[str, object]:
        """Return what the merged trace says about clocks."""
        return {
            "align": align,
            "aligned": all(rank.aligned for rank in alignments.values()),
            "not_aligned_ranks": [rank for rank, alignment in alignments.items() if not alignment.aligned],
            "source": None if self.source is None else str(self.source),
            **({"ranks": None} if self.sync is None else self.sync.summary()),
        }


def find_clocks(given: Path | None, traces: Sequence[TraceFile], folders: Sequence[Path]) -> KnownClocks:
    """Find the clocks of the traces' run: the given file, else that of the run in which the traces lie, else what the
    traces say. The file comes first because it also holds the measurement at the run's end.

    Raises:
        InputError: it cannot be read, or the traces belong to two runs.
    """
    if given is not None:
        return KnownClocks(read_clock_sync(given), given)

    def nearest(folders: Sequence[Path]) -> Path | None:
        return next((path for folder in folders if (path := folder / CLOCK_SYNC_FILE).is_file()), None)

    def run_of(sync: ClockSync) -> tuple[str, int]:
        return sync.run_id, sync.attempt

    # A folder above a run may hold the file of another run: only the one nearest to a trace belongs to its run.
    near = {trace.path: nearest(folders_above(trace)) for trace in traces}
    paths = {path for path in near.values() if path} or {path for folder in folders if (path := nearest([folder]))}
    files = {path: read_clock_sync(path) for path in sorted(paths)}
    for trace in traces:
        # A resumed run goes on in its folder, and the files of the run that wrote this trace are in the history.
        unknown = trace.run is not None and trace.run not in map(run_of, files.values())
        if unknown and (path := nearest(folders_moved(trace, folders))) is not None:
            files[path] = read_clock_sync(path)
    runs = {trace.run: trace.path for trace in traces if trace.run is not None}
    runs |= {run_of(files[path]): path for trace in traces if trace.run is None and (path := near[trace.path])}
    runs = runs or {run_of(sync): path for path, sync in files.items()}
    if len(runs) > 1:
        raise InputError(
            f"traces of {len(runs)} runs: {', '.join(map(str, runs.values()))}; merge those of one run (--window N)"
        )
    for path, sync in files.items():
        if run_of(sync) in runs:  # otherwise it was measured in another run than that of the traces
            return KnownClocks(sync, path)
    own = [trace.clock for trace in traces if trace.clock is not None]
    if own:
        ranks = {clock.rank: clock for sync in own for clock in sync.ranks}
        return KnownClocks(own[0].with_ranks(ranks.values()), "the traces")
    return KnownClocks()


def align_ranks(
    traces: Sequence[TraceFile], known: KnownClocks, align: Align, notes: list[str]
) -> dict[int, RankAlignment]:
    """Return rank -> its alignment. What is unknown about a rank is added to `notes`."""
    ranks = sorted({trace.rank for trace in traces})
    clocks = {rank: None if known.sync is None else known.sync.of(rank) for rank in ranks}
    hosts, shifts, one_host = {trace.host for trace in traces}, dict.fromkeys(ranks, 0), False
    if align == "start_profile":
        starts: dict[int, int] = {}
        for trace in traces:
            begin = RankAlignment(clocks[trace.rank], "none").to_reference(_start_of(trace))
            starts[trace.rank] = min(begin, starts.get(trace.rank, begin))
        shifts = {rank: starts[ranks[0]] - start for rank, start in starts.items()}
        notes.append("aligned by the starts of the profilers, which does not account for skew (--align clock does)")
    elif align == "none":
        notes.append("not aligned: every rank is on its own clock (--align clock corrects them)")
    elif known.sync is None and len(ranks) > 1:
        host = hosts.pop() if len(hosts) == 1 else None
        one_host = host not in (None, "", "localhost", "(none)")
        notes.append(
            f"no {CLOCK_SYNC_FILE} beside the traces, but all ranks ran on {host} and share its clock: nothing to "
            "correct, bound unknown"
            if one_host
            else f"not aligned: no {CLOCK_SYNC_FILE} beside the traces, and none in them: every rank keeps its own "
            "clock, bound unknown"
        )
    elif len(ranks) > 1:
        unmeasured = [str(rank) for rank, clock in clocks.items() if clock is None or not clock.known]
        if unmeasured:
            notes.append(f"rank {', '.join(unmeasured)}: clock not measured, not corrected; bound unknown")
        for rank, clock in clocks.items():
            if clock is not None and clock.known and clock.worst_bound_ns() is None:
                why = clock.reason or "at the start of the run"
                if clock.reason is None and known.source == "the traces":
                    why += f"; its {CLOCK_SYNC_FILE} may have the second measurement"
                notes.append(f"rank {rank}: offset measured once only, no drift, bound unknown ({why})")
    for rank, clock in clocks.items():
        if align != "start_profile" and clock is not None and (skew := clock.injected) is not None:
            notes.append(f"INJECTED CLOCK SKEW on rank {rank}: {skew.offset_ns} ns and {skew.drift_ppm} ppm")
    return {rank: RankAlignment(clocks[rank], align, shifts[rank], one_host=one_host) for rank in ranks}


def describe_alignment(align: Align, alignments: Mapping[int, RankAlignment]) -> str:
    """Return by what the ranks are aligned, and which are not."""
    if not any(rank.aligned for rank in alignments.values()):
        return "not aligned: every rank on its own clock"
    left = [str(rank) for rank, alignment in alignments.items() if not alignment.aligned]
    return f"aligned by {align}" + (f", but rank {', '.join(left)} not aligned" if left else "")


def _start_of(trace: TraceFile) -> int:
    """Return when the profiler began: the time of its own mark, or of the earliest event."""
    earliest = None
    with scanning(trace.path) as scanner:
        for event in scanner.events():
            if "ts" not in event or bytes(event.get("ph", b"")) == b'"M"':
                continue
            begin = (trace.base_ns or 0) + time_ns(event, trace.path)
            if bytes(event.get("name", b"")) in _STARTS:
                return begin
            earliest = begin if earliest is None else min(earliest, begin)
    return (trace.base_ns or 0) if earliest is None else earliest
