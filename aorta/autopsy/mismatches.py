"""Collectives in which ranks met with different signatures, and which ranks are the odd ones.

    for found in mismatches(job):
        found.aspect, found.accused

Each rank's past decides which camp departs: training repeats itself, so what followed the same collectives earlier is
expected to follow them again. That assumes that a step issues the same collectives as the one before.

    conforms(rank, channel, number)  # True, False, or None where the rank's past does not say

Must not accuse where two camps are equal and the past of neither speaks; an evaluation departs from the past on every
rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from aorta.autopsy.evidence import UNKNOWN_KIND, CollectiveEvidence
from aorta.autopsy.job import Channel, JobEvidence, Rank, Signature, signature
from aorta.autopsy.verdict import Aspect, Kind, group_label
from aorta.command_line import name_ranks

_ONE_SIZE: Final = ("all_reduce", "reduce_scatter", "broadcast", "reduce", "all_gather", "barrier")
"""Kinds whose input has one size on every rank. Of an all_gather that holds where no finished one differed."""
_Aspects: Final[tuple[tuple[Aspect, Callable[[CollectiveEvidence], object]], ...]] = (
    ("kind", lambda one: one.kind),
    ("dtype", lambda one: one.dtype),
    ("size", lambda one: one.bytes if one.bytes is not None else one.input_sizes),
)


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
    group: str
    number: int
    aspect: Aspect
    issued: Mapping[int, CollectiveEvidence]
    camps: Mapping[object, tuple[int, ...]]
    accused: tuple[int, ...]
    ahead: bool = False
    swapped: bool = False

    @property
    def kind(self) -> Kind:
        return "order_swapped" if self.swapped else "signature_mismatch"

    def reason(self, rank: int) -> str:
        others = sorted(set(self.issued) - set(self.accused))
        own, theirs = self.issued[rank], self.issued[others[0]]
        said = f"it issued {_said(own, self.aspect)} as number {self.number} of {self.group}"
        said += f", {name_ranks(others)} {_said(theirs, self.aspect)}"
        if self.swapped:
            return f"{said}, and the other of the two behind it"
        return f"{said}; that is what follows on the others: it skipped one or swapped two" if self.ahead else said

    def evidence(self) -> list[str]:
        lines = []
        for ranks in self.camps.values():
            one = self.issued[ranks[0]]
            where = f", issued at {one.issued_by}" if one.issued_by is not None else ""
            lines.append(f"{name_ranks(ranks)}: {_said(one, self.aspect)}{where}")
        return lines


def mismatches(job: JobEvidence) -> list[Mismatch]:
    """Return the first mismatch of every channel."""
    found = []
    for channel in job.channels:
        members = [rank for rank in job.members(channel) if rank in job.ranks]
        numbers = sorted({number for rank in members for number in job.ranks[rank].channels.get(channel, {})})
        differed = set[str]()  # kinds of which a finished one differed in size
        for number in numbers:
            everywhere = {rank: job.ranks[rank].channels.get(channel, {}).get(number) for rank in members}
            issued = {rank: one for rank, one in everywhere.items() if one is not None and one.kind != UNKNOWN_KIND}
            mismatch = _mismatch(job, channel, number, issued, differed) if len(issued) > 1 else None
            if mismatch is not None:
                found.append(mismatch)
                break
    return found


def _mismatch(
    job: JobEvidence, channel: Channel, number: int, issued: dict[int, CollectiveEvidence], differed: set[str]
) -> Mismatch | None:
    for aspect, of in _Aspects:
        values = {rank: of(one) for rank, one in issued.items()}
        camps: dict[object, tuple[int, ...]] = {}
        for rank, value in values.items():
            camps[value] = (*camps.get(value, ()), rank)
        if len(camps) < 2 or (aspect != "kind" and (None in camps or channel.sender is not None)):
            continue
        if channel.sender is not None:  # a send meets a receive
            return None
        kind = next(iter(issued.values())).kind
        if aspect == "size" and kind not in _ONE_SIZE:
            return None
        if aspect == "size" and all(one.state == "completed" for one in issued.values()):
            differed.add(kind)
            return None
        if aspect == "size" and kind in differed:
            return None
        accused = _odd(job, channel, number, camps)
        ahead, swapped = _order(job, channel, number, issued, accused)
        group = group_label(channel.group, job.groups[channel.group].description)
        return Mismatch(channel, group, number, aspect, issued, camps, accused, ahead, swapped)
    return None


def _odd(job: JobEvidence, channel: Channel, number: int, camps: Mapping[object, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the ranks of the camps that depart from their past where one camp follows its own, at most half of the
    group; or all but the camp that most of the group is in. None where both are known and disagree.
    """
    members = job.members(channel)
    past = {value: {conforms(job.ranks[rank], channel, number) for rank in ranks} for value, ranks in camps.items()}
    faithful = [value for value, seen in past.items() if seen == {True}]
    departed = tuple(sorted(rank for value, ranks in camps.items() if past[value] == {False} for rank in ranks))
    unseen = len(members) - sum(map(len, camps.values()))
    largest = max(camps.values(), key=len)
    minority = tuple(sorted(set().union(*camps.values()) - set(largest))) if 2 * len(largest) > len(members) else ()
    if len(faithful) == 1 and len(departed) + len(camps[faithful[0]]) == sum(map(len, camps.values())):
        return departed if 2 * (len(departed) + unseen) <= len(members) else ()
    return minority if not (departed and set(departed) <= set(largest)) else ()


