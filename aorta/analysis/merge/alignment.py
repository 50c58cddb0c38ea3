"""Converts times of one rank's trace or record to the clock of the reference rank.

Takes absolute Unix nanoseconds of a rank and what `clock_sync.json`, or else the trace itself, says about its clock;
gives integer nanoseconds and a bound on their error. Must not: put an absolute time through a float (W14), or silently
align by another method than the one asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from aorta.analysis.load.chrome_json import Event, ns_as_text, ns_of_value
from aorta.analysis.merge.trace_choice import TraceFile, scanning, time_ns
from aorta.errors import InputError
from aorta.records.clocks import CLOCK_SYNC_FILE, ClockSync, RankClock, read_clock_sync
from aorta.records.record_file import header_of
from aorta.records.run_files import RANK_FILE, in_history

Align: TypeAlias = Literal["clock", "none", "start_profile"]
_FOLDERS_ABOVE = 4
"""A trace lies in `torch_profiler/rank<N>/` of its run, at most this many folders below the run's own."""
_STARTS = (b'"__start_profile"', b'"Iteration Start: PyTorch Profiler"', b'"PyTorch Profiler (0)"')
"""Events that mark the start of a profiler: torch's legacy profiler, and Kineto's two."""


class RankAlignment:
    """Aligns one rank's clock with the reference.

    Args:
        clock: what was measured of the rank's clock; None = nothing.
        align: the method of correction.
        shift_ns: what `start_profile` adds.
        one_host: all ranks ran on one host, whose clock they share: there is nothing to correct.
    """

    def __init__(
        self, rank: int, clock: RankClock | None, align: Align, shift_ns: int = 0, *, one_host: bool = False
    ) -> None:
        self.rank, self.align, self.shift_ns, self.one_host = rank, align, shift_ns, one_host
        self._injected = None if clock is None else clock.injected
        self._clock = clock if clock is not None and clock.known else None

    @property
    def aligned(self) -> bool:
        """Whether times are corrected at all; otherwise the rank stays on its own clock."""
        return self.align == "start_profile" or (self.align == "clock" and (self._clock is not None or self.one_host))

    def to_reference(self, own_ns: int) -> int:
        """Correct `own_ns`, a time of the host's clock. A skew injected for tests (`clock.fake_*`) is applied first."""
        shown = own_ns if self._injected is None else self._injected.shown(own_ns)
        if self.align == "start_profile":
            return shown + self.shift_ns
        if self.align == "none" or self._clock is None:
            return shown
        return self._clock.to_reference(shown)

    def bound_ns(self, own_ns: int) -> int | None:
        """Bound on the error of the clock itself at that time; None if unknown. It does not depend on the method of
        alignment.
        """
        if self._clock is None:
            return None
        return self._clock.bound_ns(own_ns if self._injected is None else self._injected.shown(own_ns))

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
    """What is known of the clocks of a run, and where it stands: a file of the run, or the traces themselves."""

    sync: ClockSync | None = None
    source: Path | Literal["the traces"] | None = None

    def of(self, rank: int) -> RankClock | None:
        """Return what is known of `rank`; None if nothing is."""
        return None if self.sync is None else self.sync.of(rank)

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
    # A folder above a run may hold the file of another run: only the one nearest to a trace belongs to its run.
    near = {trace.path: _nearest(_above(trace)) for trace in traces}
    paths = {path for path in near.values() if path} or {path for folder in folders if (path := _nearest([folder]))}
    files = {path: read_clock_sync(path) for path in sorted(paths)}
    for trace in traces:
        # A resumed run goes on in its folder, and the files of the run that wrote this trace are in the history.
        unknown = trace.run is not None and trace.run not in map(_run, files.values())
        if unknown and (path := _nearest(_moved(trace, folders))) is not None:
            files[path] = read_clock_sync(path)
    runs = {trace.run: trace.path for trace in traces if trace.run is not None}
    runs |= {_run(files[path]): path for trace in traces if trace.run is None and (path := near[trace.path])}
    runs = runs or {_run(sync): path for path, sync in files.items()}
    if len(runs) > 1:
        raise InputError(
            f"traces of {len(runs)} runs: {', '.join(map(str, runs.values()))}; merge those of one run (--window N)"
        )
    for path, sync in files.items():
        if _run(sync) in runs:  # otherwise it was measured in another run than that of the traces
            return KnownClocks(sync, path)
    own = [trace.clock for trace in traces if trace.clock is not None]
    if own:
        ranks = {clock.rank: clock for sync in own for clock in sync.ranks}
        return KnownClocks(own[0].with_ranks(ranks.values()), "the traces")
    return KnownClocks()


def record_of(trace: TraceFile, folders: Sequence[Path]) -> Path | None:
    """Return the record of the trace's rank: the nearest to it or in `folders`, of the trace's own run where it names
    one, be it in the history of a run that was resumed; None where there is none.
    """
    if trace.is_record:
        return trace.path
    name = RANK_FILE.format(rank=trace.rank)
    near = [path for folder in (*_above(trace), *folders) if (path := folder / name).is_file()]
    for path in (*near, *(past / name for past in _moved(trace, folders))):
        try:
            header = header_of(path)
        except InputError:
            continue
        if trace.run == (header.run_id, header.attempt):
            return path
    return next(iter(near), None)


