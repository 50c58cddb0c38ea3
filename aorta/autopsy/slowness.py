"""Which ranks the others wait for in a job that goes on.

    slow, suspects = slow_ranks(case, found)

The ones that others wait for just now, for longer than a healthy step makes them; or else those that came late several
times before. Must not accuse in a job that hangs: `aorta.autopsy.rules` does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from aorta.autopsy.job import Channel, JobEvidence, Rank, channel_of
from aorta.autopsy.rules import Case
from aorta.autopsy.verdict import Accusation

LONG_WAIT_S: Final = 1.0
"""A wait that has lasted less is part of a healthy step."""
_RECENT_S: Final = 60.0
_TIMES: Final = 2
"""How often a rank must have come late, lately: once is an incident."""


def slow_ranks(case: Case, found: Sequence[Accusation]) -> tuple[list[Accusation], list[int]]:
    """Return the ranks that hold up a job that goes on, and suspects where that is not decided.

    Of several ranks that are late at once and half of the job or more, none departs from its peers: rather is their
    host busy. `found` is what the rules say of the job as if it hung.
    """
    now = _waited_for_now(case, found)
    if len(now) == 1 or 2 * len(now) < len(case.job.ranks):
        return now or _late_lately(case.job), []
    lately = _late_lately(case.job)
    return lately, [] if lately else sorted(one.rank for one in now)


def _waited_for_now(case: Case, found: Sequence[Accusation]) -> list[Accusation]:
    """Of a rank that has just made progress it is not known whether it waited until then."""
    slow = []
    for one in found:
        ages = [
            case.job.ranks[each.rank].age_s(each.collective.issued_ns) or 0.0
            for each in case.waits.open
            if one.rank in each.behind
        ]
        still_s = case.job.ranks[one.rank].still_s or 0.0
        if one.rule == "behind_its_peers" and min(still_s, max(ages, default=0.0)) >= LONG_WAIT_S:
            one.kind = "slow"
            slow.append(one)
    return slow


def _late_lately(job: JobEvidence) -> list[Accusation]:
    """Return the ranks that spent longer than all of their peers before they issued a collective, at least `_TIMES`
    lately. Compares durations within ranks, so that their clocks need not agree; assumes that peers do the same work
    between two collectives.
    """
    late = defaultdict[int, list[float]](list)
    before = {rank.rank: _seconds_before(rank) for rank in job.ranks.values()}
    for channel in job.channels:
        members = job.members(channel)
        if channel.sender is not None or len(members) < 2 or any(rank not in job.ranks for rank in members):
            continue
        for number in set.intersection(*(set(job.ranks[rank].channels.get(channel, {})) for rank in members)):
            seconds = {rank: before[rank].get((channel, number)) for rank in members}
            known = sorted((spent, rank) for rank, spent in seconds.items() if spent is not None)
            if len(known) == len(members) and known[-1][0] - known[-2][0] > LONG_WAIT_S:
                late[known[-1][1]].append(known[-1][0] - known[-2][0])
    return [
        Accusation(
            rank=rank,
            kind="slow",
            rule="late_lately",
            reason=f"it came {min(times):.1f} s or more after its peers to {len(times)} collectives lately",
            evidence=[f"in the {_RECENT_S:.0f} s before the evidence was taken"],
            phase=None,  # where it is now says nothing of where it was late
        )
        for rank, times in sorted(late.items())
        if len(times) >= _TIMES
    ]


def _seconds_before(rank: Rank) -> dict[tuple[Channel, int], float]:
    """Return the seconds from the last thing that a rank's collectives did to the issue of each recent one; none where
    one of them completed at a time that is not known, until which the rank may have waited.
    """
    recent = [
        one for one in rank.collectives if (age_s := rank.age_s(one.issued_ns)) is not None and age_s <= _RECENT_S
    ]
    if any(one.state == "completed" and one.completed_ns is None for one in recent):
        return {}
    events = sorted({time for one in recent for time in (one.issued_ns, one.completed_ns) if time is not None})
    earlier = dict(pairwise(reversed(events)))
    return {
        (channel_of(one, rank.rank), one.number): (one.issued_ns - earlier[one.issued_ns]) / 1e9
        for one in recent
        if one.issued_ns is not None and one.issued_ns in earlier
    }