def _order(
    job: JobEvidence, channel: Channel, number: int, issued: Mapping[int, CollectiveEvidence], accused: tuple[int, ...]
) -> tuple[bool, bool]:
    """Return whether the accused are one collective ahead, and whether they issued the one left out behind it."""
    others = [rank for rank in issued if rank not in accused]
    if not accused or not others:
        return False, False
    odd, faithful = job.ranks[accused[0]], job.ranks[others[0]]
    own, theirs = signature(issued[odd.rank], odd.rank), signature(issued[faithful.rank], faithful.rank)
    follows = faithful.channels[channel].get(number + 1)
    awaited = None if follows is None else signature(follows, faithful.rank)
    places = [at for at, one in enumerate(faithful.collectives) if one is faithful.channels[channel].get(number)]
    if follows is None and places:  # what its past lets one expect
        awaited = next(_expected(_sequence(faithful), range(places[0] + 1, places[0] + 2)))
    behind = odd.channels[channel].get(number + 1)
    return awaited == own, awaited == own and behind is not None and signature(behind, odd.rank) == theirs


def _said(one: CollectiveEvidence, aspect: Aspect) -> str:
    if aspect == "kind":
        return one.kind
    size = f"{one.bytes:,} bytes" if one.bytes is not None else f"shapes {one.input_sizes}"
    return f"{one.kind} of {one.dtype}" if aspect == "dtype" else f"{one.kind} of {size}"


_CONTEXT: Final = 64
"""Collectives before the one in question that are compared with the past, at most."""
_MOST_SINCE: Final = 1024
"""Collectives in which a rank is seen to depart from its past, at most; a step has fewer."""
_LEAST_CONTEXT: Final = 2
"""Fewer are no context: after one all-reduce anything may follow."""


def _sequence(rank: Rank) -> list[Signature]:
    return [signature(one, rank.rank) for one in rank.collectives]


def _expected(issued: Sequence[Signature], places: range) -> Iterator[Signature | None]:
    """Yield for each of `places` what followed earlier wherever the most of what precedes it preceded too; None where
    nothing did, or different things.
    """
    alike: dict[int, int] = {}  # position -> how much before it is the same as before the place, `_CONTEXT` at most
    following: dict[Signature, list[int]] = defaultdict(list)
    for at in range(1, places.stop):
        before = issued[at - 1]
        if at > places.start - _CONTEXT:
            alike = {earlier: min(alike.get(earlier - 1, 0) + 1, _CONTEXT) for earlier in following[before]}
        following[before].append(at)
        if at >= places.start:
            best = max(alike.values(), default=0)
            followers = {issued[earlier] for earlier, length in alike.items() if length == best >= _LEAST_CONTEXT}
            yield followers.pop() if len(followers) == 1 else None


def conforms(rank: Rank, channel: Channel, number: int) -> bool | None:
    """Return whether a collective is what the rank's own past lets one expect."""
    places = [at for at, one in enumerate(rank.collectives) if one is rank.channels.get(channel, {}).get(number)]
    if not places:
        return None
    issued = _sequence(rank)
    (awaited,) = _expected(issued, range(places[0], places[0] + 1)) if places[0] else (None,)
    return None if awaited is None else awaited == issued[places[0]]


def passed_by(rank: Rank, waiting: Rank, channel: Channel, number: int) -> bool:
    """Return whether a rank left out what another waits for: of both, it is the one that has departed from its past."""
    newest = max(rank.channels.get(channel, {}).values(), key=lambda one: one.number, default=None)
    if newest is None or newest.number >= number or not conforms(waiting, channel, number):
        return False
    issued = _sequence(rank)
    since = range(next(at for at, one in enumerate(rank.collectives) if one is newest) + 1, len(issued))[:_MOST_SINCE]
    return any(awaited not in (None, issued[at]) for at, awaited in zip(since, _expected(issued, since), strict=True))
