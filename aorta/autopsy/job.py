"""A job as its evidence shows it: all sources of a rank joined, what each rank has issued in each channel, and who is
missing.

    job = join(evidence)
    job.ranks[3].front(channel)  # number of the oldest collective that rank 3 has not finished there

A channel is a sequence that its members issue in one order: a process group, or the messages from one rank to another
in it. Must not accuse.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from msgspec import structs

from aorta.autopsy.evidence import CollectiveEvidence, GroupEvidence, RankEvidence, RankState, ThreadStack
from aorta.autopsy.ring import with_rings
from aorta.autopsy.verdict import CollectiveName

_S = 1e9
_DEFAULT_GROUP = "default_pg"
"""torch's description of the group of all ranks."""
_POINT_TO_POINT = ("send", "recv")
_NEED_ALL_RANKS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""No rank can complete these before every rank has issued them; the source of a broadcast, for one, can."""
_LOST_A_PEER = (
    "connection closed",
    "connection was likely closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "remote process exited",
    "peerfailed",
    "peer closed",
    "because of a peer",
    "stops: rank",
    "store stopped answering",
    "has said nothing for",
    "failed to recv",
    "timed out",
    "timeout",
    "ncclremoteerror",
)
"""Words of the errors that a rank meets because another one has gone: of gloo, NCCL, the store and AORTA."""
_OWN_TIMEOUT = "dataloader timed out"
"""Of torch.utils.data: workers of this rank are late, and no other rank."""
_BUSY_PHASES = ("data", "checkpoint")
"""Phases in which a rank that began them after its last issue waits for none of its collectives. In a forward or
backward pass and in the optimizer, it may.
"""


class Channel(NamedTuple):
    """The collectives of a group, or the messages in it from one rank to another."""

    group: str
    sender: int | None = None
    receiver: int | None = None


class Signature(NamedTuple):
    """In what the ranks of a collective have to agree, and where it belongs."""

    channel: Channel
    kind: str
    size: object
    dtype: str | None


class Rank(RankState, kw_only=True, dict=True):
    """One rank, of all sources.

    Attributes:
        collectives: in the order of issue, of one source.
        complete: whether a collective that is not among them was not issued, or has been finished long ago.
        not_after_ns: they were read at this moment at the latest; None where that is not limited.
        completed_late: what is issued may be completed.
        device_seen_ns: what is issued and not started, the device had not begun then; None where that is not known.
        unresponsive: NCCL's RAS got no answer from it.
    """

    collectives: tuple[CollectiveEvidence, ...] = ()
    complete: bool = False
    not_after_ns: int | None = None
    completed_late: bool = False
    device_seen_ns: int | None = None
    unresponsive: bool = False
    stacks: tuple[ThreadStack, ...] = ()
    sources: tuple[str, ...] = ()
    torn: tuple[str, ...] = ()

    @cached_property
    def channels(self) -> dict[Channel, dict[int, CollectiveEvidence]]:
        """Channel -> number -> collective."""
        found: dict[Channel, dict[int, CollectiveEvidence]] = defaultdict(dict)
        for one in self.collectives:
            found[channel_of(one, self.rank)][one.number] = one
        return dict(found)

    def open(self, channel: Channel) -> CollectiveEvidence | None:
        """The oldest collective there that is not finished."""
        left = [one for one in self.channels.get(channel, {}).values() if one.state != "completed"]
        return min(left, key=lambda one: one.number, default=None)

    def front(self, channel: Channel) -> int:
        """The number of the oldest collective there that is not finished: open, or the next."""
        oldest = self.open(channel)
        return oldest.number if oldest is not None else max(self.channels.get(channel, {}), default=-1) + 1

    def has_issued(self, channel: Channel, number: int) -> bool:
        """Whether the host has issued that one, or a later one."""
        return number <= max(self.channels.get(channel, {}), default=-1)

    def may_lack(self, one: CollectiveEvidence) -> bool:
        """Whether the evidence of this rank can be without a collective that another rank issued."""
        older = self.not_after_ns is not None and one.issued_ns is not None and self.not_after_ns < one.issued_ns
        return older or not self.complete

    def age_s(self, since_ns: int | None) -> float | None:
        """Seconds from a moment to when the evidence was taken."""
        if since_ns is None or self.taken_ns is None:
            return None
        return max(0.0, (self.taken_ns - since_ns) / _S)

    @property
    def still_s(self) -> float | None:
        """Seconds without progress when the evidence was taken."""
        return self.age_s(self.progress_ns)

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, or is about to: it has left its recorded program, with an error."""
        return self.state == "dead" or self.exit is not None

    @property
    def gone(self) -> bool:
        """Whether the process cannot go on by itself."""
        return self.has_ended or self.state == "stopped" or self.unresponsive

    @property
    def lost_a_peer(self) -> bool:
        """Whether it ended with an error that ranks meet because another one is gone, or keeps them waiting."""
        error = self.exit.exception if self.exit is not None else None
        if error is None or _OWN_TIMEOUT in error.lower():
            return False
        return any(word in error.lower() for word in _LOST_A_PEER)

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is busy in a phase that began after it issued all that it has open. On a device, it may wait there
        for what it has open: to copy a batch or a parameter, the host waits for the device.
        """
        if self.phase not in _BUSY_PHASES or self.phase_since_ns is None:
            return False
        left = [one for one in self.collectives if one.state != "completed"]
        if self.completed_late or self.device_seen_ns is not None:
            return not left
        return all(one.issued_ns is not None and one.issued_ns < self.phase_since_ns for one in left)


@dataclass(frozen=True)
class JobEvidence:
    """All ranks of a job.

    Attributes:
        world: its ranks, ascending, as far as any source knows of them.
        groups: by name; `ranks` are those that a source lists, or else those that were seen to use it.
        listed: names of groups whose ranks a source lists, so that nobody is unknown.
    """

    ranks: dict[int, Rank]
    world: tuple[int, ...]
    groups: dict[str, GroupEvidence]
    listed: frozenset[str]
    contradictions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def missing(self) -> list[int]:
        """Ranks of which nothing is known."""
        return [rank for rank in self.world if rank not in self.ranks]

    def members(self, channel: Channel) -> tuple[int, ...]:
        """Global ranks that take part in a channel."""
        if channel.sender is not None and channel.receiver is not None:
            return (channel.sender, channel.receiver)
        return self.groups[channel.group].ranks

    def name(self, channel: Channel, one: CollectiveEvidence) -> CollectiveName:
        """How a collective is named in the answer."""
        description = self.groups[channel.group].description
        return CollectiveName(
            group=channel.group, description=description, number=one.number, kind=one.kind, bytes=one.bytes
        )

    def has_issued_less(self, rank: Rank) -> bool:
        """Whether a peer of a rank has issued what that one, of its evidence, has not."""
        return any(
            rank.rank in self.members(channel)
            and not rank.has_issued(channel, number)
            and not rank.may_lack(issued[number])
            for other in self.ranks.values()
            for channel, issued in other.channels.items()
            for number in [max(issued)]
        )

    @cached_property
    def channels(self) -> list[Channel]:
        """Every channel that somebody has used, in a fixed order."""
        used = {channel for rank in self.ranks.values() for channel in rank.channels}
        return sorted(used, key=lambda one: (one.group, -1 if one.sender is None else one.sender, one.receiver or 0))


def channel_of(one: CollectiveEvidence, rank: int) -> Channel:
    """The channel that one rank's collective, send or receive belongs to."""
    if one.kind in _POINT_TO_POINT and one.peer is not None:
        return Channel(one.group, *((rank, one.peer) if one.kind == "send" else (one.peer, rank)))
    return Channel(one.group)


