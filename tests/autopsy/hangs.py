"""A job of ranks without processes: each runs a list of operations until nothing moves, and leaves evidence.

    ranks = run(ddp(4, steps=3), {3: stuck_before("backward", at=1)})

A collective completes when all members of its group have issued the same number with the same signature. Time passes by
1 s an operation; evidence is taken `HUNG_S` after the last thing moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

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
    dtype: str = "float32"
    peer: int | None = None
    blocking: bool = True
    phase: str | None = None
    exit: RankExit | None = None


Program = list[Op]
Fault = Callable[[Program], Program]
STUCK, WAIT = Op("stuck"), Op("wait")


def phase(name: str) -> Op:
    return Op("phase", phase=name)


def call(group: Group, kind: str, size: int, *, blocking: bool = True) -> Op:
    return Op("call", group, kind, size, blocking=blocking)


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
            step = [phase("data"), phase("forward")]
            step += [Op("call", line, "recv", 64, peer=line.ranks[stage - 1])] if stage else []
            step += [Op("call", line, "send", 64, peer=line.ranks[stage + 1])] if stage < stages - 1 else []
            step += [phase("backward")]
            step += [Op("call", line, "recv", 64, peer=line.ranks[stage + 1])] if stage < stages - 1 else []
            step += [Op("call", line, "send", 64, peer=line.ranks[stage - 1])] if stage else []
            step += [call(dp, "all_reduce", 4000), phase("optimizer")]
            programs[rank] = step * steps
    return programs


def calls(program: Program) -> list[int]:
    """Positions of collectives."""
    return [at for at, op in enumerate(program) if op.do == "call"]


def _ends_in(name: str, step: int, end: Op) -> Fault:
    def fault(program: Program) -> Program:
        at = [at for at, op in enumerate(program) if op.phase == name][step]
        return [*program[: at + 1], end]

    return fault


def stuck_in(name: str, step: int = 1) -> Fault:
    """A rank that never leaves a phase, before anything in it."""
    return _ends_in(name, step, STUCK)


def ended_in(name: str, ending: RankExit | None, step: int = 1) -> Fault:
    """A rank whose process ends in a phase."""
    return _ends_in(name, step, Op("end", exit=ending))


def stopped_in(name: str, step: int = 1) -> Fault:
    """A rank whose process is stopped in a phase."""
    return _ends_in(name, step, Op("stop"))


def slow_in(name: str, seconds: int) -> Fault:
    """A rank that takes so much longer for a phase, in every step."""
    return lambda program: [each for op in program for each in [op] * (1 + seconds * (op.phase == name))]


def _at_call(index: int, change: Callable[[Program], Program], length: int = 1) -> Fault:
    def fault(program: Program) -> Program:
        at = calls(program)[index : index + length]
        changed = change([program[place] for place in at])
        others = [[op] if place not in at else [] for place, op in enumerate(program)]
        for place, op in zip(at, changed, strict=False):
            others[place] = [op]
        return [op for several in others for op in several]

    return fault


def skipped(index: int) -> Fault:
    """A rank that leaves out its `index`-th collective."""
    return _at_call(index, lambda _ops: [])


def swapped(index: int) -> Fault:
    """A rank that issues its `index`-th collective after the next."""
    return _at_call(index, lambda ops: ops[::-1], length=2)


def resized(index: int) -> Fault:
    """A rank whose `index`-th collective is of another size."""
    return _at_call(index, lambda ops: [replace(ops[0], bytes=ops[0].bytes + 4)])


@dataclass
class _Rank:
    program: Program
    at: int = 0
    phase: str | None = None
    phase_since: int = 0
    moved: int = 0
    step: int = -1
    issued: list[CollectiveEvidence] = field(default_factory=list)
    blocked: bool = False
    state: str = "running"
    exit: RankExit | None = None

    def open(self) -> list[CollectiveEvidence]:
        return [one for one in self.issued if one.state != "completed"]


def run(
    programs: dict[int, Program], faults: dict[int, Fault] | None = None, until: int | None = None
) -> list[RankEvidence]:
    """Run all ranks until nothing moves, or `until` seconds; their evidence."""
    faults = faults or {}
    ranks = {rank: _Rank(faults.get(rank, list)(program)) for rank, program in programs.items()}
    groups = {op.group.name: op.group for program in programs.values() for op in program if op.group is not None}
    now = 0
    moved = True
    while moved and now != until:
        now += 1
        moved = False
        for rank, one in ranks.items():
            if _step(rank, one, now):
                one.moved, moved = now, True
        for rank, one in _completed(ranks, groups):
            one.state, one.completed_ns = "completed", now * S
            ranks[rank].moved, moved = now, True
    for one in ranks.values():
        if one.at == len(one.program) and one.state == "running" and not one.open():
            one.phase, one.state, one.exit = None, "dead", RankExit(exit_code=0)
    taken = (now + HUNG_S) * S
    return [
        RankEvidence(
            rank=rank,
            world_size=len(ranks),
            source="progress",
            path=f"rank_{rank}.progress",
            state=one.state,
            exit=one.exit,
            taken_ns=taken,
            progress_ns=one.moved * S,
            step=one.step,
            phase=one.phase,
            phase_since_ns=one.phase_since * S,
            groups=[
                GroupEvidence(name=group.name, ranks=group.ranks) for group in groups.values() if rank in group.ranks
            ],
            collectives=one.issued,
        )
        for rank, one in ranks.items()
    ]


def _step(rank: int, one: _Rank, now: int) -> bool:
    """Let a rank do its next operation, if it can."""
    if one.at == len(one.program) or one.state != "running" or (one.blocked and one.open()):
        return False
    one.blocked = False
    op = one.program[one.at]
    if op.do == "stuck":
        return False
    one.at += 1
    if op.do == "phase":
        one.phase, one.phase_since = op.phase, now
        one.step += op.phase == "data"
    elif op.do == "wait":
        one.blocked = True
    elif op.do in ("end", "stop"):
        one.state, one.exit = "dead" if op.do == "end" else "stopped", op.exit
    elif op.group is not None:
        kinds = (op.kind,) if op.peer is not None else {each.kind for each in one.issued}
        sequence = [
            each for each in one.issued if (each.group, each.peer) == (op.group.name, op.peer) and each.kind in kinds
        ]
        issued = CollectiveEvidence(
            group=op.group.name,
            number=len(sequence),
            kind=op.kind,
            state="issued",
            bytes=op.bytes,
            dtype=op.dtype,
            peer=op.peer,
            issued_ns=now * S,
        )
        one.issued.append(issued)
        one.blocked = op.blocking
    return True


def _completed(ranks: dict[int, _Rank], groups: dict[str, Group]) -> Iterable[tuple[int, CollectiveEvidence]]:
    """Collectives that all members have issued alike, and whose elders have completed."""
    for rank, one in ranks.items():
        for each in one.open():
            members, kinds, peer = groups[each.group].ranks, None, None
            if each.peer is not None:
                members, kinds, peer = (each.peer,), {"send": "recv", "recv": "send"}[each.kind], rank
            met = [
                two
                for member in members
                for two in ranks[member].issued
                if (two.group, two.number, two.peer) == (each.group, each.number, peer) and kinds in (None, two.kind)
            ]
            alike = {(two.kind, two.bytes, two.dtype) for two in met}
            elders = [two for two in one.open() if two.group == each.group and two.number < each.number]
            if len(met) == len(members) and (each.peer is not None or (len(alike) == 1 and not elders)):
                yield rank, each