def _above(trace: TraceFile) -> list[Path]:
    """Return the folders in which the files of a trace's run may lie, the nearest first."""
    return list(trace.path.absolute().parents)[: 1 if trace.is_record else _FOLDERS_ABOVE]


def _moved(trace: TraceFile, folders: Sequence[Path]) -> list[Path]:
    """Return where a resumed run has moved the files of a trace's run."""
    return [past for folder in (*_above(trace), *folders) if trace.run for past in in_history(folder, *trace.run)]


def _run(sync: ClockSync) -> tuple[str, int]:
    return sync.run_id, sync.attempt


def _nearest(folders: Sequence[Path]) -> Path | None:
    return next((path for folder in folders if (path := folder / CLOCK_SYNC_FILE).is_file()), None)


def align_ranks(
    traces: Sequence[TraceFile], known: KnownClocks, align: Align, notes: list[str]
) -> dict[int, RankAlignment]:
    """Return rank -> its alignment. What is unknown about a rank is added to `notes`."""
    ranks = sorted({trace.rank for trace in traces})
    clocks = {rank: known.of(rank) for rank in ranks}
    if align == "start_profile":
        shifts = _start_shifts(traces, clocks)
        notes.append("aligned by the starts of the profilers, which does not account for skew (--align clock does)")
        return {rank: RankAlignment(rank, clocks[rank], align, shifts[rank]) for rank in ranks}
    if align == "none":
        notes.append("not aligned: every rank is on its own clock (--align clock corrects them)")
    elif known.sync is None and (host := _one_host(traces)) is not None:
        notes.append(
            f"no {CLOCK_SYNC_FILE} beside the traces, but all ranks ran on {host} and share its clock: nothing to "
            "correct, bound unknown"
        )
        return {rank: RankAlignment(rank, None, align, one_host=True) for rank in ranks}
    elif len(ranks) > 1:
        unmeasured = [rank for rank, clock in clocks.items() if clock is None or not clock.known]
        if known.sync is None:
            notes.append(
                f"not aligned: no {CLOCK_SYNC_FILE} beside the traces, and none in them: every rank keeps its own "
                "clock, bound unknown"
            )
        elif unmeasured:
            notes.append(f"rank {', '.join(map(str, unmeasured))}: clock not measured, not corrected; bound unknown")
        once = [c for c in clocks.values() if c is not None and c.known and c.worst_bound_ns() is None]
        notes += [_measured_once(clock, known) for clock in once]
    for rank, clock in clocks.items():
        if clock is not None and clock.injected is not None:
            notes.append(
                f"INJECTED CLOCK SKEW on rank {rank}: {clock.injected.offset_ns} ns and {clock.injected.drift_ppm} ppm"
            )
    return {rank: RankAlignment(rank, clocks[rank], align) for rank in ranks}


def _one_host(traces: Sequence[TraceFile]) -> str | None:
    """Return the host that traces of several ranks name; None where they name several, none, or a generic one."""
    hosts = {trace.host for trace in traces}
    host = hosts.pop() if len(hosts) == 1 and len({trace.rank for trace in traces}) > 1 else None
    return host if host not in ("", "localhost", "(none)") else None


def describe_alignment(align: Align, alignments: Mapping[int, RankAlignment]) -> str:
    """Return by what the ranks are aligned, and which are not."""
    if not any(rank.aligned for rank in alignments.values()):
        return "not aligned: every rank on its own clock"
    left = [str(rank) for rank, alignment in alignments.items() if not alignment.aligned]
    return f"aligned by {align}" + (f", but rank {', '.join(left)} not aligned" if left else "")


def _measured_once(clock: RankClock, known: KnownClocks) -> str:
    why = clock.reason
    if why is None:
        why = "at the start of the run"
        if known.source == "the traces":
            why += f"; its {CLOCK_SYNC_FILE} may have the second measurement"
    return f"rank {clock.rank}: offset measured once only, no drift, bound unknown ({why})"


def _start_shifts(traces: Sequence[TraceFile], clocks: Mapping[int, RankClock | None]) -> dict[int, int]:
    """Return rank -> the shift that makes its first profiler start together with the lowest rank's."""
    starts: dict[int, int] = {}
    for trace in traces:
        raw = RankAlignment(trace.rank, clocks[trace.rank], "none")
        begin = raw.to_reference(_start_of(trace))
        starts[trace.rank] = min(begin, starts.get(trace.rank, begin))
    reference = starts[min(starts)]
    return {rank: reference - start for rank, start in starts.items()}


def _start_of(trace: TraceFile) -> int:
    """Return when the profiler began: the time of its own mark, or of the earliest event."""
    earliest = None
    with scanning(trace.path) as scanner:
        for event in scanner.events():
            if "ts" not in event or bytes(event.get("ph", b"")) == b'"M"':
                continue
            begin = (trace.base_ns or 0) + time_ns(event, "ts", trace.path)
            if bytes(event.get("name", b"")) in _STARTS:
                return begin
            earliest = begin if earliest is None else min(earliest, begin)
    return (trace.base_ns or 0) if earliest is None else earliest
