"""The rules that accuse ranks, each a small function with the assumption it makes; `RULES` is their order.

    accusations = accuse(Case.of(job))

A rule sees which ranks the ones before it accused, and accuses no rank twice. No rule accuses a rank because evidence
of it is missing: such ranks become suspects in `aorta.autopsy.judge`.

Must not read files, or look at the clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from msgspec import structs

from aorta.autopsy.disagreement import Mismatch, conforms, mismatches, passed_by, place
from aorta.autopsy.evidence import Accusation, Aspect, CollectiveEvidence, Kind
from aorta.autopsy.job import Channel, JobEvidence, OpenCollective, Rank, WaitGraph
from aorta.command_line import name_ranks

_ASKED_TO_END: Final = ("SIGTERM", "SIGINT", "SIGHUP")
"""Signals with which launchers end the other ranks after one has failed."""
_GIVING_UP: Final = ("destroy_process_group", "_shutdown_backend", "_abort_process_group")
"""Functions of torch in which a rank gives up its process groups."""

_DISTRIBUTED: Final = "/torch/distributed/distributed_c10d.py:"
"""In frames that communicate, and may do so in ways that no source counts: `monitored_barrier`."""


@dataclass(frozen=True)
class Case:
    """What the rules look at."""

    job: JobEvidence
    waits: WaitGraph
    mismatches: tuple[Mismatch, ...]

    @classmethod
    def of(cls, job: JobEvidence) -> Case:
        clashes = tuple(mismatches(job))
        return cls(job, WaitGraph.of(job) if clashes else _in_order(job, WaitGraph.of(job)), clashes)

    def is_held(self, wait: OpenCollective) -> bool:
        """Return whether a mismatch in its channel, at its number or before, explains an open collective."""
        return any(
            clash.channel == wait.channel and clash.number <= wait.collective.number for clash in self.mismatches
        )

    def accusation(
        self,
        rank: int,
        kind: Kind,
        reason: str,
        evidence: Sequence[str],
        *,
        held_up: OpenCollective | None = None,
        since_s: float | None = None,
        aspect: Aspect | None = None,
    ) -> Accusation:
        return Accusation(
            rank=rank,
            kind=kind,
            rule="",  # which `accuse` fills in
            reason=reason,
            evidence=list(evidence),
            aspect=aspect,
            phase=self.job.ranks[rank].phase,
            since_s=since_s,
            collective=None if held_up is None else self.job.name(held_up.channel, held_up.collective),
        )


def _in_order(job: JobEvidence, waits: WaitGraph) -> WaitGraph:
    """Return who waits if devices run what is open in the order of issue, where nobody waits otherwise and that makes a
    circle with a rank that departs from its past; else the graph as it is.
    """
    first: dict[int, OpenCollective] = {}
    for wait in sorted(waits.open, key=lambda wait: place(job.ranks[wait.rank], wait.channel, wait.collective.number)):
        first.setdefault(wait.rank, wait)
    behind: dict[tuple[Channel, int], frozenset[int]] = defaultdict(frozenset)
    for wait in waits.open:
        if wait is not first[wait.rank] and wait.collective.state == "issued":
            behind[wait.channel, wait.collective.number] |= {wait.rank}
    queued = {rank: replace(w, behind=behind[w.channel, w.collective.number]) for rank, w in first.items()}
    ordered = WaitGraph(tuple(queued.values()), {rank: wait.behind for rank, wait in queued.items()}, {})
    odd = {rank for rank, w in first.items() if conforms(job.ranks[rank], w.channel, w.collective.number) is False}
    waited = any(waits.blockers.values()) or any(waits.unknown.values())
    return ordered if not waited and any(circle & odd for circle in ordered.circles) else waits


Rule: TypeAlias = Callable[[Case, set[int]], Iterator[Accusation]]
"""Of a case and the ranks accused before."""


def accuse(case: Case) -> list[Accusation]:
    """Apply all rules."""
    accusations: list[Accusation] = []
    for rule in RULES:
        accusations += [
            structs.replace(charge, rule=rule.__name__)
            for charge in rule(case, {charge.rank for charge in accusations})
        ]
    return accusations


def dead(case: Case, _accused: set[int]) -> Iterator[Accusation]:
    """Accuse each process that ended by itself: when one rank dies, its launcher and broken connections end the others.
    Assumes that ranks which ended on a launcher's signal, or with an error that names a lost connection or a timeout,
    did so because of another cause, if there is one, and that a rank which met a mismatch was ended by it unless it was
    killed: gloo aborts there.
    """
    met = {rank for clash in case.mismatches for rank in clash.issued}
    for rank in _ended_first(case.job, case.waits):
        if rank.rank not in met or (rank.exit is not None and rank.exit.signal == "SIGKILL"):
            verb = "ended" if rank.state == "dead" else "left its recorded program" if rank.finished else "is ending"
            reason = f"{verb}{rank.exit or ''}"
            yield case.accusation(rank.rank, "dead", reason, [_last_seen(rank)])


def _ended_first(job: JobEvidence, waits: WaitGraph) -> list[Rank]:
    """Return the ranks that ended by themselves: by a signal that no launcher sends or with an error of their own; else
    the only one that failed, or those that failed while others run, or those that others wait for. SIGKILL of all, but
    for those that had left the others waiting, is a launcher's as well: none of them ended first.
    """
    ended, own = [rank for rank in job.ranks.values() if rank.has_ended], list[Rank]()
    behind = set().union(*(wait.behind for wait in waits.open))
    left = [rank for rank in ended if rank.finished and rank.rank in behind]
    killed = [rank for rank in ended if rank.state == "dead" and rank.is_silent]
    together = len(left) + len(killed) == len(job.ranks) and len(killed) + len(job.missing) > 1
    for rank in ended:
        if rank.exit is None or rank.was_asked_to_end:
            continue
        if rank.exit.signal is not None:
            own += [rank] if rank.exit.signal not in _ASKED_TO_END and not together else []
        elif rank.exit.exception is not None and not rank.lost_a_peer:
            own.append(rank)
    if own or job.missing:  # one of the missing ranks may have ended first
        return own
    if together:
        return left
    awaited = [rank for rank in ended if rank.rank in waits.roots and not rank.lost_a_peer]
    failed = [rank for rank in ended if rank.failed and not rank.lost_a_peer]
    if len(ended) == len(job.ranks):
        return (failed if len(failed) == 1 else []) if failed else awaited
    failed = [rank for rank in failed if not rank.was_asked_to_end]
    by_signal = [rank for rank in failed if rank.exit is not None and rank.exit.signal is not None]
    return by_signal or failed or awaited


def stopped(case: Case, accused: set[int]) -> Iterator[Accusation]:
    """Accuse each process that a signal or a debugger has stopped. Assumes that healthy ranks are not stopped."""
    for rank in case.job.ranks.values():
        if rank.state == "stopped" and rank.rank not in accused:
            reason = "is stopped by a signal or a debugger"
            yield case.accusation(rank.rank, "stopped", reason, [_last_seen(rank)], since_s=rank.still_s)


def signature_mismatch(case: Case, accused: set[int]) -> Iterator[Accusation]:
    """Accuse ranks that met the others in one collective with another kind, size or type of data: the one that departs
    from its own past while the others follow theirs, or else the minority of a group of which most agree; with two
    equal camps, nobody. Assumes that all-to-alls, gathers and scatters may differ in size.
    """
    for clash in case.mismatches:
        group = case.job.groups[clash.channel.group]
        for rank in clash.accused:
            if rank in accused:
                continue
            own = OpenCollective(rank, clash.channel, clash.issued[rank], frozenset(), frozenset())
            others = sorted(set(clash.issued) - set(clash.accused))
            reason = (
                f"issued {_described(own.collective, clash.aspect)} as number {clash.number} of {group}, "
                f"{name_ranks(others)} {_described(clash.issued[others[0]], clash.aspect)}"
            )
            if clash.swapped:
                reason += ": it swapped the two"
            elif clash.ahead:
                reason += ": it skipped one collective or swapped two"
            kind: Kind = "order_swapped" if clash.swapped else "signature_mismatch"
            yield case.accusation(rank, kind, reason, camps_of(clash), held_up=own, aspect=clash.aspect)


def camps_of(clash: Mismatch) -> list[str]:
    """Return which ranks issued what, and where, a sentence for each."""
    issued = [(name_ranks(camp), clash.issued[camp[0]]) for camp in clash.camps.values()]
    lines = ["" if op.issued_by is None else f", issued at {op.issued_by}" for _, op in issued]
    return [f"{who}: {_described(op, clash.aspect)}{line}" for (who, op), line in zip(issued, lines, strict=True)]


def order_swapped(case: Case, accused: set[int]) -> Iterator[Accusation]:
    """Accuse ranks that wait for each other in a circle, having issued collectives in different orders or groups: those
    whose open collective is not what their past lets one expect where it is on all others, or else the minority where
    most of the circle is in one collective. Assumes that a rank waits for what it has open.
    """
    job, waits = case.job, case.waits
    for circle in waits.circles:
        if circle & accused or any(case.is_held(wait) for rank in circle for wait in waits.of_rank(rank)):
            continue
        open_there = {
            rank: max(  # of several the last one, in which it waits
                (wait for wait in waits.of_rank(rank) if wait.behind & circle),
                key=lambda wait: wait.collective.issued_ns or 0,
            )
            for rank in sorted(circle)
        }
        for rank in _odd_in_circle(job, open_there):
            wait = open_there[rank]
            awaited = [other for other in open_there.values() if rank in other.behind]
            if not awaited:
                continue  # others wait for it in what they issued before: it is in the circle, and not odd in it
            shape = _shape(wait.collective)
            twin = next((other for other in awaited if _shape(other.collective) == shape), None)
            wrong_group = twin is not None and twin.channel.group != wait.channel.group
            own, theirs = (str(job.name(held.channel, held.collective)) for held in (wait, awaited[0]))
            reason = (
                f"issued {own} where {name_ranks(sorted(circle - {rank}))} issued the same in {theirs}"
                if wrong_group
                else f"waits in {own} for ranks that wait for it in {theirs}"
            )
            yield case.accusation(
                rank,
                "signature_mismatch" if wrong_group else "order_swapped",
                reason,
                [f"{name_ranks(sorted(circle))} wait for each other in a circle"],
                held_up=awaited[0],
                since_s=job.ranks[rank].age_s(wait.collective.issued_ns),
                aspect="group" if wrong_group else None,
            )


def _shape(op: CollectiveEvidence) -> tuple[object, ...]:
    return op.kind, op.bytes, op.dtype, op.input_sizes


def _odd_in_circle(job: JobEvidence, open_there: dict[int, OpenCollective]) -> list[int]:
    as_before = {
        rank: conforms(job.ranks[rank], held.channel, held.collective.number) for rank, held in open_there.items()
    }
    for held in open_there.values():
        for rank in held.behind & set(open_there):
            if passed_by(job, rank, held):
                as_before[rank] = False
    departed = [rank for rank, same in as_before.items() if same is False]
    if departed and all(same for rank, same in as_before.items() if rank not in departed):
        unseen = len(job.missing)  # who may have departed as well
        return departed if 2 * (len(departed) + unseen) <= len(as_before) + unseen else []
    camps: dict[object, list[int]] = defaultdict(list)
    for rank, held in open_there.items():
        camps[held.channel, held.collective.number].append(rank)
    largest = max(camps.values(), key=len)
    most = 2 * len(largest) > len(open_there) and len(largest) > 1 and not job.missing
    return sorted(set(open_there) - set(largest)) if most and not departed else []


def behind_its_peers(case: Case, accused: set[int]) -> Iterator[Accusation]:
    """Accuse a rank that waits for nobody and that others wait for, directly or through ranks that wait themselves.
    Assumes that a rank whose list of collectives is whole has issued none that is not on it. A rank that is in a
    collective with all of its peers is not accused, unless it departed from its past and skipped what is waited for:
    what holds them all up is there.
    """
    job, waits = case.job, case.waits
    for number in waits.roots:
        rank = job.ranks[number]
        awaited = [wait for wait in waits.open if number in wait.behind and not case.is_held(wait)]
        skipped = any(passed_by(job, number, wait) for wait in awaited)
        if number in accused or not awaited or (is_inside(job, waits, number) and not skipped):
            continue
        if all(
            2 * len(wait.behind) > len(job.members(wait.channel))
            and conforms(job.ranks[wait.rank], wait.channel, wait.collective.number) is False
            for wait in awaited
        ):
            continue  # rather did few issue what their past does not have than most leave it out
        # Dumps have no ages; then what fewest others are behind in says most of this one.
        first = max(
            awaited, key=lambda wait: (job.ranks[wait.rank].age_s(wait.collective.issued_ns) or 0.0, -len(wait.behind))
        )
        own, awaited_name = rank.open(first.channel), job.name(first.channel, first.collective)
        missing = str(awaited_name)
        if first.channel.sides:
            sends = first.channel.sides[0] == number
            other = first.channel.sides[sends]
            missing = f"{structs.replace(awaited_name, kind='send' if sends else 'recv')} "
            missing += f"({'to' if sends else 'from'} rank {other})"
        peers = name_ranks(sorted({wait.rank for wait in awaited}))
        frames = () if not rank.stacks else rank.stacks[0].frames
        giving_up = next((name for name in _GIVING_UP if any(frame.endswith(f" {name}") for frame in frames)), None)
        kind: Kind = "rank_did_not_join"
        if own is not None and own.number == first.collective.number:
            reason = f"issued {awaited_name}, and its device has not begun it; {peers} began it"
        elif own is not None and rank.has_issued(first.channel, first.collective.number):
            kind, reason = "stuck_inside", f"is still in {job.name(first.channel, own)}, which {peers} have finished"
        elif rank.has_ended:
            left = "left its recorded program"
            if rank.state == "dead":
                kind, left = "dead", "ended"
            reason = f"{left}{rank.exit or ''} and has not issued {missing}"
        elif rank.phase is not None or giving_up is not None:
            kind, reason = "stuck_outside", f"is in {phase_label(rank.phase or giving_up)} and has not issued {missing}"
        elif rank.unresponsive:
            reason = f"does not answer NCCL's RAS, and {peers} wait in {awaited_name}"
        else:
            reason = f"has not issued {missing}"
        evidence = list(dict.fromkeys(_progress_there(job, wait) for wait in awaited))
        yield case.accusation(number, kind, reason, evidence, held_up=first, since_s=_since_s(rank))


def is_inside(job: JobEvidence, waits: WaitGraph, rank: int) -> bool:
    """Return whether a rank that waits for nobody is in a collective that all members issued, and begun if any."""
    if job.ranks[rank].is_elsewhere:
        return False
    for wait in waits.of_rank(rank):
        alone = len(job.members(wait.channel)) <= 1 and wait.channel.group in job.listed  # it waits for its device
        there = [other.collective for other in waits.open if other.channel == wait.channel]
        if not (
            wait.behind or wait.unknown or alone or any(job.ranks[rank].is_behind(wait.channel, of) for of in there)
        ):
            return True
    return False


def unfinished_alone(case: Case, accused: set[int]) -> Iterator[Accusation]:
    """Accuse a rank that is still in a collective which every other rank of the group has finished. Assumes that
    evidence of all ranks was taken within the time a collective takes, or while nothing moved.
    """
    job = case.job
    for wait in case.waits.open:
        rank, members = job.ranks[wait.rank], set(job.members(wait.channel))
        if wait.behind or wait.unknown or wait.channel.sides or wait.channel.group not in job.listed:
            continue
        if len(members) < 2 or case.is_held(wait) or accused & members:
            continue
        if (
            wait.collective.state == "issued"
            and rank.taken_ns is None
            and all(of.rank == wait.rank for of in case.waits.open)
        ):
            continue  # nothing tells that it began, or for how long: it may end a moment later
        if all(job.ranks[other].front(wait.channel) > wait.collective.number for other in members - {wait.rank}):
            reason = f"is still in {job.name(wait.channel, wait.collective)}, which all others have finished"
            since_s = rank.age_s(wait.collective.issued_ns)
            evidence = [_progress_there(job, wait)]
            yield case.accusation(wait.rank, "stuck_inside", reason, evidence, held_up=wait, since_s=since_s)


def busy_elsewhere(case: Case, accused: set[int]) -> Iterator[Accusation]:
    """Accuse, beside another cause, a rank that waits for nobody and makes no progress in a phase of its own, though
    nobody waits for it yet. Assumes that a healthy rank of a job that hangs waits in a collective.
    """
    # For half as long as one that is accused, as far as times are known.
    times = [still_s for rank in accused if (still_s := case.job.ranks[rank].still_s) is not None]
    for rank in case.job.ranks.values() if accused else ():
        still_s = -1.0 if rank.still_s is None else rank.still_s
        if rank.rank in accused or rank.gone or not rank.complete or not rank.is_elsewhere:
            continue
        if still_s >= min(times, default=0.0) / 2:
            reason = f"is in {phase_label(rank.phase)} and waits for no rank"
            yield case.accusation(rank.rank, "stuck_outside", reason, [_last_seen(rank)], since_s=_since_s(rank))


def nobody_waits(case: Case, accused: set[int]) -> Iterator[Accusation]:
    """Accuse each rank that is in a step, where no rank has a collective open and none makes progress. Assumes that the
    ages of the evidence are known, and were judged to be long, and that a rank which is in torch.distributed itself
    waits there for those that are not.
    """
    if accused or case.waits.open or case.job.missing:
        return
    inside = [rank for rank in case.job.ranks.values() if not rank.gone and rank.phase is not None]
    waiting = {rank.rank for rank in inside if rank.stacks and _DISTRIBUTED in "".join(rank.stacks[0].frames[:1])}
    if len(waiting) == len(inside):
        waiting = set()
    others = (
        f"{name_ranks(sorted(waiting))} in a call of torch.distributed" if waiting else "no rank waits in a collective"
    )
    for rank in inside:
        if rank.still_s is not None and rank.rank not in waiting:
            reason = f"is in {phase_label(rank.phase)}; {others}"
            yield case.accusation(rank.rank, "stuck_outside", reason, [_last_seen(rank)], since_s=_since_s(rank))


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


def phase_label(phase: str | None) -> str:
    """Return a phase in words: a step outside of its named phases is the user's own code."""
    return "your code between collectives" if phase == "step" else str(phase)


