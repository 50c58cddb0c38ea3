"""Joins the sources of all ranks to one job, and decides which collectives have completed where these leave it open.

    job = join(evidence)

The ring of torch's Flight Recorder, on NCCL, is joined with the progress file of the same rank, row by row
(`with_rings`). The progress file knows phases, the ring who issued a collective, and each may know what the other does
not of whether the device has begun or completed it. Both count the collectives of a group, from different
beginnings: how far these are apart is found from kinds, bytes and times of issue, and is one number for all ranks of
the group. Must not accuse.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median, median_low
from typing import Final, NamedTuple

from msgspec import structs

from aorta.autopsy.evidence import (
    DEFAULT_GROUP,
    UNKNOWN_KIND,
    UNRESPONSIVE,
    CollectiveEvidence,
    GroupEvidence,
    RankEvidence,
    RankState,
)
from aorta.autopsy.job import Channel, JobEvidence, Rank, channel_of
from aorta.autopsy.same_job import NEED_ALL_RANKS, of_one_job, same_groups
from aorta.errors import InputError

_MOST_ABSENT = 1 << 23  # 1,000 ranks that may each wait for 8,000 others; to list more would fill the memory
_ALIKE_NS: Final = 1_000_000
"""Both sources take the time of an issue within this of each other, but for an interruption of the host."""
_BEGUN: Final = ("started", "completed")
_LABELS: Final = {"progress": "the progress file", "flight_recorder": "the Flight Recorder", "ras": "RAS"}


def join(evidence: Iterable[RankEvidence]) -> JobEvidence:
    """Join all that is known of each rank.

    Collectives come from one kind of source, the one that speaks of the most ranks: two sources count from different
    beginnings. A ring of NCCL completes the progress file of its rank. Everything else is taken
    from the first source that says it.

    Raises:
        InputError: the evidence is of too few ranks of a large job.
    """
    ordered = sorted(evidence, key=lambda view: (view.rank, view.source != "progress", view.path))
    own, left_out = of_one_job(ordered)
    evidence, denied = with_rings(own)
    by_rank: dict[int, list[RankEvidence]] = defaultdict(list)
    for view in evidence:
        by_rank[view.rank].append(view)
    chosen = max(
        ("progress", "flight_recorder"),
        key=lambda source: (
            sum(bool(view.collectives) for view in evidence if view.source == source),
            sum(view.torn is None for view in evidence if view.source == source),
        ),
    )
    names, groups, listed = same_groups([view for view in evidence if view.source == chosen])
    ranks = {rank: _joined(several, chosen, names) for rank, several in sorted(by_rank.items())}
    sizes = [view.world_size or 0 for view in evidence]
    known = {rank for group in groups.values() for rank in group.ranks} | set(ranks)
    world = tuple(range(max([0, *sizes, *(rank + 1 for rank in known)])))
    for name, group in groups.items():
        if name not in listed:  # torch's default group is all; of another that no source lists those that used it
            users = (rank.rank for rank in ranks.values() if any(op.group == name for op in rank.collectives))
            members = world if group.description == DEFAULT_GROUP else tuple(sorted(users))
            groups[name] = structs.replace(group, ranks=members)
    absent = {name: sum(rank not in ranks for rank in group.ranks) for name, group in groups.items()}
    if sum(absent[name] for rank in ranks.values() for name in {op.group for op in rank.collectives}) > _MOST_ABSENT:
        raise InputError(
            f"evidence of {len(ranks)} ranks only, whose groups have {max(absent.values())} others; give that of more"
        )
    if any(sizes):  # or else there may be ranks of which no source speaks
        listed |= {name for name, group in groups.items() if group.ranks == world}
    contradictions = []
    for rank, several in sorted(by_rank.items()):
        states = {view.source: view.state for view in several if view.state != "unknown"}
        if len(set(states.values())) > 1:
            both = ", ".join(f"{_LABELS[source]} says {state}" for source, state in sorted(states.items()))
            contradictions.append(f"rank {rank}: {both}")
        elif ranks[rank].unresponsive and "running" in states.values():
            contradictions.append(f"rank {rank}: its process runs, and does not answer RAS")
    unused = any(view.source not in (chosen, "ras") and view.collectives for view in evidence)
    notes = [f"collectives are those of {_LABELS[chosen]}; other sources number them differently"] if unused else []
    notes += _made_in_another_order(names, groups, ranks)
    job = JobEvidence(ranks, world, groups, frozenset(listed), (*contradictions, *denied), (*left_out, *notes))
    if any(op.state == "retired" for rank in ranks.values() for op in rank.collectives):
        return replace(job, ranks={rank.rank: _settled(job, rank) for rank in ranks.values()})
    # What one rank has noted of a collective that needs all ranks, holds on all; it failed where one ended without it.
    newest: dict[Channel, int] = defaultdict(lambda: -1)
    for of_rank in ranks.values():
        for issued in of_rank.collectives:
            if issued.state == "completed" and issued.kind in NEED_ALL_RANKS:
                channel = channel_of(issued, of_rank.rank)
                ended = [rank for rank in map(ranks.get, job.members(channel)) if rank is not None and rank.has_ended]
                if all(rank.has_issued(channel, issued.number) or rank.may_lack(channel, issued) for rank in ended):
                    newest[channel] = max(newest[channel], issued.number)
                else:
                    issued.state = "issued"
    for of_rank in ranks.values():
        for issued in of_rank.collectives:
            if issued.state == "unseen" and issued.number <= newest[channel_of(issued, of_rank.rank)]:
                issued.state = "completed"
    return job


def _made_in_another_order(
    names: dict[tuple[str, int], str], groups: dict[str, GroupEvidence], ranks: dict[int, Rank]
) -> Iterator[str]:
    """Say of groups in which nothing has completed that ranks call them by different names: torch numbers groups as a
    rank makes them, and ranks that make them in another order do not meet.
    """
    called: dict[str, dict[str, int]] = defaultdict(dict)
    for (name, rank), group in names.items():
        called[group].setdefault(name, rank)
    for group, own in called.items():
        used = [op.state for rank in ranks.values() for op in rank.collectives if op.group == group]
        if len(own) > 1 and used and "completed" not in used:
            named = ", ".join(f"{name!r} on rank {rank}" for name, rank in sorted(own.items()))
            title = groups[group]
            yield f"{title} is {named}: these ranks may have made groups in different orders, and never meet in it"


def _settled(job: JobEvidence, rank: Rank) -> Rank:
    """Return a rank whose retired collectives are completed or, where that cannot be, open: the newest of a channel
    failed if a rank that it needs has not issued it. Where such a rank may be one of which there is no evidence, the
    newest of all may have failed, which ends a rank as well, so this one is not known to hold up others.
    """
    failed, unsure = set[tuple[Channel, int]](), False
    for channel, issued in rank.channels.items():
        newest = issued[max(issued)]
        if newest.kind in NEED_ALL_RANKS:
            others = [job.ranks[member] for member in job.members(channel) if member in job.ranks]
            without = [other for other in others if not other.has_issued(channel, newest.number)]
            if not all(other.may_lack(channel, newest) for other in without):
                failed.add((channel, newest.number))
            # Or else it is finished or failed.
            may_lack = any(other.complete and other.may_lack(channel, newest) for other in without)
            unsure |= newest.state == "retired" and may_lack
    last = rank.collectives[-1] if rank.collectives else None
    if last is not None and last.state == "retired" and last.group not in job.listed:
        # What an all-gather makes of the share of each rank says how many ranks the group has at least.
        gathers = [
            (sum(map(math.prod, op.output_sizes)), sum(map(math.prod, op.input_sizes)))
            for other in job.ranks.values()
            for op in other.collectives
            if op.group == last.group and op.kind == "all_gather" and op.input_sizes and op.output_sizes
        ]
        least = max((of_all // of_one for of_all, of_one in gathers if of_one), default=2)
        incomplete = not all(other.complete for other in job.ranks.values())
        unsure |= bool(job.missing) or incomplete or len(job.groups[last.group].ranks) < least
    settled = tuple(
        op
        if op.state != "retired"
        else structs.replace(op, state="issued" if (channel_of(op, rank.rank), op.number) in failed else "completed")
        for op in rank.collectives
    )
    return structs.replace(rank, collectives=settled, complete=rank.complete and not unsure)


def _joined(several: Sequence[RankEvidence], chosen: str, names: dict[tuple[str, int], str]) -> Rank:
    rank = Rank(
        rank=several[0].rank,
        unresponsive=any(view.source == "ras" and view.torn == UNRESPONSIVE for view in several),
        sources=tuple(view.path for view in several),
        torn=tuple(view.torn for view in several if view.source != "ras" and view.torn is not None),
    )
    for view in several:
        for field in RankState.__struct_fields__:
            if getattr(rank, field) in (None, "unknown", []):
                setattr(rank, field, getattr(view, field))
    of_chosen = [view for view in several if view.source == chosen]
    if of_chosen:
        ours = max(of_chosen, key=lambda view: bool(view.collectives))
        rank.collectives = tuple(structs.replace(op, group=names[op.group, ours.rank]) for op in ours.collectives)
        rank.complete, rank.not_after_ns = ours.torn is None, ours.not_after_ns
        rank.device_seen_ns = ours.device_seen_ns
        rank.overwritten = frozenset(names.get((name, ours.rank), name) for name in ours.overwritten)
    return rank


class _Twins(NamedTuple):
    """One group of one rank in both sources, by number; of a ring without what only a status reports."""

    ours: dict[int, CollectiveEvidence]
    ring: dict[int, CollectiveEvidence]

    def pairs(self, offset: int = 0) -> list[tuple[CollectiveEvidence, CollectiveEvidence]]:
        """Return the collectives of both, if the ring's numbers are so much higher."""
        return [(op, self.ring[number + offset]) for number, op in self.ours.items() if number + offset in self.ring]

    def apart_ns(self, offset: int = 0) -> list[int]:
        """Return by how much the ring's clock is ahead of ours at the issue of each of these."""
        return [
            theirs.issued_ns - ours.issued_ns
            for ours, theirs in self.pairs(offset)
            if ours.issued_ns is not None and theirs.issued_ns is not None
        ]


