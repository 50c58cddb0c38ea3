"""From the evidence of all ranks to a verdict.

    verdict = judge(evidence)
    verdict.culprits[0].reason

In a job that makes progress, slow ranks are those that others wait for now, for longer than a healthy step makes them,
or else those that were late several times before. Must not read files, or depend on the order of the evidence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

from aorta.autopsy.evidence import (
    ENDED_IN_ORDER,
    Accusation,
    Kind,
    RankDoing,
    RankEvidence,
    Verdict,
    WaitingRanks,
)
from aorta.autopsy.job import Channel, JobEvidence, OpenCollective, Rank, channel_of
from aorta.autopsy.joining import join
from aorta.autopsy.rules import Case, accuse, camps_of, is_inside, phase_label
from aorta.command_line import name_ranks
from aorta.version import __version__

NEXT: Final[dict[Kind, tuple[str, ...]]] = {
    "not_stuck": ("If it hangs nevertheless, take the evidence again a minute later and compare.",),
    "slow": ("Compare the ranks' steps with `aorta report`: it names stragglers and what they do.",),
    "dead": (
        "Read the end of that rank's log, and the kernel's for out of memory (`dmesg -T | grep -i oom`).",
        "Start again from the last checkpoint; the other ranks only lost their peer.",
    ),
    "stopped": ("Continue it (`kill -CONT PID`), or detach the debugger; the others go on then.",),
    "signature_mismatch": (
        "Compare the lines that issued it: a branch, a shape or a dtype there depends on the rank.",
    ),
    "order_swapped": ("Issue collectives in one order on all ranks: look for a branch or a set that differs by rank.",),
    "stuck_outside": ("Look at its stack (--stacks, or `py-spy dump --pid PID`): it is not in a collective.",),
    "rank_did_not_join": (
        "Look at its stack (`py-spy dump --pid PID`), or record with AORTA to learn its phase.",
        "Look for a branch that skips the collective on this rank.",
    ),
    "stuck_inside": (
        "Look at the link or device: `dmesg`, NIC counters, `nvidia-smi` or `rocm-smi`; ask RAS (--ras).",
        "With NCCL, start again with NCCL_DEBUG=INFO, and with TORCH_NCCL_ENABLE_TIMING=1: dumps then tell whose "
        "device has not begun it.",
    ),
    "cannot_decide": (
        "Get evidence of the missing or suspected ranks: record the run, or dump their Flight Recorder.",
    ),
}
"""What to do next, by what happened; `PID` stands for that of the accused rank."""
_AT_ANY_MOMENT: Final = ("dead", "stopped", "signature_mismatch")
"""Rules that accuse rightly also where something moves."""
_LONG_WAIT_S: Final = 1.0
"""A shorter wait is part of a healthy step."""
_RECENT_S: Final = 60.0
_TIMES: Final = 2
"""How often a rank must have come late, lately: once is an incident."""


def judge(evidence: Iterable[RankEvidence], *, stuck_after_s: float | None = None) -> Verdict:
    """Say why a job makes no progress.

    Args:
        evidence: of each rank, by any number of sources, in any order.
        stuck_after_s: a rank that made progress within so many seconds before its evidence was taken is not stuck, and
            then nothing is. None: the job is taken to be stuck.

    Returns:
        The verdict. Its culprits do not depend on the order of evidence; without that of some ranks, culprits may
        become suspects.
    """
    job = join(evidence)
    case = Case.of(job)
    if job.ranks and not job.missing and all(rank.finished for rank in job.ranks.values()):
        running = [rank.rank for rank in job.ranks.values() if rank.state in ("running", "stopped")]
        since = f"what {name_ranks(running)} did since is not recorded"
        return Verdict(
            aorta_version=__version__,
            kind="not_stuck",
            summary=f"the run finished normally; {since if running else 'nothing to diagnose'}",
            ranks=[_doing(case, rank) for rank in job.ranks.values()],
            contradictions=list(job.contradictions),
        )
    accused, suspects = accuse(case), list[int]()
    moves = stuck_after_s is not None and any(
        rank.still_s is not None and rank.still_s < stuck_after_s for rank in job.ranks.values() if not rank.gone
    )
    if stuck_after_s is not None and moves:
        slow, late_together = _slow_ranks(case, accused, stuck_after_s)
        accused = [charge for charge in accused if charge.rule in _AT_ANY_MOMENT] or slow
        suspects = [] if accused else late_together
        kind: Kind = accused[0].kind if accused else "cannot_decide" if suspects else "not_stuck"
    elif accused:
        kind = accused[0].kind
    else:
        kind, suspects = _without_culprit(case)
    waits = _chain(case, [charge.rank for charge in accused], some=moves)
    notes = [*job.notes, *(f"rank {rank.rank}: {reason}" for rank in job.ranks.values() for reason in rank.torn)]
    if kind == "cannot_decide" and (unseen := [rank.rank for rank in job.ranks.values() if rank.may_wait]):
        notes.insert(0, f"no source says which collectives of {name_ranks(unseen)} have completed")
    elif kind == "cannot_decide" and _none_begun(case):
        notes.insert(0, "no device has begun it: look at what devices run before it")
    if unlisted := sorted(str(group) for name, group in job.groups.items() if name not in job.listed and group.ranks):
        notes.append(f"no source lists the ranks of {', '.join(unlisted)}: taken for those that used it")
    advice = []
    for topic in dict.fromkeys([kind, *(charge.kind for charge in accused)]):
        pids = [pid for charge in accused if charge.kind == topic and (pid := job.ranks[charge.rank].pid) is not None]
        advice += [line.replace("PID", str(pids[0])) if pids else line for line in NEXT[topic]]
    return Verdict(
        aorta_version=__version__,
        kind=kind,
        summary=_summary(kind, accused, suspects, waits, case),
        culprits=accused,
        suspects=suspects,
        waits=waits,
        ranks=[_doing(case, rank) for rank in job.ranks.values()],
        missing=job.missing,
        contradictions=list(job.contradictions),
        notes=notes,
        next=advice,
    )


def _without_culprit(case: Case) -> tuple[Kind, list[int]]:
    job, waits = case.job, case.waits
    unknown = {rank for wait in waits.open for rank in wait.unknown if not job.ranks[wait.rank].gone}
    dead = {rank.rank for rank in job.ranks.values() if rank.failed}
    if dead and (waits.open or job.missing):
        unknown |= dead | set(job.missing)
    late = set[int]()
    for rank in job.ranks.values():
        # Where nobody saw what a device has completed, its host may be late, or wait for it in what all have issued.
        if any(op.state == "unseen" for op in rank.collectives) and any(
            rank.rank in job.members(channel)
            and not rank.has_issued(channel, max(issued))
            and not rank.may_lack(channel, issued[max(issued)])
            for other in job.ranks.values()
            for channel, issued in other.channels.items()
        ):
            late.add(rank.rank)
    undecided = {rank for clash in case.mismatches if not clash.accused for rank in clash.issued}
    if not job.missing and all(rank.complete for rank in job.ranks.values()):
        if undecided:
            return "signature_mismatch", sorted(undecided)
        if waits.circles:
            return "order_swapped", sorted(frozenset().union(*waits.circles))
        if waits.roots and all(is_inside(job, waits, rank) for rank in waits.roots):
            return "stuck_inside", []
    for suspects in (
        undecided.union(*waits.circles),
        unknown,
        {rank.rank for rank in job.ranks.values() if rank.unresponsive},
        late,
        # They have not issued what others wait in, and no rule says why.
        {rank for wait in waits.open for rank in wait.behind},
        {rank.rank for rank in job.ranks.values() if rank.unreadable},
    ):
        if suspects:
            return "cannot_decide", sorted(suspects)
    if _none_begun(case):
        return "cannot_decide", sorted({wait.rank for wait in waits.open})
    if any(wait.channel.group in job.listed or wait.channel.sides for wait in waits.open):
        return "stuck_inside", []
    whole = job.ranks and not job.missing and all(rank.complete and not rank.may_wait for rank in job.ranks.values())
    return ("not_stuck" if whole and not waits.open and not dead else "cannot_decide"), []


def _none_begun(case: Case) -> bool:
    """Return whether ranks wait for no rank, and no device has begun what they wait in, where that is seen."""
    return bool(case.waits.open) and all(
        wait.collective.state == "issued"
        and case.job.ranks[wait.rank].device_seen_ns is not None
        and not (wait.behind or wait.unknown)
        for wait in case.waits.open
    )


def _slow_ranks(
    case: Case, accusations: Sequence[Accusation], stuck_after_s: float
) -> tuple[list[Accusation], list[int]]:
    """Return the ranks that hold up a job which makes progress, and suspects where that is not decided.

    Of several ranks that are late at once and half of the job or more, none departs from its peers: rather is their
    host busy. `accusations` is what the rules say of the job as if it hung.
    """
    now = []  # of a rank that just made progress it is not known whether others wait for it, unless they do so for long
    for charge in accusations:
        rank = case.job.ranks[charge.rank]
        ages = [
            case.job.ranks[wait.rank].age_s(wait.collective.issued_ns) or 0.0
            for wait in case.waits.open
            # Hosts issue ahead: for how long a device has waited for that of this rank is not known.
            if charge.rank in wait.behind
            and ((own := rank.open(wait.channel)) is None or own.number != wait.collective.number)
        ]
        waited_s = max(ages, default=0.0)
        late = min(rank.still_s or 0.0, waited_s) >= _LONG_WAIT_S or waited_s >= stuck_after_s
        if charge.rule == "behind_its_peers" and late:
            charge.kind, charge.since_s = "slow", max(charge.since_s or 0.0, waited_s)
            now.append(charge)
    if now and (len(now) == 1 or 2 * len(now) < len(case.job.ranks)):
        return now, []
    lately = _late_lately(case.job)
    return lately, [] if lately else sorted(charge.rank for charge in now)


def _late_lately(job: JobEvidence) -> list[Accusation]:
    """Return the ranks that spent longer than all of their peers before they issued a collective, at least `_TIMES`
    lately. Compares durations within ranks, so that their clocks need not agree; assumes that peers do the same work
    between two collectives.
    """
    late = defaultdict[int, list[float]](list)
    before = {rank.rank: _seconds_before(rank) for rank in job.ranks.values()}
    for channel in job.channels:
        members = job.members(channel)
        if channel.sides or len(members) < 2 or any(rank not in job.ranks for rank in members):
            continue
        for number in set.intersection(*(set(job.ranks[rank].channels.get(channel, {})) for rank in members)):
            seconds = {rank: before[rank].get((channel, number)) for rank in members}
            known = sorted((spent, rank) for rank, spent in seconds.items() if spent is not None)
            if len(known) == len(members) and known[-1][0] - known[-2][0] > _LONG_WAIT_S:
                late[known[-1][1]].append(known[-1][0] - known[-2][0])
    return [
        Accusation(
            rank=rank,
            kind="slow",
            rule="late_lately",
            reason=f"was {min(times):.1f} s or more later than its peers in {len(times)} collectives lately",
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
    recent = [op for op in rank.collectives if (age_s := rank.age_s(op.issued_ns)) is not None and age_s <= _RECENT_S]
    if any(op.state == "completed" and op.completed_ns is None for op in recent):
        return {}
    events = sorted({time for op in recent for time in (op.issued_ns, op.completed_ns) if time is not None})
    earlier = dict(pairwise(reversed(events)))
    return {
        (channel_of(op, rank.rank), op.number): (op.issued_ns - earlier[op.issued_ns]) / 1e9
        for op in recent
        if op.issued_ns is not None and op.issued_ns in earlier
    }


def _chain(case: Case, culprits: Sequence[int], *, some: bool) -> list[WaitingRanks]:
    """Return who waits for whom, those next to a culprit first; of `some` that are in a collective, it is not known."""
    distance = case.waits.waiters(culprits)
    joined: dict[tuple[object, ...], list[OpenCollective]] = {}
    for wait in case.waits.open:
        if case.waits.blockers.get(wait.rank) or case.waits.unknown.get(wait.rank) or not (some and culprits):
            op = wait.collective
            joined.setdefault((wait.channel, op.number, op.kind, op.bytes), []).append(wait)
    waits = []
    for several in joined.values():
        ages = [case.job.ranks[wait.rank].age_s(wait.collective.issued_ns) for wait in several]
        awaited, here = set().union(*(wait.behind | wait.unknown for wait in several)), {wait.rank for wait in several}
        waits.append(
            WaitingRanks(
                ranks=sorted(here - awaited or here),
                for_ranks=sorted(awaited),
                collective=case.job.name(several[0].channel, several[0].collective),
                since_s=max((age for age in ages if age is not None), default=None),
            )
        )
    return sorted(waits, key=lambda wait: (min(distance.get(rank, len(distance)) for rank in wait.ranks), wait.ranks))


def _doing(case: Case, rank: Rank) -> RankDoing:
    waits = case.waits.of_rank(rank.rank)  # what is seen to be held up, before what was only issued
    last = max(waits, key=lambda wait: (bool(wait.behind), wait.collective.issued_ns or 0), default=None)
    doing, since_s, name = "in no collective", rank.age_s(rank.phase_since_ns), None
    if rank.gone:
        since_s = rank.still_s if rank.state == "stopped" else None
        doing = rank.state if rank.state in ("dead", "stopped") else "ending" if rank.has_ended else "no answer"
        if rank.finished:
            doing = ENDED_IN_ORDER
    elif last is not None and not rank.is_elsewhere:
        name = case.job.name(last.channel, last.collective)
        doing, since_s = f"in {name}", rank.age_s(last.collective.issued_ns)
    elif rank.phase is not None:
        doing = f"in {phase_label(rank.phase)}"
    elif rank.may_wait:
        doing = "in a collective, or in none"
    elif rank.torn:
        doing = f"evidence unreadable: {rank.torn[0]}"
    return RankDoing(
        rank=rank.rank,
        state=rank.state,
        doing=doing,
        step=rank.step,
        phase=rank.phase,
        since_s=since_s,
        collective=name,
        host=rank.host,
        pid=rank.pid,
        sources=list(rank.sources),
        stack=list(rank.stacks[0].frames) if rank.stacks else [],
        other_stacks=list(rank.stacks[1:]),
    )


def _summary(
    kind: Kind,
    accused: Sequence[Accusation],
    suspects: Sequence[int],
    waits: Sequence[WaitingRanks],
    case: Case,
) -> str:
    job = case.job
    if kind == "not_stuck":
        return "nothing is stuck: no rank waits for longer than usual"
    if kind == "stuck_inside" and not accused:
        where = ", ".join(list(dict.fromkeys(str(wait.collective) for wait in waits if not wait.for_ranks))[:2])
        done = {
            rank.rank
            for rank in job.ranks.values()
            for wait in case.waits.open
            if rank.front(wait.channel) > wait.collective.number
        }
        which = f"has completed on {name_ranks(sorted(done))} only" if done else "does not complete"
        return f"all of its ranks issued {where}, which {which}: a link, a device or the library"
    if kind in ("signature_mismatch", "order_swapped") and not accused:
        camps = [camp for clash in case.mismatches if not clash.accused for camp in camps_of(clash)]
        met = f"met with different collectives ({'; '.join([*camps[:4], *(['...'] if camps[4:] else [])])})"
        what = "wait for each other in a circle" if kind == "order_swapped" else met
        return f"{name_ranks(suspects)} {what}, and nothing tells which of them is odd"
    if kind == "cannot_decide":
        if job.ranks and all(rank.unreadable for rank in job.ranks.values()):
            return f"no evidence can be read: {next(iter(job.ranks.values())).torn[0]}"
        if job.ranks and not job.missing and all(rank.has_ended for rank in job.ranks.values()):
            return f"{name_ranks(list(job.ranks))} ended, and nothing tells which of them first, or why"
        if suspects:
            among = "suspected is" if len(suspects) == 1 else "the cause is among"
            return f"the evidence does not decide; {among} {name_ranks(suspects)}"
        return "the evidence does not decide" if job.ranks else "there is no evidence of any rank"
    parts = []
    for charge in accused:
        time = "" if charge.since_s is None else f", for {charge.since_s:.0f} s"
        parts.append(f"{process_label(job.ranks[charge.rank])} {charge.reason}{time}")
    if others := sorted({rank for wait in waits for rank in wait.ranks} - {charge.rank for charge in accused}):
        parts.append(f"{name_ranks(others)} wait{'s' if len(others) == 1 else ''}")
    return "; ".join(parts)


def process_label(rank: Rank | RankDoing) -> str:
    """Return a rank and where its process is, as far as evidence says: `rank 3 (PID 4711 on node3)`."""
    where = [] if rank.pid is None else [f"PID {rank.pid}"]
    where += [] if rank.host is None else [f"on {rank.host}"]
    return f"rank {rank.rank} ({' '.join(where)})" if where else f"rank {rank.rank}"