def signature(one: CollectiveEvidence, rank: int) -> Signature:
    """What ranks have to agree on; the size is bytes where known, or else the shapes."""
    size = one.input_sizes if one.bytes is None else one.bytes
    kind = "message" if one.kind in _POINT_TO_POINT and one.peer is not None else one.kind
    return Signature(channel_of(one, rank), kind, size, one.dtype)


def join(evidence: Iterable[RankEvidence]) -> JobEvidence:
    """Join all that is known of each rank.

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
    if any(sizes):  # or else there may be ranks that nobody speaks of
        listed |= {name for name, group in groups.items() if group.ranks == world}
    unused = sorted({one.rank for one in everything if one.source not in (chosen, "ras") and one.collectives})
    notes = [f"collectives are taken from {chosen}; those of other sources count differently"] if unused else []
    job = JobEvidence(ranks, world, groups, frozenset(listed), (*_contradictions(by_rank), *denied), tuple(notes))
    if any(one.state == "retired" for rank in ranks.values() for one in rank.collectives):
        return replace(job, ranks={rank.rank: _settled(job, rank) for rank in ranks.values()})
    return _read_late(job) if any(rank.completed_late for rank in ranks.values()) else job


def _read_late(job: JobEvidence) -> JobEvidence:
    """A job whose completions are noted late: what one rank has noted of a collective that needs all ranks, holds on
    all of them.
    """
    return _completed_up_to(job, {channel: _noted(job, channel) for channel in job.channels})


def _noted(job: JobEvidence, channel: Channel) -> int:
    """The number of the newest collective there that some rank has noted, and no rank completes alone."""
    seen = [rank.channels.get(channel, {}).values() for rank in job.ranks.values()]
    completed = [one for each in seen for one in each if one.state == "completed" and one.kind in _NEED_ALL_RANKS]
    return max((one.number for one in completed), default=-1)


def _completed_up_to(job: JobEvidence, newest: Mapping[Channel, int]) -> JobEvidence:
    """The job with all collectives up to these completed, on ranks that note completions late."""
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
    """A rank whose retired collectives are completed or, where that cannot be, open: the newest of a channel failed if
    a rank that it needs has not issued it. Where such a rank may be one of which there is no evidence, the newest of
    all may have failed, which ends a rank as well, so this one is not known to hold up others.
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
    """How many ranks a group has at least: what an all-gather makes of the share of each says it."""
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
    """Names of groups by what one rank calls them: ranks that call different groups by one name mean different ones."""
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
    """A group with its ranks: torch's default group is all, of another that nobody lists those that used it."""
    if listed:
        return group
    if group.description == _DEFAULT_GROUP:
        return GroupEvidence(name=group.name, description=group.description, ranks=world)
    users = tuple(sorted(rank.rank for rank in ranks if any(one.group == group.name for one in rank.collectives)))
    return GroupEvidence(name=group.name, description=group.description, ranks=users)


