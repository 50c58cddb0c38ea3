"""Joins the sources of all ranks to one job, and decides which collectives have completed where these leave it open.

    job = join(evidence)

Must not accuse.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from msgspec import structs

from aorta.autopsy.evidence import GroupEvidence, RankEvidence, RankState
from aorta.autopsy.job import UNRESPONSIVE, Channel, JobEvidence, Rank, channel_of
from aorta.autopsy.ring import with_rings
from aorta.errors import InputError

_DEFAULT_GROUP = "default_pg"
"""torch's description of the group of all ranks."""
_MOST_ABSENT = 1 << 23  # 1,000 ranks that may each wait for 8,000 others; to list more would fill the memory
_NEED_ALL_RANKS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""No rank can complete these before every rank has issued them; the source of a broadcast, for one, can."""


def join(evidence: Iterable[RankEvidence]) -> JobEvidence:
    """Join all that is known of each rank; raises InputError where that is too little of a large job.

    Collectives come from one kind of source, the one that speaks of the most ranks: two sources count from different
    beginnings. A ring of NCCL completes the progress file of its rank (`aorta.autopsy.ring`). Everything else is taken
    from the first source that says it.
    """
    evidence, denied = with_rings(sorted(evidence, key=lambda each: (each.rank, each.source != "progress", each.path)))
    by_rank: dict[int, list[RankEvidence]] = defaultdict(list)
    for one in evidence:
        by_rank[one.rank].append(one)
    everything = [one for several in by_rank.values() for one in several]
    chosen = _source_of_collectives(everything)
    names, groups, listed = _groups([one for one in everything if one.source == chosen])
    ranks = {rank: _joined(several, chosen, names) for rank, several in sorted(by_rank.items())}
    sizes = [one.world_size or 0 for one in everything]
    known = {rank for group in groups.values() for rank in group.ranks} | set(ranks)
    world = tuple(range(max([0, *sizes, *(rank + 1 for rank in known)])))
    groups = {name: _with_users(group, name in listed, ranks.values(), world) for name, group in groups.items()}
    absent = {name: sum(rank not in ranks for rank in group.ranks) for name, group in groups.items()}
    if sum(absent[name] for rank in ranks.values() for name in {one.group for one in rank.collectives}) > _MOST_ABSENT:
        raise InputError(f"evidence of {len(ranks)} ranks, which used groups with {max(absent.values())} other ranks")
    if any(sizes):  # or else there may be ranks that nobody speaks of
        listed |= {name for name, group in groups.items() if group.ranks == world}
    unused = sorted({one.rank for one in everything if one.source not in (chosen, "ras") and one.collectives})
    notes = [f"collectives are taken from {chosen}; those of other sources count differently"] if unused else []
    job = JobEvidence(ranks, world, groups, frozenset(listed), (*_contradictions(by_rank), *denied), tuple(notes))
    if any(one.state == "retired" for rank in ranks.values() for one in rank.collectives):
        return replace(job, ranks={rank.rank: _settled(job, rank) for rank in ranks.values()})
    if any(rank.completed_late for rank in ranks.values()):
        # What one rank has noted of a collective that needs all ranks, holds on all of them.
        return _completed_up_to(job, {channel: _noted(job, channel) for channel in job.channels})
    return job


def _noted(job: JobEvidence, channel: Channel) -> int:
    """Return the number of the newest collective there that some rank has noted, and no rank completes alone."""
    seen = [rank.channels.get(channel, {}).values() for rank in job.ranks.values()]
    completed = [one for each in seen for one in each if one.state == "completed" and one.kind in _NEED_ALL_RANKS]
    return max((one.number for one in completed), default=-1)


def _completed_up_to(job: JobEvidence, newest: Mapping[Channel, int]) -> JobEvidence:
    """Return the job with all collectives up to these completed, on ranks that note completions late."""
    ranks = {}
    for number, rank in job.ranks.items():
        settled = tuple(
            structs.replace(one, state="completed")
            if rank.completed_late and one.number <= newest[channel_of(one, number)]
            else one
            for one in rank.collectives
        )
        ranks[number] = structs.replace(rank, collectives=settled)
    return replace(job, ranks=ranks)


def _settled(job: JobEvidence, rank: Rank) -> Rank:
    """Return a rank whose retired collectives are completed or, where that cannot be, open: the newest of a channel
    failed if a rank that it needs has not issued it. Where such a rank may be one of which there is no evidence, the
    newest of all may have failed, which ends a rank as well, so this one is not known to hold up others.
    """
    failed = {
        (channel, newest.number)
        for channel, issued in rank.channels.items()
        if (newest := issued[max(issued)]).kind in _NEED_ALL_RANKS
        and any(
            not other.has_issued(channel, newest.number) and not other.may_lack(newest)
            for member in job.members(channel)
            if (other := job.ranks.get(member)) is not None
        )
    }
    last = rank.collectives[-1] if rank.collectives else None
    unsure = (
        last is not None
        and last.state == "retired"
        and last.group not in job.listed
        and (
            bool(job.missing)
            or not all(other.complete for other in job.ranks.values())
            or len(job.groups[last.group].ranks) < _least_size(job, last.group)
        )
    )
    settled = tuple(
        one
        if one.state != "retired"
        else structs.replace(one, state="issued" if (channel_of(one, rank.rank), one.number) in failed else "completed")
        for one in rank.collectives
    )
    return structs.replace(rank, collectives=settled, complete=rank.complete and not unsure)


def _least_size(job: JobEvidence, group: str) -> int:
    """Return how many ranks a group has at least: what an all-gather makes of the share of each says it."""
    gathers = [
        (sum(map(math.prod, one.output_sizes)), sum(map(math.prod, one.input_sizes)))
        for rank in job.ranks.values()
        for one in rank.collectives
        if one.group == group and one.kind == "all_gather" and one.input_sizes and one.output_sizes
    ]
    return max((of_all // of_one for of_all, of_one in gathers if of_one), default=2)


def _source_of_collectives(evidence: Sequence[RankEvidence]) -> str:
    speaking = [one for one in evidence if one.source != "ras"]
    counts = {
        source: (
            sum(bool(one.collectives) for one in speaking if one.source == source),
            sum(one.torn is None for one in speaking if one.source == source),
        )
        for source in ("progress", "flight_recorder")
    }
    return max(counts, key=lambda source: counts[source])


def _groups(evidence: Sequence[RankEvidence]) -> tuple[dict[tuple[str, int], str], dict[str, GroupEvidence], set[str]]:
    """Return group names by rank and its own name for them: ranks may call different groups by one name."""
    lists: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for one in evidence:
        for group in one.groups:
            lists[group.name] |= {tuple(sorted(group.ranks))} if group.ranks else set()
    names: dict[tuple[str, int], str] = {}
    groups: dict[str, GroupEvidence] = {}
    listed = set[str]()
    for one in evidence:
        own = {group.name: group for group in one.groups}
        for name in [*own, *(each.group for each in one.collectives if each.group not in own)]:
            described = own.get(name, GroupEvidence(name=name))
            ranks = tuple(sorted(described.ranks))
            if not ranks and len(lists[name]) == 1:
                (ranks,) = lists[name]
            key = f"{name} ({','.join(map(str, ranks))})" if len(lists[name]) > 1 and ranks else name
            names[name, one.rank] = key
            before = groups.get(key)
            description = described.description or (before.description if before else None)
            groups[key] = GroupEvidence(name=key, description=description, ranks=ranks)
            listed |= {key} if ranks else set()
    return names, groups, listed


def _with_users(group: GroupEvidence, listed: bool, ranks: Iterable[Rank], world: tuple[int, ...]) -> GroupEvidence:
    """Return a group with its ranks: torch's default group is all, of another that nobody lists those that used it."""
    if listed:
        return group
    if group.description == _DEFAULT_GROUP:
        return GroupEvidence(name=group.name, description=group.description, ranks=world)
    users = tuple(sorted(rank.rank for rank in ranks if any(one.group == group.name for one in rank.collectives)))
    return GroupEvidence(name=group.name, description=group.description, ranks=users)


