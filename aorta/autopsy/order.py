"""Does a rank do what it did before? Training repeats itself, so what followed the same collectives earlier is expected
to follow them now.

    conforms(rank, at)  # True, False, or None where its past does not say

Assumes that a step issues the same collectives as the one before. Must not accuse: an evaluation departs from the past
on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from aorta.autopsy.job import Channel, Rank, Signature, signature

_CONTEXT: Final = 64
"""Collectives before the one in question that are compared with the past, at most."""
_LEAST_CONTEXT: Final = 2
"""Fewer are no context: after one all-reduce anything may follow."""


def sequence(rank: Rank) -> list[Signature]:
    """Return what a rank has issued, in order."""
    return [signature(one, rank.rank) for one in rank.collectives]


def expected(issued: Sequence[Signature], at: int) -> Signature | None:
    """Return what followed earlier wherever the most of what precedes position `at` preceded too; None where nothing
    did, or different things.
    """
    best, followers = _LEAST_CONTEXT - 1, set[Signature]()
    for earlier in range(1, at):
        length = 0
        while length < min(earlier, _CONTEXT) and issued[earlier - 1 - length] == issued[at - 1 - length]:
            length += 1
        if length > best:
            best, followers = length, set()
        if length == best and length >= _LEAST_CONTEXT:
            followers.add(issued[earlier])
    return followers.pop() if len(followers) == 1 else None


def conforms(rank: Rank, channel: Channel, number: int) -> bool | None:
    """Return whether a collective is what the rank's own past lets one expect."""
    places = [at for at, one in enumerate(rank.collectives) if one is rank.channels.get(channel, {}).get(number)]
    if not places:
        return None
    issued = sequence(rank)
    awaited = expected(issued, places[0])
    return None if awaited is None else awaited == issued[places[0]]


def next_expected(rank: Rank, channel: Channel, number: int) -> Signature | None:
    """Return what the rank's past lets one expect behind a collective."""
    places = [at for at, one in enumerate(rank.collectives) if one is rank.channels.get(channel, {}).get(number)]
    return expected(sequence(rank), places[0] + 1) if places else None
