"""Who waits for whom: a graph from ranks with an open collective to the ranks that are behind in its channel.

    waits = WaitGraph.of(job)
    waits.blockers[0]   # {3}: rank 0 cannot go on before rank 3 does

A rank is behind another where it has not issued what the other has open, has an older collective of that channel
open, or (where both sources see the device) its device has not begun what the other's has. A collective needs all of
its ranks, so a circle of waits never ends. Must not say why a rank is behind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from aorta.autopsy.evidence import CollectiveEvidence
from aorta.autopsy.job import Channel, JobEvidence, Rank


@dataclass(frozen=True)
class OpenCollective:
    """What one rank has open in a channel, and who is behind it there.

    Attributes:
        behind: ranks that evidence shows to be behind.
        unknown: members of which it is not known.
    """

    rank: int
    channel: Channel
    collective: CollectiveEvidence
    behind: frozenset[int]
    unknown: frozenset[int]


@dataclass(frozen=True)
class WaitGraph:
    """The graph.

    Attributes:
        open: the oldest open collective of every rank in every channel, of ranks that run.
        blockers: rank -> ranks that it waits for; empty where it waits for none that is known.
        unknown: rank -> ranks without evidence that it may wait for.
    """

    open: tuple[OpenCollective, ...]
    blockers: Mapping[int, frozenset[int]]
    unknown: Mapping[int, frozenset[int]]

    @classmethod
    def of(cls, job: JobEvidence) -> WaitGraph:
        """Build the graph of a job."""
        found = [
            _open(job, channel, rank, oldest)
            for channel in job.channels
            for rank in job.ranks.values()
            if (oldest := rank.open(channel)) is not None
        ]
        waiting = [one for one in found if _waits(job.ranks[one.rank])]
        blockers: dict[int, frozenset[int]] = defaultdict(frozenset)
        unknown: dict[int, frozenset[int]] = defaultdict(frozenset)
        for one in waiting:
            blockers[one.rank] |= one.behind
            unknown[one.rank] |= one.unknown
        return cls(tuple(found), dict(blockers), dict(unknown))

    def of_rank(self, rank: int) -> list[OpenCollective]:
        """Return what a rank has open, in the order of channels."""
        return [one for one in self.open if one.rank == rank]

    @property
    def roots(self) -> list[int]:
        """Ranks that others wait for and that wait for nobody, known or not."""
        waited = set().union(*self.blockers.values())
        return sorted(rank for rank in waited if not self.blockers.get(rank) and not self.unknown.get(rank))

    @property
    def circles(self) -> list[frozenset[int]]:
        """Sets of ranks, each of which waits for each, directly or through others."""
        reach = {rank: self._reached(rank) for rank in self.blockers}
        found = {
            frozenset(other for other in reach[rank] if rank in reach.get(other, ()))
            for rank in reach
            if rank in reach[rank]
        }
        return sorted(found, key=sorted)

    def waiters(self, ranks: Iterable[int]) -> dict[int, int]:
        """Return rank -> how many waits lie between it and the nearest of `ranks`, of all that wait for one of them."""
        distance = dict.fromkeys(ranks, 0)
        near = list(distance)
        for blocking in near:  # grows
            for rank, blockers in self.blockers.items():
                if blocking in blockers and rank not in distance:
                    distance[rank] = distance[blocking] + 1
                    near.append(rank)
        return distance

    def _reached(self, start: int) -> set[int]:
        reached: set[int] = set()
        left = list(self.blockers.get(start, ()))
        while left:
            rank = left.pop()
            if rank not in reached:
                reached.add(rank)
                left += self.blockers.get(rank, ())
        return reached


def _waits(rank: Rank) -> bool:
    """Return whether a rank waits for what it has open, or did until it gave up."""
    return rank.lost_a_peer if rank.gone else not rank.is_elsewhere


def _open(job: JobEvidence, channel: Channel, rank: Rank, oldest: CollectiveEvidence) -> OpenCollective:
    behind, unknown = set[int](), set[int]()
    for member in job.members(channel):
        if member == rank.rank:
            continue
        other = job.ranks.get(member)
        if other is None:
            unknown.add(member)
        elif is_behind(other, channel, oldest):
            # What a torn, older or absent list lacks may have been issued; a process that is gone will issue no more.
            (behind if other.gone or not other.may_lack(oldest) else unknown).add(member)
    return OpenCollective(rank.rank, channel, oldest, frozenset(behind), frozenset(unknown))


def is_behind(rank: Rank, channel: Channel, of: CollectiveEvidence) -> bool:
    """Return whether a rank is behind another one that has this collective open."""
    if rank.completed_late:  # what it has open may be completed
        return not rank.has_issued(channel, of.number)
    if rank.front(channel) != of.number:
        return rank.front(channel) < of.number
    own = rank.open(channel)
    if own is None:
        return True
    if of.state != "started" or own.state != "issued" or rank.device_seen_ns is None:
        return False
    # A device that was looked at before the other one began may have begun since.
    return of.started_ns is None or of.started_ns <= rank.device_seen_ns
