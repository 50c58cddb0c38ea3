"""Where ranks disagree: the first collective of a channel that they did not issue alike, and whose past departs.

The past of each rank decides which of them departs: training repeats itself, so what followed the same collectives
earlier is expected to follow them again. That assumes that a step issues the same collectives as the one before. Must
not accuse where two camps are equal and the past of neither speaks (an evaluation departs from the past on every rank).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from aorta.autopsy.evidence import UNKNOWN_KIND, Aspect, CollectiveEvidence
from aorta.autopsy.job import Channel, JobEvidence, OpenCollective, Rank, Signature, signature

_ONE_SIZE: Final = ("all_reduce", "reduce_scatter", "broadcast", "reduce", "all_gather", "barrier")
"""Kinds whose input has one size on every rank. Of an all_gather that holds where no finished one differed."""
_ASPECTS: Final[tuple[tuple[Aspect, Callable[[CollectiveEvidence], object]], ...]] = (
    ("kind", lambda one: one.kind),
    ("dtype", lambda one: one.dtype),
    ("size", lambda one: one.bytes if one.bytes is not None else one.input_sizes),
)
_CONTEXT: Final = 64
"""Collectives before the one in question that are compared with the past, at most."""
_LEAST_CONTEXT: Final = 2
"""Fewer are no context: after one all-reduce anything may follow."""
_MOST_SINCE: Final = 1024
"""Collectives in which a rank is seen to depart from its past, at most; a step has fewer."""


@dataclass(frozen=True)
class Mismatch:
    """The first collective of a channel in which ranks differ.

    Attributes:
        issued: rank -> what it issued as this number.
        camps: value of the aspect -> ranks.
        accused: the odd ones; empty where that cannot be decided.
        ahead: the accused issued what the past of the others lets one expect next: they skipped one, or swapped two.
        swapped: they issued what the others have there behind it.
    """

    channel: Channel
    number: int
    aspect: Aspect
    issued: Mapping[int, CollectiveEvidence]
    camps: Mapping[object, tuple[int, ...]]
    accused: tuple[int, ...]
    ahead: bool
    swapped: bool


def mismatches(job: JobEvidence) -> Iterator[Mismatch]:
    """Yield the first mismatch of every channel."""
    for channel in job.channels:
        if channel.sides:  # a send meets a receive
            continue
        members = [rank for rank in job.members(channel) if rank in job.ranks]
        numbers = sorted({number for rank in members for number in job.ranks[rank].channels.get(channel, {})})
        differed = set[str]()  # kinds of which a finished one differed in size
        for number in numbers:
            everywhere = {rank: job.ranks[rank].channels.get(channel, {}).get(number) for rank in members}
            issued = {rank: op for rank, op in everywhere.items() if op is not None and op.kind != UNKNOWN_KIND}
            mismatch = _mismatch(job, channel, number, issued, differed)
            if mismatch is not None:
                yield mismatch
                break


def _mismatch(
    job: JobEvidence, channel: Channel, number: int, issued: dict[int, CollectiveEvidence], differed: set[str]
) -> Mismatch | None:
    for aspect, value_of in _ASPECTS:
        camps: dict[object, tuple[int, ...]] = {}
        for rank, op in issued.items():
            camps[value_of(op)] = (*camps.get(value_of(op), ()), rank)
        if len(camps) < 2 or (aspect != "kind" and None in camps):
            continue
        kind = next(iter(issued.values())).kind
        if aspect == "size" and kind == "all_to_all" and _unequal_totals(job.members(channel), issued):
            return Mismatch(channel, number, aspect, issued, camps, accused=(), ahead=False, swapped=False)
        if aspect == "size" and (kind not in _ONE_SIZE or kind in differed):
            return None
        if aspect == "size" and all(op.state == "completed" for op in issued.values()):
            differed.add(kind)
            return None
        accused = _odd_camps(job, channel, number, camps)
        others = [rank for rank in issued if rank not in accused]
        if not accused or not others:
            return Mismatch(channel, number, aspect, issued, camps, accused, ahead=False, swapped=False)
        odd, faithful = job.ranks[accused[0]], job.ranks[others[0]]
        own, theirs = signature(issued[odd.rank], odd.rank), signature(issued[faithful.rank], faithful.rank)
        after, behind = faithful.channels[channel].get(number + 1), odd.channels[channel].get(number + 1)
        if after is not None:
            awaited: Signature | None = signature(after, faithful.rank)
        else:
            awaited = _expected(faithful, place(faithful, channel, number) + 1)
        ahead = awaited == own
        swapped = ahead and behind is not None and signature(behind, odd.rank) == theirs
        return Mismatch(channel, number, aspect, issued, camps, accused, ahead, swapped)
    return None


def _unequal_totals(members: Sequence[int], issued: Mapping[int, CollectiveEvidence]) -> bool:
    """Return whether all ranks together send another number of elements than they receive."""
    if set(members) - issued.keys() or any(op.input_sizes is None or op.output_sizes is None for op in issued.values()):
        return False
    sent, received = (
        sum(math.prod(shape) for op in issued.values() for shape in getattr(op, name) or ())
        for name in ("input_sizes", "output_sizes")
    )
    return sent != received and any(op.state != "completed" for op in issued.values())


def _odd_camps(
    job: JobEvidence, channel: Channel, number: int, camps: Mapping[object, tuple[int, ...]]
) -> tuple[int, ...]:
    """Return the ranks of the camps that depart from their past where one camp follows its own, at most half of the
    group; or all but the camp that most of the group is in. None where both are known and disagree.
    """
    members = job.members(channel)
    past = {value: {conforms(job.ranks[rank], channel, number) for rank in ranks} for value, ranks in camps.items()}
    faithful = [value for value, seen in past.items() if seen == {True}]
    departed = tuple(sorted(rank for value, ranks in camps.items() if past[value] == {False} for rank in ranks))
    present = sum(map(len, camps.values()))
    largest = max(camps.values(), key=len)
    minority = tuple(sorted(set().union(*camps.values()) - set(largest))) if 2 * len(largest) > len(members) else ()
    if len(faithful) == 1 and len(departed) + len(camps[faithful[0]]) == present:
        return departed if 2 * (len(departed) + len(members) - present) <= len(members) else ()
    return minority if not (departed and set(departed) <= set(largest)) else ()


def place(rank: Rank, channel: Channel, number: int) -> int:
    """Return where a collective stands in the order of issue; 0 where the rank has not issued it."""
    own = rank.channels.get(channel, {}).get(number)
    return next((index for index, op in enumerate(rank.collectives) if op is own), 0)


def _followers(issued: Sequence[Signature], indices: range) -> Iterator[Signature | None]:
    """Yield for each of `places` what followed earlier wherever the most of what precedes it preceded too; None where
    nothing did, or different things.
    """
    alike: dict[int, int] = {}  # position -> how much before it is the same as before the place, `_CONTEXT` at most
    following: dict[Signature, list[int]] = defaultdict(list)
    for index in range(1, indices.stop):
        before = issued[index - 1]
        if index > indices.start - _CONTEXT:
            alike = {earlier: min(alike.get(earlier - 1, 0) + 1, _CONTEXT) for earlier in following[before]}
        following[before].append(index)
        if index >= indices.start:
            best = max(alike.values(), default=0)
            followers = {issued[earlier] for earlier, length in alike.items() if length == best >= _LEAST_CONTEXT}
            yield followers.pop() if len(followers) == 1 else None


def _expected(rank: Rank, index: int) -> Signature | None:
    """Return what a rank's past lets one expect at a place in its order of issue, from 1 on."""
    return next(_followers([signature(op, rank.rank) for op in rank.collectives], range(index, index + 1)))


