"""Converts times of traces and records to the clock of the reference rank.

Times are absolute Unix nanoseconds of a rank; what `clock_sync.json`, or else the trace itself, says about its clock
gives the correction and a bound on its error. Must not: put an absolute time through a float (W14), or silently align
by another method than the one asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from aorta.errors import InputError
from aorta.merge.sources import TraceFile, folders_above, folders_moved, scanning, time_ns
from aorta.read.traces.chrome_json import Event, ns_as_text, ns_of_value
from aorta.records.clocks import CLOCK_SYNC_FILE, ClockSync, RankClock, read_clock_sync

Align: TypeAlias = Literal["clock", "none", "start_profile"]
_STARTS: Final = (b'"__start_profile"', b'"Iteration Start: PyTorch Profiler"', b'"PyTorch Profiler (0)"')
"""Events that mark the start of a profiler: torch's legacy profiler, and Kineto's two."""


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
        self.one_host = one_host
        self._align, self._shift_ns = align, shift_ns
        self._injected = None if clock is None else clock.injected
        self._clock = clock if clock is not None and clock.known else None
        self.aligned = align == "start_profile" or (align == "clock" and (self._clock is not None or one_host))

    def to_reference(self, own_ns: int) -> int:
        """Correct `own_ns`, a time of the host's clock. A skew injected for tests (`clock.fake_*`) is applied first."""
        shown = own_ns if self._injected is None else self._injected.shown(own_ns)
        if self._align == "start_profile":
            return shown + self._shift_ns
        if self._align == "none" or self._clock is None:
            return shown
        return self._clock.to_reference(shown)

    def bound_ns(self, own_ns: int) -> int | None:
        """Bound on the error of the clock itself at that time, by whatever method it is aligned; None if unknown."""
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
    """Clock measurements of a run, and their source: a file of the run, or the traces themselves."""

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
    clocks = {rank: known.of(rank) for rank in ranks}
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
