"""Joins the ring of torch's Flight Recorder, on NCCL, with the progress file of the same rank, row by row.

    joined, contradictions = with_rings(evidence)

The progress file knows phases, and on a device learns late that a collective is completed; the ring knows whether the
device has begun it, and who issued it. Both count the collectives of a group, from different beginnings: how far these
are apart is found from kinds, bytes and times of issue, and is one number for all ranks of the group. Must not accuse.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Final, NamedTuple

from msgspec import structs

from aorta.autopsy.evidence import UNKNOWN_KIND, CollectiveEvidence, RankEvidence

_ALIKE_NS: Final = 1_000_000
"""Both sources take the time of an issue within this of each other, but for an interruption of the host."""
_BEGUN: Final = ("started", "completed")


class _Pair(NamedTuple):
    """What both sources say of one rank."""

    progress: RankEvidence
    ring: RankEvidence


class _Twins(NamedTuple):
    """One group of one rank in both sources, by number; of a ring without what only a status reports."""

    ours: dict[int, CollectiveEvidence]
    ring: dict[int, CollectiveEvidence]

    def pairs(self, offset: int) -> list[tuple[CollectiveEvidence, CollectiveEvidence]]:
        """Return the collectives of both, if the ring's numbers are so much higher."""
        return [(one, self.ring[number + offset]) for number, one in self.ours.items() if number + offset in self.ring]

    def agree(self, offset: int) -> bool:
        """Return whether both then saw the same collectives."""
        return all(_alike(*pair) for pair in self.pairs(offset))


def with_rings(evidence: Sequence[RankEvidence]) -> tuple[list[RankEvidence], list[str]]:
    """Complete progress files by the rings of their ranks, which keep no collectives of their own; returns the
    evidence, and where a ring denies what a progress file says. A ring that does not match is left as it is, and so are
    all where some rank has a ring alone: the numbers of that one would have nothing to be compared with.
    """
    pairs = _pairs(evidence)
    if any(one.source == "flight_recorder" and one.collectives and one.rank not in pairs for one in evidence):
        return list(evidence), []
    names = {rank: _group_names(*pair) for rank, pair in pairs.items()}
    twins = {rank: _twins(*pair, names[rank]) for rank, pair in pairs.items()}
    offsets = _numbers_apart(twins.values())
    contradictions = []
    replaced: dict[int, RankEvidence] = {}
    for rank, (progress, ring) in pairs.items():
        odd = [group for group, both in twins[rank].items() if group in offsets and not both.agree(offsets[group])]
        contradictions += [
            f"rank {rank}: progress and flight_recorder saw different collectives of {name}" for name in odd
        ]
        matched = {group: both for group, both in twins[rank].items() if group in offsets and group not in odd}
        if matched:
            replaced[id(progress)] = _completed(progress, ring, matched, offsets)
            replaced[id(ring)] = structs.replace(ring, collectives=[], groups=[])
            contradictions += _denied(progress, matched, offsets)
    return [replaced.get(id(one), one) for one in evidence], contradictions


def _pairs(evidence: Iterable[RankEvidence]) -> dict[int, _Pair]:
    by_rank: dict[int, dict[str, RankEvidence]] = defaultdict(dict)
    for one in evidence:
        if one.collectives and (one.source == "progress" or (one.source == "flight_recorder" and one.device_seen_ns)):
            by_rank[one.rank].setdefault(one.source, one)
    return {
        rank: _Pair(found["progress"], found["flight_recorder"]) for rank, found in by_rank.items() if len(found) == 2
    }


def _group_names(progress: RankEvidence, ring: RankEvidence) -> dict[str, str]:
    """Map the ring's name of a group to ours: of the same ranks and, where several have these, of the same name."""
    names: dict[str, str] = {}
    for theirs in ring.groups:
        same = [ours.name for ours in progress.groups if ours.ranks and ours.ranks == theirs.ranks]
        found = [name for name in same if name in (theirs.name, theirs.description)] or same
        if len(found) == 1:
            names[theirs.name] = found[0]
    times = Counter(names.values())
    return {theirs: ours for theirs, ours in names.items() if times[ours] == 1}


def _twins(progress: RankEvidence, ring: RankEvidence, names: Mapping[str, str]) -> dict[str, _Twins]:
    found: dict[str, _Twins] = {}
    for name in names.values():
        ours = {one.number: one for one in progress.collectives if one.group == name and one.peer is None}
        if ours:
            found[name] = _Twins(ours, {})
    for one in ring.collectives:
        if one.kind != UNKNOWN_KIND and one.peer is None and (both := found.get(names.get(one.group, ""))) is not None:
            both.ring[one.number] = one
    return {name: both for name, both in found.items() if both.ring}


def _numbers_apart(twins: Iterable[Mapping[str, _Twins]]) -> dict[str, int]:
    """Return by how much the ring's numbers of a group are higher than ours: what most ranks say."""
    votes: dict[str, Counter[int]] = defaultdict(Counter)
    for groups in twins:
        for name, both in groups.items():
            if (apart := _numbering_offset(both)) is not None:
                votes[name][apart] += 1
    return {name: max(sorted(counts), key=lambda apart: counts[apart]) for name, counts in votes.items()}


