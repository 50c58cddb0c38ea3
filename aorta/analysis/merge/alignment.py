"""Converts times of one rank's trace or record to the clock of the reference rank.

Takes absolute Unix nanoseconds of a rank and what `clock_sync.json` says about its clock; gives integer nanoseconds and
a bound on their error. Must not: put an absolute time through a float (W14), or silently align by another method than
the one asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from aorta.analysis.load import microseconds
from aorta.analysis.load.chrome_json import Event
from aorta.analysis.merge.trace_choice import TraceFile, scanning, time_ns
from aorta.errors import InputError
from aorta.records.clock_offsets import CLOCK_SYNC_FILE, ClockSync, RankClock, read_clock_sync

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
    """

    def __init__(self, rank: int, clock: RankClock | None, align: Align, shift_ns: int = 0) -> None:
        self.rank, self.align, self.shift_ns = rank, align, shift_ns
        self._injected = None if clock is None else clock.injected
        self._clock = clock if clock is not None and clock.known else None

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
        begin = base_ns + microseconds.of_value(bytes(event["ts"]))
        moved = self.to_reference(begin)
        event["ts"] = type(event["ts"])(microseconds.as_text(moved - new_base_ns))
        if "dur" in event:
            end = self.to_reference(begin + microseconds.of_value(bytes(event["dur"])))
            event["dur"] = type(event["dur"])(microseconds.as_text(end - moved))
        return moved


def find_clock_sync(given: Path | None, traces: Sequence[TraceFile], folders: Sequence[Path]) -> ClockSync | None:
    """Read the given file, or the one of the run in which the traces lie; None if there is none.

    Raises:
        InputError: it cannot be read, or the traces belong to two runs.
    """
    if given is not None:
        return read_clock_sync(given)
    # A folder above a run may hold the file of another run: only the one nearest to a trace belongs to its run.
    ways = [list(trace.path.absolute().parents)[:_FOLDERS_ABOVE] for trace in traces]
    near = dict.fromkeys(path for way in ways if (path := _nearest(way)) is not None)
    found: dict[tuple[str, int], tuple[Path, ClockSync]] = {}
    for path in near or dict.fromkeys(path for folder in folders if (path := _nearest([folder])) is not None):
        sync = read_clock_sync(path)
        found.setdefault((sync.run_id, sync.attempt), (path, sync))
    if len(found) > 1:
        paths = ", ".join(str(path) for path, _ in found.values())
        raise InputError(f"traces of {len(found)} runs: {paths}; merge those of one run")
    return next(iter(found.values()))[1] if found else None


def _nearest(folders: Sequence[Path]) -> Path | None:
    return next((path for folder in folders if (path := folder / CLOCK_SYNC_FILE).is_file()), None)


def align_ranks(
    traces: Sequence[TraceFile], sync: ClockSync | None, align: Align, notes: list[str]
) -> dict[int, RankAlignment]:
    """Rank -> its alignment. What is unknown about a rank is added to `notes`."""
    ranks = sorted({trace.rank for trace in traces})
    clocks = {rank: None if sync is None else sync.of(rank) for rank in ranks}
    if align == "start_profile":
        shifts = _start_shifts(traces, clocks)
        notes.append("aligned by the starts of the profilers, which does not account for skew (--align clock does)")
        return {rank: RankAlignment(rank, clocks[rank], align, shifts[rank]) for rank in ranks}
    if align == "none":
        notes.append("not aligned: every rank is on its own clock (--align clock corrects them)")
    elif len(ranks) > 1:
        unmeasured = [rank for rank, clock in clocks.items() if clock is None or not clock.known]
        if sync is None:
            notes.append(f"no {CLOCK_SYNC_FILE} beside the traces: every rank stays on its own clock, bound unknown")
        elif unmeasured:
            notes.append(f"rank {', '.join(map(str, unmeasured))}: clock not measured, stays on its own; bound unknown")
        for rank, clock in clocks.items():
            if clock is not None and clock.known and clock.worst_bound_ns() is None:
                notes.append(f"rank {rank}: offset measured once only, no drift, bound unknown ({clock.reason})")
    for rank, clock in clocks.items():
        if clock is not None and clock.injected is not None:
            notes.append(
                f"INJECTED CLOCK SKEW on rank {rank}: {clock.injected.offset_ns} ns and {clock.injected.drift_ppm} ppm"
            )
    return {rank: RankAlignment(rank, clocks[rank], align) for rank in ranks}


def _start_shifts(traces: Sequence[TraceFile], clocks: Mapping[int, RankClock | None]) -> dict[int, int]:
    """Rank -> the shift that makes its first profiler start together with the lowest rank's."""
    starts: dict[int, int] = {}
    for trace in traces:
        raw = RankAlignment(trace.rank, clocks[trace.rank], "none")
        begin = raw.to_reference(_start_of(trace))
        starts[trace.rank] = min(begin, starts.get(trace.rank, begin))
    reference = starts[min(starts)]
    return {rank: reference - start for rank, start in starts.items()}


def _start_of(trace: TraceFile) -> int:
    """When the profiler began: the time of its own mark, or of the earliest event."""
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
