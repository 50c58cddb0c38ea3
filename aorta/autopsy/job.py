"""A job as its evidence shows it: what each rank has issued in each channel, where it is, who is missing, and who waits
for whom.

    job = join(evidence)         # aorta.autopsy.joining
    job.ranks[3].front(channel)  # number of the oldest collective that rank 3 has not finished there
    WaitGraph.of(job).blockers[0]  # {3}: rank 0 cannot go on before rank 3 does

A channel is a sequence that its members issue in one order: a process group, or the messages from one rank to another
in it. A rank is behind another where it has not issued what the other has open, has an older collective of that channel
open, or (where both sources see the device) its device has not begun what the other's has. A collective needs all of
its ranks, so a circle of waits never ends. Must not accuse, or say why a rank is behind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from aorta.autopsy.evidence import CollectiveEvidence, GroupEvidence, NumberedCollective, RankState
from aorta.errors import SIGNAL_EXIT_BASE

_POINT_TO_POINT = ("send", "recv")
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
    "has been silent for",
    "failed to recv",
    "timed out",
    "timeout",
    "ncclremoteerror",
)
"""Words of the errors that a rank meets because another rank has gone: of gloo, NCCL, the store and AORTA."""
_OWN_TIMEOUT = "dataloader timed out"
"""Of torch.utils.data: workers of this rank are late, and no other rank."""
_BUSY_PHASES = ("data", "checkpoint")
"""Phases in which a rank that began them after its last issue waits for none of its collectives. In a forward or
backward pass and in the optimizer, it may."""


class Channel(NamedTuple):
    """The collectives of a group, or the messages in it between two `sides`: sender and receiver."""

    group: str
    sides: tuple[int, ...] = ()


class Signature(NamedTuple):
    """In what the ranks of a collective have to agree, and where it belongs; the size is bytes where known, or else
    the shapes.
    """

    channel: Channel
    kind: str
    size: object
    dtype: str | None


class Rank(RankState, kw_only=True, dict=True):
    """One rank, of all sources.

    Attributes:
        collectives: in the order of issue, of one source.
        complete: a collective that is not among them was not issued, or was finished long ago.
        not_after_ns, device_seen_ns, overwritten: as of `RankEvidence`.
        unresponsive: NCCL's RAS got no answer from it.
    """

    collectives: tuple[CollectiveEvidence, ...] = ()
    complete: bool = False
    not_after_ns: int | None = None
    device_seen_ns: int | None = None
    overwritten: frozenset[str] = frozenset()
    unresponsive: bool = False
    sources: tuple[str, ...] = ()
    torn: tuple[str, ...] = ()

    @cached_property
    def channels(self) -> dict[Channel, dict[int, CollectiveEvidence]]:
        by_channel: dict[Channel, dict[int, CollectiveEvidence]] = defaultdict(dict)
        for op in self.collectives:
            by_channel[channel_of(op, self.rank)][op.number] = op
        return dict(by_channel)

    def open(self, channel: Channel) -> CollectiveEvidence | None:
        """Return the oldest collective there that has not completed."""
        left = [op for op in self.channels.get(channel, {}).values() if op.state != "completed"]
        return min(left, key=lambda op: op.number, default=None)

    def front(self, channel: Channel) -> int:
        """Return the number of the oldest collective there that is not finished: open, or the next."""
        oldest = self.open(channel)
        return oldest.number if oldest is not None else max(self.channels.get(channel, {}), default=-1) + 1

    def has_issued(self, channel: Channel, number: int) -> bool:
        return number <= max(self.channels.get(channel, {}), default=-1)

    def may_lack(self, channel: Channel, op: CollectiveEvidence) -> bool:
        """Return whether the evidence of this rank can be without a collective that another rank issued there."""
        older = self.not_after_ns is not None and op.issued_ns is not None and self.not_after_ns < op.issued_ns
        gone = channel.group in self.overwritten and channel not in self.channels
        return older or gone or not self.complete

    def age_s(self, since_ns: int | None) -> float | None:
        if since_ns is None or self.taken_ns is None:
            return None
        return max(0.0, (self.taken_ns - since_ns) / 1e9)

    @property
    def still_s(self) -> float | None:
        """Seconds without progress when the evidence was taken."""
        return self.age_s(self.progress_ns)

    @property
    def may_wait(self) -> bool:
        """Whether nobody saw what it has completed, nor how long ago it issued that."""
        return self.taken_ns is None and any(op.state == "unseen" for op in self.collectives)

    @property
    def unreadable(self) -> bool:
        """Whether there is evidence of it, and none tells what it does."""
        return bool(self.torn) and not self.collectives and self.progress_ns is None and not self.gone

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, or is about to: it has left its recorded program, with an error."""
        return self.state == "dead" or self.exit is not None

    @property
    def gone(self) -> bool:
        """Whether the process cannot continue by itself."""
        return self.has_ended or self.state == "stopped" or self.unresponsive

    @property
    def failed(self) -> bool:
        """Whether it ended otherwise than with exit code 0."""
        return self.has_ended and not self.finished

    @property
    def finished(self) -> bool:
        """Whether it ended with exit code 0."""
        return self.exit is not None and self.exit.exit_code == 0

    @property
    def was_asked_to_end(self) -> bool:
        """Whether it ended itself, as a signal asked it to."""
        return self.exit is not None and (self.exit.exit_code or 0) >= SIGNAL_EXIT_BASE

    @property
    def is_silent(self) -> bool:
        """Whether it ended without a word: by SIGKILL, as far as is known."""
        return self.has_ended and (self.exit is None or self.exit.signal == "SIGKILL")

    @property
    def lost_a_peer(self) -> bool:
        """Whether it ended with an error that ranks meet because another rank is gone, or keeps them waiting."""
        error = (self.exit.exception or "").lower() if self.exit is not None else ""
        return _OWN_TIMEOUT not in error and any(word in error for word in _LOST_A_PEER)

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is busy in a phase that began after it issued all that it has open. On a device, it may wait there
        for what it has open: to copy a batch or a parameter, the host waits for the device.
        """
        if self.phase not in _BUSY_PHASES or self.phase_since_ns is None:
            return False
        left = [op for op in self.collectives if op.state != "completed"]
        if self.device_seen_ns is not None or any(op.state == "unseen" for op in left):
            return not left
        return all(op.issued_ns is not None and op.issued_ns < self.phase_since_ns for op in left)

    def is_behind(self, channel: Channel, other: CollectiveEvidence) -> bool:
        """Return whether this rank is behind another rank that has this collective open."""
        own = self.open(channel)
        if own is not None and own.state == "unseen":  # it may be completed
            return not self.has_issued(channel, other.number)
        if self.front(channel) != other.number:
            return self.front(channel) < other.number
        if own is None:
            return True
        if other.state != "started" or own.state != "issued" or self.device_seen_ns is None:
            return False
        # A device that was looked at before the other one began may have begun since.
        return other.started_ns is None or other.started_ns <= self.device_seen_ns


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

    @cached_property
    def missing(self) -> list[int]:
        """Ranks of which nothing is known."""
        return [rank for rank in self.world if rank not in self.ranks]

    def members(self, channel: Channel) -> tuple[int, ...]:
        """Return the global ranks that take part in a channel."""
        return channel.sides or self.groups[channel.group].ranks

    def name(self, channel: Channel, op: CollectiveEvidence) -> NumberedCollective:
        description = self.groups[channel.group].description
        return NumberedCollective(
            group=channel.group, description=description, number=op.number, kind=op.kind, bytes=op.bytes
        )

    @cached_property
    def channels(self) -> list[Channel]:
        """Every channel that a rank has used, in a fixed order."""
        return sorted({channel for rank in self.ranks.values() for channel in rank.channels})


def channel_of(op: CollectiveEvidence, rank: int) -> Channel:
    """Return the channel that one rank's collective, send or receive belongs to."""
    if op.kind in _POINT_TO_POINT and op.peer is not None:
        return Channel(op.group, (rank, op.peer) if op.kind == "send" else (op.peer, rank))
    return Channel(op.group)