def _numbering_offset(both: _Twins) -> int | None:
    """Return the offset between both numberings with which kinds and bytes agree in the newer half of the shorter list:
    one with like times of issue, with which the newest match or nearly so, as in a hang nobody issues any more.
    """
    newest = max(both.ring) - max(both.ours)
    least = (min(len(both.ours), len(both.ring)) + 1) // 2
    found: list[tuple[int, int]] = []
    possible = range(min(both.ring) - max(both.ours), max(both.ring) - min(both.ours) + 1)
    if possible.stop - possible.start > 4 * (len(both.ours) + len(both.ring)):
        return None  # sources number what they saw without gaps
    for offset in sorted(possible, key=lambda each: abs(each - newest)):
        pairs = both.pairs(offset)
        if len(pairs) >= least and all(_alike(*pair) for pair in pairs):
            spread = _spread_ns(pairs) // _ALIKE_NS
            if spread == 0:
                return offset
            found.append((spread, offset))
    return min(found, key=lambda each: each[0])[1] if found else None


def _spread_ns(pairs: Sequence[tuple[CollectiveEvidence, CollectiveEvidence]]) -> int:
    """Return how far the difference of both clocks usually is from its median."""
    middle = _clock_ahead_ns(pairs)
    return 0 if middle is None else round(median(abs(each - middle) for each in _differences_ns(pairs)))


def _clock_ahead_ns(pairs: Sequence[tuple[CollectiveEvidence, CollectiveEvidence]]) -> float | None:
    """Return the median by which the ring's clock is ahead of ours; None: no collective has both times of issue."""
    return median(differences) if (differences := _differences_ns(pairs)) else None


def _differences_ns(pairs: Sequence[tuple[CollectiveEvidence, CollectiveEvidence]]) -> list[int]:
    return [
        theirs.issued_ns - ours.issued_ns
        for ours, theirs in pairs
        if ours.issued_ns is not None and theirs.issued_ns is not None
    ]


def _alike(ours: CollectiveEvidence, theirs: CollectiveEvidence) -> bool:
    if ours.kind != theirs.kind:
        return False
    # NCCL's barrier is an all-reduce, whose element only the ring counts.
    return ours.kind == "barrier" or None in (ours.bytes, theirs.bytes) or ours.bytes == theirs.bytes


def _completed(
    progress: RankEvidence, ring: RankEvidence, matched: Mapping[str, _Twins], offsets: Mapping[str, int]
) -> RankEvidence:
    """Return a progress file with what the ring knows of its collectives. A group's collectives run one after another:
    what is older than a row that the device has begun is completed. A full ring may have dropped what is not.
    """
    begun = {
        group: min((number for number, row in both.ring.items() if row.state in _BEGUN), default=-1)
        for group, both in matched.items()
    }
    collectives, covered = [], True
    for one in progress.collectives:
        both = matched.get(one.group) if one.peer is None else None
        twin = None if both is None else both.ring.get(one.number + offsets[one.group])
        if twin is not None:
            collectives.append(_with_row(one, twin))
        elif both is not None and one.number + offsets[one.group] < begun[one.group]:
            collectives.append(structs.replace(one, state="completed"))
        else:
            covered &= one.state == "completed"
            collectives.append(one)
    return structs.replace(
        progress,
        collectives=collectives,
        completed_late=progress.completed_late and not covered,
        device_seen_ns=ring.device_seen_ns if covered else None,
    )


def _with_row(ours: CollectiveEvidence, row: CollectiveEvidence) -> CollectiveEvidence:
    return structs.replace(
        ours,
        state=ours.state if ours.state == "completed" else row.state,
        started_ns=row.started_ns,
        dtype=row.dtype if ours.dtype is None else ours.dtype,
        input_sizes=row.input_sizes,
        output_sizes=row.output_sizes,
        issued_by=row.issued_by,
    )


def _denied(progress: RankEvidence, matched: Mapping[str, _Twins], offsets: Mapping[str, int]) -> list[str]:
    """Return the oldest collective of each group that our file says is completed and the ring has open, and what only
    the ring has of those issued before the file was read.
    """
    contradictions, rank = [], progress.rank
    for name, both in matched.items():
        denied = [
            (ours, row)
            for ours, row in both.pairs(offsets[name])
            if ours.state == "completed" and row.state != "completed"
        ]
        if denied:
            ours, row = min(denied, key=lambda pair: pair[0].number)
            what = f"{ours.kind} {ours.number} of {name}"
            contradictions.append(f"rank {rank}: progress says {what} is completed, flight_recorder says {row.state}")
        newer = [row for number, row in both.ring.items() if number - offsets[name] > max(both.ours)]
        ahead_ns = _clock_ahead_ns(both.pairs(offsets[name]))
        read_ns = progress.taken_ns
        more = sum(
            row.issued_ns is None or read_ns is None or ahead_ns is None or row.issued_ns - ahead_ns < read_ns
            for row in newer
        )
        if more:
            contradictions.append(
                f"rank {rank}: flight_recorder has {more} collectives of {name} that progress has not"
            )
    return contradictions