def _last_seen(rank: Rank) -> str:
    step = f"in step {rank.step}" if rank.step is not None else ""
    phase = f"in {phase_label(rank.phase)}" if rank.phase is not None else ""
    count = f"after {len(rank.collectives)} collectives" if rank.collectives else "before any collective"
    return f"last seen {', '.join(filter(None, (step, phase, count)))}"


def _since_s(rank: Rank) -> float | None:
    return rank.age_s(rank.phase_since_ns if rank.phase_since_ns is not None else rank.progress_ns)


def _progress_there(job: JobEvidence, wait: OpenCollective) -> str:
    issued: dict[int, list[int]] = defaultdict(list)
    for member in job.members(wait.channel):
        if member in job.ranks:
            issued[max(job.ranks[member].channels.get(wait.channel, {}), default=-1) + 1].append(member)
    counts = "; ".join(f"{name_ranks(ranks)}: {count}" for count, ranks in sorted(issued.items()))
    return f"collectives issued in {job.groups[wait.channel.group]}: {counts}"


def _described(op: CollectiveEvidence, aspect: Aspect) -> str:
    if aspect == "kind":
        return op.kind
    shapes = [[*map(list, sizes or ())] for sizes in (op.input_sizes, op.output_sizes)]
    whole = op.bytes is None or (op.kind == "all_to_all" and op.input_sizes)  # whose sums have to be the same
    size = f"shapes {shapes[0]} for {shapes[1]}" if whole else f"{op.bytes:,} bytes"
    return f"{op.kind} of {op.dtype if aspect == 'dtype' else size}"
