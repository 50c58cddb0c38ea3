"""The rules that accuse ranks, each a small function with the assumption it makes; `RULES` is their order.

    for rule in RULES:
        accusations += rule(case, accusations)

A rule sees what the ones before it found, and accuses no rank twice. No rule accuses a rank because evidence of it is
missing: such ranks become suspects in `aorta.autopsy.judge`. Must not read files, or look at the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from msgspec import structs

from aorta.autopsy.evidence import CollectiveEvidence
from aorta.autopsy.job import JobEvidence, OpenCollective, Rank, WaitGraph, is_behind
from aorta.autopsy.mismatches import Mismatch, conforms, mismatches, passed_by
from aorta.autopsy.verdict import Accusation, Kind, group_label
from aorta.command_line import name_ranks
from aorta.errors import SIGNAL_EXIT_BASE

_ASKED_TO_END: Final = ("SIGTERM", "SIGINT", "SIGHUP")
"""Signals with which launchers end the other ranks after one has failed."""
_GIVING_UP: Final = ("destroy_process_group", "_shutdown_backend", "_abort_process_group")
"""Functions of torch in which a rank gives up its process groups."""


@dataclass(frozen=True)
class Case:
    job: JobEvidence
    waits: WaitGraph
    mismatches: tuple[Mismatch, ...]

    @classmethod
    def of(cls, job: JobEvidence) -> Case:
        return cls(job, WaitGraph.of(job), tuple(mismatches(job)))

    def is_held(self, one: OpenCollective) -> bool:
        """Return whether a mismatch in its channel, at its number or before, explains an open collective."""
        return any(found.channel == one.channel and found.number <= one.collective.number for found in self.mismatches)


Rule: TypeAlias = Callable[[Case, Sequence[Accusation]], list[Accusation]]


def dead(case: Case, _before: Sequence[Accusation]) -> list[Accusation]:
    """Accuse each process that ended by itself: when one rank dies, its launcher and broken connections end the others.
    Assumes that ranks which ended on a launcher's signal, or with an error that names a lost connection or a timeout,
    did so because of another cause, if there is one, and that a rank which met a mismatch was ended by it unless it was
    killed: gloo aborts there.
    """
    met = {rank for found in case.mismatches for rank in found.issued}
    return [
        Accusation(
            rank=rank.rank,
            kind="dead",
            rule="dead",
            reason=f"its process {'ended' if rank.state == 'dead' else 'is ending'}{rank.exit or ''}",
            evidence=[f"last seen {_where(rank)}"],
            phase=rank.phase,
        )
        for rank in _ended_first(case.job, case.waits.roots)
        if rank.rank not in met or (rank.exit is not None and rank.exit.signal == "SIGKILL")
    ]


def stopped(case: Case, before: Sequence[Accusation]) -> list[Accusation]:
    """Accuse each process that a signal or a debugger has stopped. Assumes that nobody stops healthy ranks."""
    return [
        Accusation(
            rank=rank.rank,
            kind="stopped",
            rule="stopped",
            reason="its process is stopped by a signal or a debugger",
            evidence=[f"last seen {_where(rank)}"],
            phase=rank.phase,
            since_s=rank.still_s,
        )
        for rank in case.job.ranks.values()
        if rank.state == "stopped" and rank.rank not in _ranks(before)
    ]


def signature_mismatch(case: Case, before: Sequence[Accusation]) -> list[Accusation]:
    """Accuse ranks that met the others in one collective with another kind, size or type of data: the one that departs
    from its own past while the others follow theirs, or else the minority of a group of which most agree; with two
    equal camps, nobody (`aorta.autopsy.mismatches`). Assumes that all-to-alls, gathers and scatters may differ in size.
    """
    return [
        Accusation(
            rank=rank,
            kind=found.kind,
            rule="signature_mismatch",
            reason=found.reason(rank),
            evidence=found.evidence(),
            aspect=found.aspect,
            phase=case.job.ranks[rank].phase,
            collective=case.job.name(found.channel, found.issued[rank]),
        )
        for found in case.mismatches
        for rank in found.accused
        if rank not in _ranks(before)
    ]


def order_swapped(case: Case, before: Sequence[Accusation]) -> list[Accusation]:
    """Accuse ranks that wait for each other in a circle, having issued collectives in different orders or groups: those
    whose open collective is not what their past lets one expect where it is on all others, or else the minority where
    most of the circle is in one collective. Assumes that a rank waits for what it has open.
    """
    job, waits, found = case.job, case.waits, []
    for circle in waits.circles:
        if circle & _ranks(before) or any(case.is_held(one) for rank in circle for one in waits.of_rank(rank)):
            continue
        open_there = {
            rank: max(  # of several the last one, in which it waits
                (one for one in waits.of_rank(rank) if one.behind & circle),
                key=lambda one: one.collective.issued_ns or 0,
            )
            for rank in sorted(circle)
        }
        for rank in _odd_ones(job, open_there):
            one = open_there[rank]
            awaited = [other for other in open_there.values() if rank in other.behind]
            if not awaited:
                continue  # others wait for it in what they issued before: it is in the circle, and not odd in it
            shape = _shape(one.collective)
            twin = next((other for other in awaited if _shape(other.collective) == shape), None)
            others = sorted(circle - {rank})
            where = _in_collective(job, one)
            wrong_group = twin is not None and twin.channel.group != one.channel.group
            reason = (
                f"it issued {where}, {name_ranks(others)} the same in {_in_collective(job, awaited[0])}"
                if wrong_group
                else f"it waits in {where}, for ranks that wait for it in {_in_collective(job, awaited[0])}"
            )
            found.append(
                Accusation(
                    rank=rank,
                    kind="signature_mismatch" if wrong_group else "order_swapped",
                    rule="order_swapped",
                    reason=reason,
                    evidence=[f"{name_ranks(sorted(circle))} wait for each other in a circle"],
                    aspect="group" if wrong_group else None,
                    phase=job.ranks[rank].phase,
                    since_s=job.ranks[rank].age_s(one.collective.issued_ns),
                    collective=job.name(awaited[0].channel, awaited[0].collective),
                )
            )
    return found


def behind_its_peers(case: Case, before: Sequence[Accusation]) -> list[Accusation]:
    """Accuse a rank that waits for nobody and that others wait for, directly or through ranks that wait themselves.
    Assumes that a rank whose list of collectives is whole has issued none that is not on it. A rank that is in a
    collective with all of its peers is not accused, unless it departed from its past and skipped what is waited for:
    what holds them all up is there.
    """
    job, waits, found = case.job, case.waits, []
    for rank in waits.roots:
        awaited = [one for one in waits.open if rank in one.behind and not case.is_held(one)]
        who = job.ranks[rank]
        skipped = any(passed_by(who, job.ranks[one.rank], one.channel, one.collective.number) for one in awaited)
        if rank in _ranks(before) or not awaited or (_is_inside(job, waits, rank) and not skipped):
            continue
        # Dumps have no ages; then what fewest others are behind in says most of this one.
        first = max(
            awaited, key=lambda one: (job.ranks[one.rank].age_s(one.collective.issued_ns) or 0.0, -len(one.behind))
        )
        own = who.open(first.channel)
        missing = _missing_on(job, rank, first)
        peers = name_ranks(sorted({one.rank for one in awaited}))
        frames = () if not who.stacks else who.stacks[0].frames
        kind: Kind = "rank_did_not_join"
        if own is not None and own.number == first.collective.number:
            issued = _in_collective(job, first)
            reason = f"its host issued {issued}, its device has not begun it, while {peers} began it"
        elif who.phase is not None:
            kind, reason = "stuck_outside", f"it is in {who.phase} and has not issued {missing}"
        elif destroying := next((name for name in _GIVING_UP if any(f.endswith(f" {name}") for f in frames)), None):
            kind, reason = "stuck_outside", f"it is in {destroying} and has not issued {missing}"
        elif who.unresponsive:
            reason = f"RAS gets no answer from it, and {peers} wait in {_in_collective(job, first)}"
        else:
            reason = f"it has not issued {missing}"
        found.append(
            Accusation(
                rank=rank,
                kind=kind,
                rule="behind_its_peers",
                reason=reason,
                evidence=list(dict.fromkeys(_progress_there(job, one) for one in awaited)),
                phase=who.phase,
                since_s=_since(who),
                collective=job.name(first.channel, first.collective),
            )
        )
    return found


def unfinished_alone(case: Case, before: Sequence[Accusation]) -> list[Accusation]:
    """Accuse a rank that is still in a collective which every other rank of the group has finished. Assumes that
    evidence of all ranks was taken within the time a collective takes, or while nothing moved.
    """
    job = case.job
    return [
        Accusation(
            rank=one.rank,
            kind="stuck_inside",
            rule="unfinished_alone",
            reason=f"it is still in {_in_collective(job, one)}, which all others have finished",
            evidence=[_progress_there(job, one)],
            phase=job.ranks[one.rank].phase,
            since_s=job.ranks[one.rank].age_s(one.collective.issued_ns),
            collective=job.name(one.channel, one.collective),
        )
        for one in case.waits.open
        if not one.behind
        and not one.unknown
        and one.channel.sender is None
        and one.channel.group in job.listed
        and len(job.members(one.channel)) > 1
        and not case.is_held(one)
        and not (_ranks(before) & set(job.members(one.channel)))
        and all(
            job.ranks[other].front(one.channel) > one.collective.number
            for other in job.members(one.channel)
            if other != one.rank
        )
    ]


def busy_elsewhere(case: Case, before: Sequence[Accusation]) -> list[Accusation]:
    """Accuse, beside another cause, a rank that waits for nobody and makes no progress in a phase of its own, though
    nobody waits for it yet. Assumes that a healthy rank of a job that hangs waits in a collective.
    """
    if not before:
        return []
    # For half as long as one that is accused, as far as times are known.
    times = [still_s for one in before if (still_s := case.job.ranks[one.rank].still_s) is not None]
    least_s = min(times, default=0.0) / 2
    return [
        _stuck_outside(rank, "busy_elsewhere", f"it is in {rank.phase} and waits for nobody")
        for rank in case.job.ranks.values()
        if rank.rank not in _ranks(before)
        and not rank.gone
        and rank.complete
        and rank.is_elsewhere
        and rank.still_s is not None
        and rank.still_s >= least_s
    ]


def nobody_waits(case: Case, before: Sequence[Accusation]) -> list[Accusation]:
    """Accuse each rank that is in a step, where no rank has a collective open and none makes progress. Assumes that the
    ages of the evidence are known, and were judged to be long.
    """
    if before or case.waits.open or case.job.missing:
        return []
    return [
        _stuck_outside(rank, "nobody_waits", f"it is in {rank.phase}, and nobody waits in a collective")
        for rank in case.job.ranks.values()
        if not rank.gone and rank.phase is not None and rank.still_s is not None
    ]


RULES: Final[tuple[Rule, ...]] = (
    dead,
    stopped,
    signature_mismatch,
    order_swapped,
    behind_its_peers,
    unfinished_alone,
    busy_elsewhere,
    nobody_waits,
)
"""Facts about processes first, then disagreement, then waiting, then what only other findings make suspicious."""


def _ended_first(job: JobEvidence, waited_for: Sequence[int]) -> list[Rank]:
    """Return the ranks that ended by themselves: by a signal that no launcher sends or with an error of their own; else
    the only one that failed, or those that failed while others run, or those that the running ranks wait for.

    Args:
        waited_for: ranks that others wait for and that wait for nobody.
    """
    ended, own = [rank for rank in job.ranks.values() if rank.has_ended], list[Rank]()
    for rank in ended:
        if rank.exit is None or (rank.exit.exit_code or 0) >= SIGNAL_EXIT_BASE:
            continue  # it ended in order, as a signal asked it to
        if rank.exit.signal is not None:
            own += [rank] if rank.exit.signal not in _ASKED_TO_END else []
        elif rank.exit.exception is not None and not rank.lost_a_peer:
            own.append(rank)
    if own:
        return own
    if job.missing:
        return []  # one of them may have ended first
    running = any(not rank.has_ended for rank in job.ranks.values())
    failed = [one for one in ended if (one.exit is None or one.exit.exit_code != 0) and not one.lost_a_peer]
    if not running:
        return failed if len(failed) == 1 else []
    by_signal = [rank for rank in failed if rank.exit is not None and rank.exit.signal is not None]
    return by_signal or failed or [rank for rank in ended if rank.rank in waited_for]


def _stuck_outside(rank: Rank, rule: str, reason: str) -> Accusation:
    return Accusation(
        rank=rank.rank,
        kind="stuck_outside",
        rule=rule,
        reason=reason,
        evidence=[f"last seen {_where(rank)}"],
        phase=rank.phase,
        since_s=_since(rank),
    )


def _is_inside(job: JobEvidence, waits: WaitGraph, rank: int) -> bool:
    """Return whether a rank that waits for nobody is in a collective that all members issued, and begun if any."""
    return any(
        not any(
            is_behind(job.ranks[rank], one.channel, other.collective)
            for other in waits.open
            if other.channel == one.channel
        )
        for one in waits.of_rank(rank)
        if not one.behind and not one.unknown and not job.ranks[rank].is_elsewhere
        if len(job.members(one.channel)) > 1 or one.channel.group not in job.listed  # alone, it waits for its device
    )


def _ranks(accusations: Iterable[Accusation]) -> set[int]:
    return {one.rank for one in accusations}


def _where(rank: Rank) -> str:
    step = f"in step {rank.step}" if rank.step is not None else ""
    phase = f"in {rank.phase}" if rank.phase is not None else ""
    count = f"after {len(rank.collectives)} collectives" if rank.collectives else "before any collective"
    return ", ".join(filter(None, (step, phase, count)))


def _in_collective(job: JobEvidence, one: OpenCollective) -> str:
    return str(job.name(one.channel, one.collective))


def _missing_on(job: JobEvidence, rank: int, one: OpenCollective) -> str:
    name = job.name(one.channel, one.collective)
    if one.channel.sender is None:
        return str(name)
    kind, other = ("send", one.channel.receiver) if one.channel.sender == rank else ("recv", one.channel.sender)
    return f"{structs.replace(name, kind=kind)} ({'to' if kind == 'send' else 'from'} rank {other})"


def _progress_there(job: JobEvidence, one: OpenCollective) -> str:
    issued: dict[int, list[int]] = {}
    for member in job.members(one.channel):
        if member in job.ranks:
            issued.setdefault(max(job.ranks[member].channels.get(one.channel, {}), default=-1) + 1, []).append(member)
    group = job.groups[one.channel.group]
    said = "; ".join(f"{name_ranks(ranks)}: {count}" for count, ranks in sorted(issued.items()))
    return f"issued in {group_label(group.name, group.description)}: {said}"


def _since(rank: Rank) -> float | None:
    return rank.age_s(rank.phase_since_ns if rank.phase_since_ns is not None else rank.progress_ns)


def _shape(one: CollectiveEvidence) -> tuple[object, ...]:
    return one.kind, one.bytes, one.dtype, one.input_sizes


def _odd_ones(job: JobEvidence, open_there: dict[int, OpenCollective]) -> list[int]:
    as_before = {
        rank: conforms(job.ranks[rank], one.channel, one.collective.number) for rank, one in open_there.items()
    }
    for waiting, one in open_there.items():
        for rank in one.behind & set(open_there):
            if passed_by(job.ranks[rank], job.ranks[waiting], one.channel, one.collective.number):
                as_before[rank] = False
    departed = [rank for rank, same in as_before.items() if same is False]
    if departed and all(same for rank, same in as_before.items() if rank not in departed):
        unseen = len(job.missing)  # who may have departed as well
        return departed if 2 * (len(departed) + unseen) <= len(as_before) + unseen else []
    camps: dict[object, list[int]] = {}
    for rank, one in open_there.items():
        camps.setdefault((one.channel, one.collective.number), []).append(rank)
    largest = max(camps.values(), key=len)
    most = 2 * len(largest) > len(open_there) and len(largest) > 1 and not job.missing
    return sorted(set(open_there) - set(largest)) if most and not departed else []