def signature(op: CollectiveEvidence, rank: int) -> Signature:
    """Return in what one rank's collective has to agree with those of other ranks."""
    size = op.input_sizes if op.bytes is None else op.bytes
    kind = "message" if op.kind in _POINT_TO_POINT and op.peer is not None else op.kind
    return Signature(channel_of(op, rank), kind, size, op.dtype)


@dataclass(frozen=True)
class OpenCollective:
    """What one rank has open in a channel; `behind`: ranks that evidence shows to be behind it there; `unknown`: those
    of which that is not known.
    """

    rank: int
    channel: Channel
    collective: CollectiveEvidence
    behind: frozenset[int]
    unknown: frozenset[int]


@dataclass(frozen=True)
class WaitGraph:
    """Who waits for whom.

    Attributes:
        open: the oldest open collective of every rank in every channel.
        blockers: rank -> ranks that it waits for; empty where it waits for none that is known.
        unknown: rank -> ranks without evidence that it may wait for.
    """

    open: tuple[OpenCollective, ...]
    blockers: Mapping[int, frozenset[int]]
    unknown: Mapping[int, frozenset[int]]

    @classmethod
    def of(cls, job: JobEvidence) -> WaitGraph:
        waits: list[OpenCollective] = []
        blockers: dict[int, frozenset[int]] = defaultdict(frozenset)
        unclear: dict[int, frozenset[int]] = defaultdict(frozenset)
        for channel in job.channels:
            for rank in job.ranks.values():
                oldest = rank.open(channel)
                if oldest is None:
                    continue
                behind, unknown = set[int](), set[int]()
                for member in set(job.members(channel)) - {rank.rank}:
                    other = job.ranks.get(member)
                    if other is None:
                        unknown.add(member)
                    elif other.is_behind(channel, oldest):
                        # What a torn, older or absent list lacks may have been issued; a process that is gone will
                        # issue no more.
                        (behind if other.gone or not other.may_lack(channel, oldest) else unknown).add(member)
                    elif not other.complete and oldest.number not in other.channels.get(channel, {}):
                        unknown.add(member)  # where its list lacks entries, it may have this one open as well
                if rank.may_wait and not (behind or unknown):
                    continue  # nothing says that it waits
                waits.append(OpenCollective(rank.rank, channel, oldest, frozenset(behind), frozenset(unknown)))
                if rank.lost_a_peer if rank.gone else not rank.is_elsewhere:  # or waited until it gave up
                    blockers[rank.rank] |= behind
                    unclear[rank.rank] |= unknown
        return cls(tuple(waits), dict(blockers), dict(unclear))

    def of_rank(self, rank: int) -> list[OpenCollective]:
        return [wait for wait in self.open if wait.rank == rank]

    @property
    def roots(self) -> list[int]:
        """Ranks that others wait for and that wait for nobody, known or not."""
        waited = set().union(*self.blockers.values())
        return sorted(rank for rank in waited if not self.blockers.get(rank) and not self.unknown.get(rank))

    @property
    def circles(self) -> list[frozenset[int]]:
        """Sets of ranks that all wait for each other, directly or through others."""
        reach: dict[int, set[int]] = {}
        for start, blockers in self.blockers.items():
            reached, left = reach.setdefault(start, set()), list(blockers)
            while left:
                rank = left.pop()
                if rank not in reached:
                    reached.add(rank)
                    left += self.blockers.get(rank, ())
        circles = {
            frozenset(other for other in reach[rank] if rank in reach.get(other, ()))
            for rank in reach
            if rank in reach[rank]
        }
        return sorted(circles, key=sorted)

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
