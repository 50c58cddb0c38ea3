"""A job of ranks without processes: each runs a list of operations until nothing moves, and leaves evidence.

    ranks = run(ddp(4, steps=3), {3: stuck_before("backward", at=1)})

A collective completes when all members of its group have issued the same number with the same signature. Time passes by
1 s an operation; evidence is taken `HUNG_S` after the last thing moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from aorta.autopsy.evidence import CollectiveEvidence, GroupEvidence, RankEvidence, RankExit

HUNG_S = 60
S = 1_000_000_000


@dataclass(frozen=True)
class Group:
    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Op:
    """What a rank does next: `call` (a collective), `phase`, `stuck`, `end`, `stop`, or `wait` for all that is open."""

    do: str
    group: Group | None = None
    kind: str = ""
    bytes: int = 0
    peer: int | None = None
    blocking: bool = True
    phase: str | None = None
    exit: RankExit | None = None


Program = list[Op]
Fault = Callable[[Program], Program]
STUCK, STOPPED, WAIT = Op("stuck"), Op("stop"), Op("wait")


def phase(name: str) -> Op:
    return Op("phase", phase=name)


def call(group: Group, kind: str, size: int, *, blocking: bool = True) -> Op:
    return Op("call", group, kind, size, blocking=blocking)


def message(group: Group, kind: str, peer: int) -> Op:
    return Op("call", group, kind, 64, peer=peer)


def ddp(ranks: int, steps: int = 3) -> dict[int, Program]:
    """Two buckets a step that overlap the backward pass, one group of all ranks."""
    world = Group("0", tuple(range(ranks)))
    step = [
        phase("data"),
        phase("forward"),
        phase("backward"),
        call(world, "all_reduce", 4000, blocking=False),
        call(world, "all_reduce", 1000, blocking=False),
        WAIT,
        phase("optimizer"),
    ]
    return dict.fromkeys(range(ranks), step * steps)


def clipped(ranks: int, steps: int = 3) -> dict[int, Program]:
    """Blocking collectives of several kinds in one group, as sharded training with a norm of all gradients has them."""
    world = Group("0", tuple(range(ranks)))
    step = [
        phase("data"),
        phase("forward"),
        call(world, "all_gather", 2000),
        phase("backward"),
        call(world, "reduce_scatter", 8000),
        phase("optimizer"),
        call(world, "all_reduce", 4),
    ]
    return dict.fromkeys(range(ranks), step * steps)


def two_groups(ranks: int, steps: int = 4) -> dict[int, Program]:
    """One blocking collective of each of two groups, both of all ranks."""
    one, other = (Group(name, tuple(range(ranks))) for name in ("0", "1"))
    step = [phase("data"), call(one, "all_reduce", 400), phase("optimizer"), call(other, "all_gather", 80)]
    return dict.fromkeys(range(ranks), step * steps)


def pipeline(stages: int, steps: int = 3) -> dict[int, Program]:
    """One microbatch through stages, and a reduction over two replicas of each stage."""
    programs = {}
    for replica in range(2):
        line = Group(f"pp{replica}", tuple(replica * stages + stage for stage in range(stages)))
        for stage, rank in enumerate(line.ranks):
            dp = Group(f"dp{stage}", (stage, stages + stage))
            before, after = line.ranks[stage - 1 : stage] if stage else (), line.ranks[stage + 1 : stage + 2]
            step = [phase("data"), phase("forward")]
            step += [message(line, "recv", peer) for peer in before] + [message(line, "send", peer) for peer in after]
            step += [phase("backward")]
            step += [message(line, "recv", peer) for peer in after] + [message(line, "send", peer) for peer in before]
            step += [call(dp, "all_reduce", 4000), phase("optimizer")]
            programs[rank] = step * steps
    return programs


def calls(program: Program) -> list[int]:
    """Indices of collectives."""
    return [at for at, op in enumerate(program) if op.do == "call"]


def ended_in(name: str, ending: RankExit | Op | None, step: int = 1) -> Fault:
    """A rank whose process ends in a phase, or does something else there, before anything in it."""
    end = ending if isinstance(ending, Op) else Op("end", exit=ending)

    def fault(program: Program) -> Program:
        at = [at for at, op in enumerate(program) if op.phase == name][step]
        return [*program[: at + 1], end]

    return fault


def stuck_in(name: str, step: int = 1) -> Fault:
    """A rank that never leaves a phase."""
    return ended_in(name, STUCK, step)


def slow_in(name: str, seconds: int) -> Fault:
    """A rank that takes so much longer for a phase, in every step."""
    return lambda program: [each for op in program for each in [op] * (1 + seconds * (op.phase == name))]


def skipped(index: int) -> Fault:
    """A rank that leaves out its `index`-th collective."""
    return lambda program: [op for at, op in enumerate(program) if at != calls(program)[index]]


def swapped(index: int) -> Fault:
    """A rank that issues its `index`-th collective after the next."""

    def fault(program: Program) -> Program:
        (first, second), changed = calls(program)[index : index + 2], [*program]
        changed[first], changed[second] = program[second], program[first]
        return changed

    return fault


def resized(index: int) -> Fault:
    """A rank whose `index`-th collective is of another size."""

    def fault(program: Program) -> Program:
        at = calls(program)[index]
        return [*program[:at], replace(program[at], bytes=program[at].bytes + 4), *program[at + 1 :]]

    return fault


@dataclass
class _Rank:
    program: Program
    evidence: RankEvidence
    at: int = 0
    blocked: bool = False

    def open(self) -> list[CollectiveEvidence]:
        return [op for op in self.evidence.collectives if op.state != "completed"]


def run(
    programs: dict[int, Program], faults: dict[int, Fault] | None = None, until: int | None = None
) -> list[RankEvidence]:
    """Run all ranks until nothing moves, or `until` seconds; their evidence."""
    groups = {op.group.name: op.group for program in programs.values() for op in program if op.group is not None}
    ranks = dict[int, _Rank]()
    for rank, program in programs.items():
        evidence = RankEvidence(rank=rank, world_size=len(programs), source="progress", path=f"rank_{rank}.progress")
        evidence.state, evidence.step, evidence.progress_ns, evidence.phase_since_ns = "running", -1, 0, 0
        members = [(group.name, group.ranks) for group in groups.values() if rank in group.ranks]
        evidence.groups = [GroupEvidence(name=name, ranks=ranks_of_group) for name, ranks_of_group in members]
        ranks[rank] = _Rank((faults or {}).get(rank, list)(program), evidence)
    now, moved = 0, True
    while moved and now != until:
        now, moved = now + 1, False
        for one in ranks.values():
            if _step(one, now * S):
                one.evidence.progress_ns, moved = now * S, True
        for one, op in _completed(ranks, groups):
            op.state, op.completed_ns = "completed", now * S
            one.evidence.progress_ns, moved = now * S, True
    for one in ranks.values():
        one.evidence.taken_ns = (now + HUNG_S) * S
        if one.at == len(one.program) and one.evidence.state == "running" and not one.open():
            one.evidence.phase, one.evidence.state, one.evidence.exit = None, "dead", RankExit(exit_code=0)
    return [one.evidence for one in ranks.values()]


def _step(one: _Rank, now_ns: int) -> bool:
    """Let a rank do its next operation, if it can."""
    evidence = one.evidence
    if one.at == len(one.program) or evidence.state != "running" or (one.blocked and one.open()):
        return False
    one.blocked = False
    op = one.program[one.at]
    if op.do == "stuck":
        return False
    one.at += 1
    if op.do == "phase":
        evidence.phase, evidence.phase_since_ns = op.phase, now_ns
        evidence.step = (evidence.step or 0) + (op.phase == "data")
    elif op.do == "wait":
        one.blocked = True
    elif op.do in ("end", "stop"):
        evidence.state, evidence.exit = "dead" if op.do == "end" else "stopped", op.exit
    elif op.group is not None:
        channel = (op.group.name, op.peer, None if op.peer is None else op.kind)
        before = [(each.group, each.peer, None if op.peer is None else each.kind) for each in evidence.collectives]
        issued = CollectiveEvidence(
            group=op.group.name,
            number=before.count(channel),
            kind=op.kind,
            state="issued",
            bytes=op.bytes,
            dtype="float32",
            peer=op.peer,
            issued_ns=now_ns,
        )
        evidence.collectives.append(issued)
        one.blocked = op.blocking
    return True


def _completed(ranks: dict[int, _Rank], groups: dict[str, Group]) -> Iterable[tuple[_Rank, CollectiveEvidence]]:
    """Collectives that all members have issued alike, and whose elders have completed."""
    for rank, one in ranks.items():
        for op in one.open():
            members, kinds, peer = groups[op.group].ranks, None, None
            if op.peer is not None:
                members, kinds, peer = (op.peer,), {"send": "recv", "recv": "send"}[op.kind], rank
            met = [
                two
                for member in members
                for two in ranks[member].evidence.collectives
                if (two.group, two.number, two.peer) == (op.group, op.number, peer) and kinds in (None, two.kind)
            ]
            alike = {(two.kind, two.bytes, two.dtype) for two in met}
            elders = [two for two in one.open() if two.group == op.group and two.number < op.number]
            if len(met) == len(members) and (op.peer is not None or (len(alike) == 1 and not elders)):
                yield one, op