def with_rings(evidence: Sequence[RankEvidence]) -> tuple[list[RankEvidence], list[str]]:
    """Complete progress files by the rings of their ranks, which keep no collectives of their own; returns the
    evidence, and where a ring denies what a progress file says. A ring that does not match is left as it is, and so are
    all where some rank has a ring alone: the numbers of that one would have nothing to be compared with.
    """
    by_rank: dict[int, dict[str, RankEvidence]] = defaultdict(dict)
    for view in evidence:
        if view.collectives and (
            view.source == "progress" or (view.source == "flight_recorder" and view.device_seen_ns)
        ):
            by_rank[view.rank].setdefault(view.source, view)
    pairs = {
        rank: (sources["progress"], sources["flight_recorder"])
        for rank, sources in by_rank.items()
        if len(sources) == 2
    }
    if any(view.source == "flight_recorder" and view.collectives and view.rank not in pairs for view in evidence):
        return list(evidence), []
    twins = {rank: _twins(*pair) for rank, pair in pairs.items()}
    votes: dict[str, Counter[int]] = defaultdict(Counter)
    for groups in twins.values():
        for name, both in groups.items():
            if (apart := _numbering_offset(both)) is not None:
                votes[name][apart] += 1
    # By how much the ring's numbers of a group are higher than ours: what most ranks say.
    offsets = {name: max(sorted(counts), key=lambda apart: counts[apart]) for name, counts in votes.items()}
    contradictions = []
    replaced: dict[int, RankEvidence] = {}
    for rank, (progress, ring) in pairs.items():
        matched = {
            name: _Twins(both.ours, {number - offsets[name]: row for number, row in both.ring.items()})
            for name, both in twins[rank].items()
            if name in offsets
        }
        for name in [name for name, both in matched.items() if not _alike(both.pairs())]:
            contradictions.append(
                f"rank {rank}: the progress file and the Flight Recorder saw different collectives of {name}"
            )
            del matched[name]
        if matched:
            replaced[id(progress)] = _completed(progress, ring, matched)
            replaced[id(ring)] = structs.replace(ring, collectives=[], groups=[])
            contradictions += _denied(progress, matched)
    return [replaced.get(id(view), view) for view in evidence], contradictions