def _joined(several: Sequence[RankEvidence], chosen: str, names: dict[tuple[str, int], str]) -> Rank:
    """One rank, of all its sources."""
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
        else tuple(_renamed(one, names[one.group, ours.rank]) for one in ours.collectives),
        complete=ours is not None and ours.torn is None,
        not_after_ns=None if ours is None else ours.not_after_ns,
        completed_late=ours is not None and ours.completed_late,
        device_seen_ns=None if ours is None else ours.device_seen_ns,
        unresponsive=any(one.source == "ras" and one.torn == UNRESPONSIVE for one in several),
        stacks=next((tuple(one.stacks) for one in several if one.stacks), ()),
        sources=tuple(one.path for one in several),
        torn=tuple(one.torn for one in several if one.source != "ras" and one.torn is not None),
    )


UNRESPONSIVE = "no answer to RAS"
"""`RankEvidence.torn` of a rank that NCCL's RAS got no answer from."""


def _renamed(one: CollectiveEvidence, name: str) -> CollectiveEvidence:
    if one.group == name:
        return one
    values = {key: getattr(one, key) for key in one.__struct_fields__}
    return CollectiveEvidence(**{**values, "group": name})


def _contradictions(by_rank: dict[int, list[RankEvidence]]) -> tuple[str, ...]:
    """Where one source says of a process what another denies."""
    found = []
    for rank, several in sorted(by_rank.items()):
        states = {one.source: one.state for one in several if one.state != "unknown"}
        silent = any(one.source == "ras" and one.torn == UNRESPONSIVE for one in several)
        if len(set(states.values())) > 1:
            said = ", ".join(f"{source} says {state}" for source, state in sorted(states.items()))
            found.append(f"rank {rank}: {said}")
        elif silent and "running" in states.values():
            found.append(f"rank {rank}: RAS gets no answer from it, and its process runs")
    return tuple(found)
