"""The program of a job from the Kineto traces of all its ranks.

What a record says of a host is taken from the device (`traced_rank`). Ranks of one host share its clock; otherwise
collectives tell it: one that no rank leaves before all are there ends on all of them at about the same time, and these
ends say how well the clocks agree.
Steps are cut where the host marked them on each rank. Since a device runs behind its host, that may be between other
collectives on each rank: the cut is moved back until all ranks have the same collectives in a step. Refuses, and says
why, what a replay would have to guess; what it rests on is said in `Facts.flags`. Must not read a record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from aorta.analysis.load.interval_table import NULL
from aorta.analysis.load.kineto.stream_waits import read_order
from aorta.analysis.load.rank_inference import headers_near
from aorta.analysis.load.trace_files import KINETO, find_units, read_unit
from aorta.analysis.load.trace_health import usable
from aorta.analysis.tables import Ints, Members, Run
from aorta.analysis.whatif.program import RunProgram, not_replayable
from aorta.analysis.whatif.program_reader import LEAST_STEPS, ProgramReader
from aorta.analysis.whatif.traced_rank import TracedRank, traced_rank
from aorta.timeline.classes import KINDS, LOCKSTEP

_IDLE_SAID: Final = 0.01
_ELSEWHERE_SAID: Final = 0.05
"""From these parts on, idle time and computation on other streams are said."""
APART: Final = 0.02
"""Ends of one collective on its ranks may lie this part of a step apart, in 95 % of collectives: assumed."""
_Ends: TypeAlias = Sequence[dict[int, int]]
"""Of each collective: rank -> its end."""


def program_of_traces(run: Run, last: int | None = None) -> RunProgram:
    """Return the program of a job whose traces have been read as a run.

    Args:
        last: only the last so many steps; None: all.

    Raises:
        InputError: it cannot be replayed; the message says why.
    """
    _refuse(run)
    groups = {
        rank: {name: tuple(sorted(members)) for name, members in tables.source.groups.items()}
        for rank, tables in sorted(run.ranks.items())
    }
    wanted = _steps(run, last)
    ranks = _ranks(run, wanted)
    first = max(int(each.steps[0]) for each in ranks)
    ranks = [each.since(first) for each in ranks]
    offsets, clock = align_clocks(run.location, ranks, groups)
    edges = _edges(ranks, groups)
    steps = ranks[0].steps
    if len(steps) < LEAST_STEPS:
        raise not_replayable(run.location, f"{len(steps)} step(s) are described on all ranks; it takes {LEAST_STEPS}")
    program = ProgramReader(
        run,
        None,
        steps,
        {each.rank: each.between(edges[each.rank], offsets[each.rank]) for each in ranks},
        arrivals=True,
        groups=sorted({name for known in groups.values() for name in known}),
    ).program()
    lengths = np.stack([each.end_ns - each.begin_ns for each in ranks], axis=1)
    facts = replace(
        program.facts,
        device=run.source.platform,
        arrival_unknown=sum(each.queued(edges[each.rank]) for each in ranks),
        flags=tuple(_flags(ranks, clock, len(wanted) - len(steps))),
    )
    if not facts.collectives:
        raise not_replayable(run.location, "the steps of its traces hold no communication")
    recorded = [replace(step, recorded_ns=row) for step, row in zip(program.steps, lengths, strict=True)]
    return replace(program, steps=recorded, facts=facts)


def _refuse(run: Run) -> None:
    health, no = run.health, partial(not_replayable, run.location)
    formats = sorted({tables.source.format for tables in run.ranks.values()})
    if formats != [KINETO]:
        raise no(
            f"of traces, those of torch.profiler (Kineto) say which collective a kernel belongs to; these are "
            f"{', '.join(formats)}",
        )
    if unknown := [tables.source.path for number, tables in run.ranks.items() if number < 0]:
        raise no(f"the rank of {unknown[0]} is unknown, or another trace of it is there too")
    if health.world_size == 1:
        raise no("one rank communicates with nobody")
    if health.ranks_missing or len(run.ranks) < health.world_size:
        missing = len(health.ranks_missing) or health.world_size - len(run.ranks)
        raise no(f"the traces of {missing} of {health.world_size} ranks are missing; it takes those of all")
    if run.source.platform == "cpu":
        raise no(
            "these are traces of a CPU, on which gloo's rows carry no process group and no sequence number; AORTA's "
            "own record of the run has them (aorta train)",
        )


def _steps(run: Run, last: int | None) -> Ints:
    steps: Ints = reduce(np.intersect1d, [tables.steps.global_step for tables in run.ranks.values()])
    if len(steps) < LEAST_STEPS:  # without any mark the whole trace is one
        raise not_replayable(
            run.location,
            f"its traces do not mark {LEAST_STEPS} steps that all ranks have (ProfilerStep#N): call the profiler's "
            "step() behind each step",
        )
    return steps if last is None else steps[-last:]


def _ranks(run: Run, steps: Ints) -> list[TracedRank]:
    """Read the traces again, for what tables of ranks do not hold: streams."""
    of_path = {tables.source.path: (rank, tables) for rank, tables in run.ranks.items()}
    found: dict[int, TracedRank] = {}
    for unit in find_units(run.location, headers=headers_near(run.location))[0]:
        for trace in read_unit(unit):
            if trace.path not in of_path:
                continue
            rank, tables = of_path[trace.path]
            if trace.unseen is not None:
                raise not_replayable(run.location, f"{trace.path}: {trace.unseen}")
            device = NULL if tables.source.device is None else int(tables.source.device)
            order = read_order(unit.files[0], device) if trace.path == unit.files[0] else None
            found[rank] = traced_rank(usable(trace), rank, device, order, steps)
    return [found[rank] for rank in sorted(found)]


def _edges(ranks: Sequence[TracedRank], groups: Mapping[int, Mapping[str, Members]]) -> dict[int, Ints]:
    """Return when each step begins on each rank, and when the last one ends: where the host marked it, or so much
    earlier that the steps hold the same collectives on all ranks, and that no wait is cut in two.
    """
    edges = {each.rank: np.append(each.begin_ns, each.end_ns[-1]) for each in ranks}
    firsts = [_Group.of(each, groups[each.rank]) for each in ranks]
    for place in range(len(ranks[0].steps) + 1):
        moved = True
        while moved:
            moved = False
            next_seq: dict[tuple[str, Members], int] = {}
            for each, mine in zip(ranks, firsts, strict=True):
                for group in mine:
                    seq = group.next_seq(int(edges[each.rank][place]))
                    if seq is not None:
                        next_seq[group.key] = min(next_seq.get(group.key, seq), seq)
            for each, mine in zip(ranks, firsts, strict=True):
                edge = int(edges[each.rank][place])
                known = [group.arrival_of(next_seq[group.key]) for group in mine if group.key in next_seq]
                earliest = each.outside_waits(min([edge, *(at for at in known if at is not None)]))
                if earliest < edge:
                    edges[each.rank][place] = earliest
                    moved = True
    return edges


class _Group(NamedTuple):
    """The collectives of one group on one rank, in their order."""

    key: tuple[str, Members]
    seq: Ints
    arrival_ns: Ints

    @classmethod
    def of(cls, rank: TracedRank, groups: Mapping[str, Members]) -> list[_Group]:
        """Return the collectives of a rank, group by group."""
        rows = rank.collectives
        found = []
        for code in np.unique(rows.group).tolist():
            mine = rows.group == code
            found.append(
                cls((rows.groups[code], groups.get(rows.groups[code], ())), rows.seq[mine], rank.arrival_ns[mine])
            )
        return found

    def next_seq(self, at_ns: int) -> int | None:
        """Return the first that the rank reaches at an instant or after it; None: the trace holds no more."""
        place = int(np.searchsorted(self.arrival_ns, at_ns))
        return int(self.seq[place]) if place < len(self.seq) else None

    def arrival_of(self, seq: int) -> int | None:
        """Return when the rank reached the first with that number or a later one."""
        place = int(np.searchsorted(self.seq, seq))
        return int(self.arrival_ns[place]) if place < len(self.seq) else None


def _flags(ranks: Sequence[TracedRank], clock: str, left_out: int) -> Iterator[str]:
    yield (
        "read from traces: the stream that computes most takes the place of the host, and a rank comes to a collective "
        "when the collective's kernel can start"
    )
    yield clock
    if left_out:
        yield (
            f"{left_out} step(s) hold, or come before, collectives that the traces do not describe, such as those "
            "launched before the recording; they are left out"
        )
    inferred = [each for each in ranks if not each.waits_recorded]
    if inferred:
        count = sum(len(each.waits.row) for each in inferred)
        yield (
            f"waits were inferred ({count} on {len(inferred)} rank(s), from idle time that ends with a collective): "
            "one that took no time has left no trace, so slower communication, a later rank or faster compute may be "
            "predicted too fast. A trace made with enable_cuda_sync_events records them"
        )
    idle = float(np.median([each.idle_part for each in ranks]))
    if idle >= _IDLE_SAID:
        yield (
            f"for {idle:.0%} of the time the computing stream stood idle for another reason than a collective (its "
            "host launches late, say): own time, taken to stay as it was"
        )
    elsewhere = max(each.elsewhere for each in ranks)
    if elsewhere >= _ELSEWHERE_SAID:
        yield (f"up to {elsewhere:.0%} of a rank's computation ran on other streams, whose waits are not followed")


def align_clocks(
    location: str, ranks: Sequence[TracedRank], groups: Mapping[int, Mapping[str, Members]]
) -> tuple[dict[int, int], str]:
    """Find what brings all ranks to the clock of the first.

    Args:
        groups: rank -> group -> its ranks.

    Returns:
        Rank -> what to add to its clock, and a sentence about it.

    Raises:
        InputError: their clocks cannot be compared.
    """
    ends = _ends(ranks, groups)
    step_ns = float(np.median(np.concatenate([each.end_ns - each.begin_ns for each in ranks])))
    hosts = {each.host for each in ranks}
    one = dict.fromkeys((each.rank for each in ranks), 0)
    raw_ns = _apart(ends, one)
    if len(hosts) == 1 and None not in hosts and (raw_ns is None or raw_ns <= APART * step_ns):
        known = "" if raw_ns is None else f"; ends of collectives lie up to {raw_ns / 1000:.0f} us apart on them"
        return one, f"the ranks share a host and its clock{known}"
    offsets = _offsets(ends, [each.rank for each in ranks])
    if missing := [each.rank for each in ranks if each.rank not in offsets]:
        raise not_replayable(
            location,
            "the clocks of the ranks cannot be compared: they are not known to share a host, and no collective that "
            f"waits for all its ranks joins rank(s) {', '.join(map(str, missing[:8]))} to rank {ranks[0].rank}",
        )
    apart_ns = _apart(ends, offsets) or 0.0
    if apart_ns > APART * step_ns:
        raise not_replayable(
            location,
            f"the clocks of the ranks cannot be compared: aligned by the ends of {len(ends)} collectives, these still "
            f"lie up to {apart_ns / 1e6:.3f} ms apart, and more than {APART:.0%} of a step of {step_ns / 1e6:.3f} ms "
            "is not accepted",
        )
    return offsets, (
        f"the ranks' clocks were aligned by the ends of {len(ends)} collectives, which then lie up to "
        f"{apart_ns / 1000:.0f} us apart"
    )


def _ends(ranks: Sequence[TracedRank], groups: Mapping[int, Mapping[str, Members]]) -> _Ends:
    found: defaultdict[tuple[str, Members, int], dict[int, int]] = defaultdict(dict)
    lockstep = {code for code, kind in enumerate(KINDS) if kind in LOCKSTEP}
    for each in ranks:
        rows = each.collectives
        columns = (rows.kind.tolist(), rows.group.tolist(), rows.seq.tolist(), rows.end_ns.tolist())
        for kind, group, seq, end in zip(*columns, strict=True):
            members = groups[each.rank].get(rows.groups[group])
            if members is not None and kind in lockstep:
                found[rows.groups[group], members, seq][each.rank] = end
    return [of_ranks for of_ranks in found.values() if len(of_ranks) > 1]


def _offsets(ends: _Ends, ranks: Sequence[int]) -> dict[int, int]:
    """Return rank -> what to add to its clock, for all ranks that a chain of collectives joins to the first."""
    offsets = {ranks[0]: 0}
    while True:
        shifts: defaultdict[int, list[int]] = defaultdict(list)
        for of_ranks in ends:
            joined = [end + offsets[rank] for rank, end in of_ranks.items() if rank in offsets]
            if joined:
                for rank, end in of_ranks.items():
                    if rank not in offsets:
                        shifts[rank].append(joined[0] - end)
        if not shifts:
            return offsets
        offsets |= {rank: round(float(np.median(found))) for rank, found in shifts.items()}


def _apart(ends: _Ends, offsets: Mapping[int, int]) -> float | None:
    """Return how far the ends of one collective lie apart, at most, in 95 % of collectives; None: there are none."""
    if not ends:
        return None
    spread = []
    for of_ranks in ends:
        moved = [end + offsets[rank] for rank, end in of_ranks.items()]
        spread.append(max(moved) - min(moved))
    return float(np.percentile(spread, 95))
