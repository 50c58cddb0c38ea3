"""Turns one rank's record into tracks, beside its trace or by themselves, and checks causality across ranks.

Two parts. *Tracks*: steps, ranges of the caller, passes of blocks, active lanes (pipeline bubbles too), stalls, waits,
other work, copies, every collective, and samples of the device. Reads `rank_<rank>_metrics.jsonl` line by line, yields
begin and end events on threads of a separate process (complete events, `ph` X, remain those of the traces), and
collects the collectives. *Check*: takes these of every rank (and RPC calls with what they ran elsewhere), on one clock
with error bounds, and reports what was checked and every effect that precedes its cause by more than the error.

Must not: hold a whole record, or call a pair checked whose bound is unknown without saying so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from aorta.analysis.groups import Groups
from aorta.analysis.load.chrome_json import ns_as_text
from aorta.analysis.merge.alignment import RankAlignment
from aorta.analysis.merge.trace_writer import PIDS_PER_RANK, TIDS_PER_RANK, named_process, named_thread
from aorta.records.clocks import WallTime
from aorta.records.record_file import stream
from aorta.records.schema import Anchor, Footer, Header, Step
from aorta.timeline.classes import LOCKSTEP
from aorta.timeline.intervals import merge

CATEGORY: Final = "aorta"
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
    about: dict[str, Any] | None = None


@dataclass
class RecordTracks:
    """What one record contributes to a merge. `events` must be exhausted before the other attributes are read."""

    path: Path
    rank: int
    alignment: RankAlignment
    span_ns: tuple[int, int] | None
    """First and last instant of the rank's trace, on the reference clock; steps outside are left out. None: all are
    in it."""
    label: str
    base_ns: int
    groups: dict[str, list[int]] = field(default_factory=dict)
    collectives: list[MergedCollective] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    steps: int = 0
    bound_ns: int | None = 0
    """Largest error of a time, between the ends of its steps; None where it was not measured."""

    def __post_init__(self) -> None:
        self._tids: dict[str, int] = {}
        self._pid = (self.rank + 1) * PIDS_PER_RANK + PIDS_PER_RANK - 1
        self._lane_ends: dict[str, list[int]] = {}

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of all steps that touch the span.

        Raises:
            InputError: the record cannot be read.
        """
        readings = []
        for line in stream(self.path, []):
            if isinstance(line, Header | Anchor | Footer):
                readings.append(line.clock)
            if isinstance(line, Footer):
                self.groups = line.groups
        if not readings:
            self.problems.append(f"{self.path}: no header; its tracks are left out")
            return
        wall = WallTime(readings)
        lanes: tuple[str, ...] = ()
        for line in stream(self.path, self.problems):
            if isinstance(line, Header):
                lanes = line.lanes
            elif isinstance(line, Step):
                yield from self._step(line, lanes, wall)
        if self.steps:
            yield from named_process(self._pid, f"{self.label}: AORTA record")
            for order, (name, tid) in enumerate(sorted(self._tids.items(), key=lambda item: _track_order(item[0]))):
                yield from named_thread(self._pid, tid, name, order)

    def _step(self, step: Step, lanes: tuple[str, ...], wall: WallTime) -> Iterator[dict[str, Any]]:
        origin = step.start_mono_ns

        def at(offset_ns: int) -> int:
            return self.alignment.to_reference(wall.realtime_ns(origin + offset_ns))

        def bound(offset_ns: int) -> int | None:
            clocks = self.alignment.bound_ns(wall.realtime_ns(origin + offset_ns))
            return None if clocks is None else clocks + wall.uncertainty_ns

        length = step.end_mono_ns - origin
        if self.span_ns is not None and (at(length) < self.span_ns[0] or at(0) > self.span_ns[1]):
            return
        self.steps += 1
        bounds = self.bound_ns, bound(0), bound(length)
        self.bound_ns = None if None in bounds else max(bounds)  # type: ignore[type-var]
        for row in step.collectives:
            end_ns, end_bound_ns = (None if row.end_ns is None else of(row.end_ns) for of in (at, bound))
            self.collectives.append(
                MergedCollective(
                    row.kind, row.group, row.seq, at(row.issue_ns), end_ns, bound(row.issue_ns), end_bound_ns
                )
            )
        for each in sorted(_slices(step, lanes), key=lambda each: each.begin_ns):
            begin, end = at(each.begin_ns), max(at(each.begin_ns), at(each.end_ns))
            track = self._free_lane(each.track, begin, end)
            tid = self._tids.setdefault(track, (self.rank + 1) * TIDS_PER_RANK + TIDS_PER_RANK - 1 - len(self._tids))
            common = {"cat": CATEGORY, "pid": self._pid, "tid": tid, "name": each.name}
            yield {"ph": "B", **common, "ts": self._us(begin), **({"args": each.about} if each.about else {})}
            yield {"ph": "E", **common, "ts": self._us(end)}
        for sample in step.device or ():
            instant = self._us(at((sample.start_mono_ns + sample.end_mono_ns) // 2 - origin))
            for name in _COUNTERS:
                if (value := getattr(sample, name)) is not None:
                    counter = {"ph": "C", "cat": CATEGORY, "pid": self._pid, "name": name, "ts": instant}
                    yield {**counter, "args": {name: value}}

    def _free_lane(self, track: str, begin: int, end: int) -> str:
        """Return the first thread of the track that is free at `begin`: what is on a track may overlap, slices of a
        thread may not.
        """
        ends = self._lane_ends.setdefault(track, [])
        for lane, until in enumerate(ends):
            if until <= begin:
                ends[lane] = end
                break
        else:
            lane = len(ends)
            ends.append(end)
        return track if not lane else f"{track} ({lane + 1})"

    def _us(self, instant_ns: int) -> msgspec.Raw:
        return msgspec.Raw(ns_as_text(instant_ns - self.base_ns))


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
        for first, last in merge(
            (part.start_ns, part.end_ns) for part in step.active_segments if part.lanes >> bit & 1
        ):
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
            about = {"seq": row.seq, "group": row.group, "bytes": row.bytes, "queued_us": queued_us}
            yield _Slice(f"collectives {row.group}", f"{row.kind}#{row.seq}", row.start_ns, row.end_ns, about)


def _track_order(name: str) -> tuple[int, str]:
    for order, prefix in enumerate(_TRACKS):
        if name.startswith(prefix):
            return order, name
    return len(_TRACKS), name


_SHOWN: Final = 5


@dataclass(frozen=True)
class Violation:
    """One violation, described by `what`. The effect came `lead_ns` early, of which the clocks can explain at most
    `allowed_ns`.
    """

    what: str
    lead_ns: int
    allowed_ns: int


@dataclass
class Causality:
    """Result of a check. `unknown_bounds` counts pairs whose bound was taken as 0 because it was never measured."""

    pairs: int = 0
    unknown_bounds: int = 0
    worst_lead_ns: int | None = None
    violations: list[Violation] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)

    def check(self, what: str, lead_ns: int, bounds: Iterable[int | None]) -> None:
        """Check one pair of cause and effect. The effect appears `lead_ns` before its cause (negative: after it)."""
        self.pairs += 1
        known = list(bounds)
        self.unknown_bounds += None in known
        allowed = sum(bound or 0 for bound in known)
        self.worst_lead_ns = lead_ns if self.worst_lead_ns is None else max(self.worst_lead_ns, lead_ns)
        if lead_ns > allowed:
            self.violations.append(Violation(what, lead_ns, allowed))

    def lines(self) -> list[str]:
        """Return the result and the worst violations, as text."""
        if not self.pairs:
            why = "; ".join(f"{reason} ({count})" for reason, count in self.skipped.items())
            return [f"causality: nothing to check{': ' + why if why else ''}"]
        found = f"{len(self.violations)} violation(s)" if self.violations else "no violation"
        text = [f"causality: {self.pairs} pairs of cause and effect, {found}"]
        if self.unknown_bounds:
            text.append(f"causality: the bound of {self.unknown_bounds} pairs is unknown and was taken as 0")
        worst = sorted(self.violations, key=lambda violation: violation.allowed_ns - violation.lead_ns)
        text += [
            f"  {v.what}: {v.lead_ns / 1e3:.1f} us too early, bound {v.allowed_ns / 1e3:.1f} us" for v in worst[:_SHOWN]
        ]
        text += [f"causality: not checked: {reason} ({count})" for reason, count in self.skipped.items()]
        return text

    def as_json(self) -> dict[str, Any]:
        """Return the result as it is stored in the merged file."""
        return {
            "pairs": self.pairs,
            "violations": len(self.violations),
            "unknown_bounds": self.unknown_bounds,
            "worst_lead_ns": self.worst_lead_ns,
            "not_checked": self.skipped,
        }


def check_collectives(
    result: Causality,
    seen: Mapping[int, Sequence[MergedCollective]],
    groups: Mapping[int, Mapping[str, Sequence[int]]],
) -> None:
    """Check that no rank ends a collective that waits for all ranks before the last of them has issued it.

    Collectives are matched by group, its members (from the footers), kind and sequence number. Kinds that a rank may
    end early are skipped: `timeline.classes.LOCKSTEP` names the others.
    """
    names: dict[tuple[str, tuple[int, ...], str], int] = {}
    rows: list[tuple[int, int, int, MergedCollective]] = []  # rank, number of the name, sequence number
    skipped: defaultdict[str, int] = defaultdict(int)
    for rank in sorted(seen):
        for row in seen[rank]:
            members = groups.get(rank, {}).get(row.group)
            if row.kind not in LOCKSTEP:
                skipped["a rank may end this kind before the others begin"] += 1
            elif members is None:
                skipped["the group's ranks are not in the record (no footer)"] += 1
            elif len(members) > 1:
                name = names.setdefault((row.group, tuple(sorted(members)), row.kind), len(names))
                rows.append((rank, name, row.seq, row))
    named = list(names)
    ranks, name_of, seq_of = (np.array([row[place] for row in rows], np.int64) for place in range(3))
    by = Groups(name_of, seq_of)
    size = np.array([len(members) for _, members, _ in named], np.int64)[name_of[by.first]]
    complete = (by.distinct(ranks) == size) & (by.sizes == size)
    for number, mine in enumerate(by.parts(np.arange(len(rows)))):
        if not complete[number]:
            skipped["not seen on every rank of its group"] += 1
            continue
        group, _, kind = named[rows[mine[0]][1]]
        of_rank = {rows[at][0]: rows[at][3] for at in mine.tolist()}
        _, cause = max((row.issue_ns, rank) for rank, row in of_rank.items())
        for rank, row in of_rank.items():
            if rank == cause or row.end_ns is None:
                continue
            result.check(
                f"{kind}#{row.seq} of group {group}: rank {rank} ends before rank {cause} begins",
                of_rank[cause].issue_ns - row.end_ns,
                (of_rank[cause].issue_bound_ns, row.end_bound_ns),
            )
    for reason, count in skipped.items():
        result.skipped[reason] = result.skipped.get(reason, 0) + count