def conforms(rank: Rank, channel: Channel, number: int) -> bool | None:
    """Return whether a collective is what the rank's own past lets one expect; None where the past does not say."""
    index = place(rank, channel, number)
    awaited = _expected(rank, index) if index else None
    return None if awaited is None else awaited == signature(rank.collectives[index], rank.rank)


def passed_by(job: JobEvidence, number: int, awaited: OpenCollective) -> bool:
    """Return whether a rank left out what another waits for: of both, it is the one that has departed from its past."""
    rank, awaited_number = job.ranks[number], awaited.collective.number
    newest = max(rank.channels.get(awaited.channel, {}), default=awaited_number)
    if newest >= awaited_number or not conforms(job.ranks[awaited.rank], awaited.channel, awaited_number):
        return False
    # What a rank does in a group of its own, it does not do instead of what others wait for.
    shared = [op for op in rank.collectives if job.groups[op.group].ranks != (number,)]
    issued = [signature(op, number) for op in shared]
    last = rank.channels.get(awaited.channel, {}).get(newest)
    since = range(next((index for index, op in enumerate(shared) if op is last), 0) + 1, len(issued))[:_MOST_SINCE]
    return any(
        expected not in (None, issued[index]) for index, expected in zip(since, _followers(issued, since), strict=True)
    )