def _twins(progress: RankEvidence, ring: RankEvidence) -> dict[str, _Twins]:
    """Return the groups of a rank that both sources have, by our name. The ring's has the same ranks and, where several
    groups have these, the same name.
    """
    names: dict[str, str] = {}  # the ring's -> ours
    for theirs in ring.groups:
        same = [ours.name for ours in progress.groups if ours.ranks and ours.ranks == theirs.ranks]
        candidates = [name for name in same if name in (theirs.name, theirs.description)] or same
        if len(candidates) == 1:
            names[theirs.name] = candidates[0]
    times, twins = Counter(names.values()), dict[str, _Twins]()
    names = {theirs: ours for theirs, ours in names.items() if times[ours] == 1}
    for name in names.values():
        ours = {op.number: op for op in progress.collectives if op.group == name and op.peer is None}
        if ours:
            twins[name] = _Twins(ours, {})
    for op in ring.collectives:
        if op.kind != UNKNOWN_KIND and op.peer is None and (both := twins.get(names.get(op.group, ""))) is not None:
            both.ring[op.number] = op
    return {name: both for name, both in twins.items() if both.ring}


def _numbering_offset(both: _Twins) -> int | None:
    """Return the offset between both numberings with which kinds and bytes agree in the newer half of the shorter list:
    one with like times of issue, with which the newest match or nearly so, as in a hang no rank issues any more.
    """
    newest = max(both.ring) - max(both.ours)
    least = (min(len(both.ours), len(both.ring)) + 1) // 2
    spreads: list[tuple[int, int]] = []
    possible = range(min(both.ring) - max(both.ours), max(both.ring) - min(both.ours) + 1)
    if possible.stop - possible.start > 4 * (len(both.ours) + len(both.ring)):
        return None  # sources number what they saw without gaps
    for offset in sorted(possible, key=lambda value: abs(value - newest)):
        pairs = both.pairs(offset)
        if len(pairs) >= least and _alike(pairs):
            apart_ns, spread = both.apart_ns(offset), 0
            if apart_ns:  # how far the difference of both clocks usually is from its median
                middle = median(apart_ns)
                spread = round(median(abs(value - middle) for value in apart_ns)) // _ALIKE_NS
            if spread == 0:
                return offset
            spreads.append((spread, offset))
    return min(spreads, key=lambda value: value[0])[1] if spreads else None