def _joined(several: Sequence[RankEvidence], chosen: str, names: dict[tuple[str, int], str]) -> Rank:
    """Return one rank, of all its sources."""
    known = RankState(rank=several[0].rank)
    for one in several:
        for field in RankState.__struct_fields__:
            if getattr(known, field) in (None, "unknown"):
                setattr(known, field, getattr(one, field))
    of_chosen = [one for one in several if one.source == chosen]
    ours = max(of_chosen, key=lambda one: bool(one.collectives), default=None)
    return Rank(
        **{field: getattr(known, field) for field in RankState.__struct_fields__},
        collectives=()
        if ours is None
        else tuple(structs.replace(one, group=names[one.group, ours.rank]) for one in ours.collectives),
        complete=ours is not None and ours.torn is None,
        not_after_ns=None if ours is None else ours.not_after_ns,
        completed_late=ours is not None and ours.completed_late,
        device_seen_ns=None if ours is None else ours.device_seen_ns,
        unresponsive=any(one.source == "ras" and one.torn == UNRESPONSIVE for one in several),
        stacks=next((tuple(one.stacks) for one in several if one.stacks), ()),
        sources=tuple(one.path for one in several),
        torn=tuple(one.torn for one in several if one.source != "ras" and one.torn is not None),
    )


def _contradictions(by_rank: dict[int, list[RankEvidence]]) -> tuple[str, ...]:
    """Return where one source says of a process what another denies."""
    found = []
    for rank, several in sorted(by_rank.items()):
        states = {one.source: one.state for one in several if one.state != "unknown"}
        silent = any(one.source == "ras" and one.torn == UNRESPONSIVE for one in several)
        if len(set(states.values())) > 1:
            states_text = ", ".join(f"{source} says {state}" for source, state in sorted(states.items()))
            found.append(f"rank {rank}: {states_text}")
        elif silent and "running" in states.values():
            found.append(f"rank {rank}: RAS gets no answer from it, and its process runs")
    return tuple(found)