def _alike(pairs: Sequence[tuple[CollectiveEvidence, CollectiveEvidence]]) -> bool:
    return all(
        ours.kind == theirs.kind
        # NCCL's barrier is an all-reduce, whose element only the ring counts.
        and (ours.kind == "barrier" or None in (ours.bytes, theirs.bytes) or ours.bytes == theirs.bytes)
        for ours, theirs in pairs
    )


def _completed(progress: RankEvidence, ring: RankEvidence, matched: Mapping[str, _Twins]) -> RankEvidence:
    """Return a progress file with what the ring knows of its collectives. A group's collectives run one after another:
    what is older than a row that the device has begun is completed. A full ring may have dropped what is not.
    """
    begun = {
        group: min((number for number, row in both.ring.items() if row.state in _BEGUN), default=-1)
        for group, both in matched.items()
    }
    collectives, covered = [], True
    for op in progress.collectives:
        both = matched.get(op.group) if op.peer is None else None
        twin = None if both is None else both.ring.get(op.number)
        if twin is not None:
            collectives.append(
                structs.replace(
                    op,
                    state=op.state if op.state in _BEGUN else twin.state,
                    started_ns=twin.started_ns,
                    dtype=twin.dtype if op.dtype is None else op.dtype,
                    input_sizes=twin.input_sizes,
                    output_sizes=twin.output_sizes,
                    issued_by=twin.issued_by,
                )
            )
        elif both is not None and op.number < begun[op.group]:
            collectives.append(structs.replace(op, state="completed"))
        else:
            covered &= op.state in _BEGUN
            collectives.append(op)
    return structs.replace(
        progress,
        collectives=collectives,
        device_seen_ns=ring.device_seen_ns if covered else progress.device_seen_ns,
    )


def _denied(progress: RankEvidence, matched: Mapping[str, _Twins]) -> list[str]:
    """Return the oldest collective of each group that our file says is completed and the ring has open, and what only
    the ring has of those issued before the file was read.
    """
    contradictions, rank = [], progress.rank
    for name, both in matched.items():
        denied = [pair for pair in both.pairs() if pair[0].state == "completed" and pair[1].state != "completed"]
        if denied:
            ours, row = min(denied, key=lambda pair: pair[0].number)
            what = f"{ours.kind} {ours.number} of {name}"
            contradictions.append(
                f"rank {rank}: the progress file says {what} is completed, the Flight Recorder says {row.state}"
            )
        newer = [row for number, row in both.ring.items() if number > max(both.ours)]
        apart_ns = both.apart_ns()
        read_ns = None if progress.taken_ns is None or not apart_ns else progress.taken_ns + median_low(apart_ns)
        more = sum(row.issued_ns is None or read_ns is None or row.issued_ns < read_ns for row in newer)
        if more:
            contradictions.append(
                f"rank {rank}: the Flight Recorder has {more} collectives of {name} that the progress file lacks"
            )
    return contradictions
