"""Training jobs for the simulator: what the ranks of each strategy do, and the record of it that AORTA would have made.

    job = Job("fsdp", ranks=4)
    record(job, folder)                                          # rank_<r>_metrics.jsonl and run.json
    record(replace(job, network=Network(gb_per_s=1)), elsewhere) # the same job with the change really made

Every length is drawn once by name (rank, step, block), so that a change leaves everything else as it was. Programs
follow what torch does on a CPU: DDP's reducer closes a bucket with the parameter that fills it and waits for all of
them behind the backward pass, FSDP2 waits for a block's all-gather before issuing that of the next one, and for its
reduce-scatter at once. Must not share code with `aorta.whatif`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from tests.whatif.event_loop import Account, Group, Issue, Laws, Mark, Network, Operation, Wait, Work
from tests.whatif.event_loop import carry_out as _carry_out

US, MS = 1_000, 1_000_000
SHARDED = ("fsdp", "hsdp", "fsdp_tp")
SPLIT = ("tp", "fsdp_tp")
BUCKET_BYTES = 600_000
"""A bucket of ddp closes when it holds so many."""
ACTIVATIONS = 131_072
"""Bytes of what a tensor-parallel block exchanges."""


@dataclass(frozen=True)
class Block:
    """One block of the model: its passes, and the bytes of its parameters in the order of their gradients."""

    name: str
    forward_ns: int
    backward_ns: int
    parameters: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return sum(self.parameters)


def _layer(number: int) -> Block:
    return Block(f"encoder.{number}", 8 * MS, 17 * MS, (262_144, 2_048, 262_144, 512, 65_536, 512, 196_608, 1_536))


MODEL = (
    Block("embedding", 1 * MS, 2 * MS, (33_000, 8_192, 1_024_000)),
    *(_layer(number) for number in range(4)),
    Block("scorer", 200 * US, 300 * US, (512, 4)),
)


@dataclass(frozen=True)
class Job:
    """One training job.

    Args:
        strategy: ddp, fsdp, hsdp, tp or fsdp_tp. shards: ranks of the inner dimension of a mesh.
        late_rank, late_ns: a rank that is late to every issue, and by how much.
        spread: each piece of computation takes up to this part more or less.
        skew: rank r computes this part times r / ranks longer, so that ranks are not alike.
        backend_ns: what the backend itself takes from the last arrival; it bounds a collective from below.
        wake_ns: from the end of a collective to going on.
    """

    strategy: str
    ranks: int = 2
    shards: int = 2
    network: Network = field(default_factory=Network)
    steps: int = 8
    warmup: int = 2
    late_rank: int | None = None
    late_ns: int = 0
    spread: float = 0.1
    skew: float = 0.05
    backend_ns: int = 100 * US
    wake_ns: int = 30 * US
    seed: int = 0
    model: tuple[Block, ...] = MODEL

    def length_ns(self, mean_ns: int, *of: object) -> int:
        """A length with this job's chance, the same whenever it is asked for; `of` begins with the rank."""
        chance = random.Random(f"{self.seed} {of}")
        own = 1 + self.skew * int(str(of[0])) / self.ranks
        return round(mean_ns * own * (1 + self.spread * chance.uniform(-1, 1)))

    @property
    def laws(self) -> Laws:
        return Laws(
            cost_ns=lambda one: self.network.cost_ns(one, self.ranks),
            backend_ns=lambda _one: self.backend_ns,
            wake_ns=self.wake_ns,
            late_ns=lambda rank: self.late_ns if rank == self.late_rank else 0,
        )


def carry_out(job: Job) -> list[list[Account]]:
    """Really do it: of each rank the account of each step."""
    programs = [[list(_step(job, rank, step)) for step in range(job.steps)] for rank in range(job.ranks)]
    return _carry_out(programs, job.laws)


def groups_of(job: Job, rank: int) -> dict[str, Group]:
    """The groups of a rank by what they are for. A mesh counts its inner dimension first, as torch's does."""
    world = Group("0", tuple(range(job.ranks)))
    outer = Group("1", tuple(range(rank % job.shards, job.ranks, job.shards)))
    first = rank // job.shards * job.shards
    inner = Group("3", tuple(range(first, first + job.shards)))
    match job.strategy:
        case "hsdp":
            return {"shard": inner, "replicate": outer, "norm": inner}
        case "fsdp_tp":
            return {"shard": outer, "tensor": inner, "norm": outer}
        case _:
            return {"shard": world, "tensor": world, "norm": world}


def _step(job: Job, rank: int, step: int) -> Iterator[Operation]:
    length = partial(_length, job, rank, step)
    groups = groups_of(job, rank)
    yield length(50 * US, "between")
    yield Mark("step<")
    yield from _aux("data", length(100 * US, "data"))
    if job.strategy in SHARDED:
        yield from _sharded(job, groups, length)
    else:
        yield from _whole(job, groups, length)
    yield length(200 * US, "before clip")
    yield Mark("aux:clip<")
    yield length(700 * US, "norm")
    if job.strategy != "ddp":
        yield from _at_once(Issue("norm", groups["norm"], "allreduce", 292))
    yield length(400 * US, "clip")
    yield Mark("aux:clip>")
    yield from _aux("optimizer", length(9 * MS, "optimizer"))
    yield from _aux("loss_read", length(60 * US, "loss_read"))
    yield Mark("step>")


def _length(job: Job, rank: int, step: int, mean_ns: int, *of: object) -> Work:
    return Work(job.length_ns(mean_ns, rank, step, *of))


def _aux(name: str, work: Work) -> Iterator[Operation]:
    yield from (Mark(f"aux:{name}<"), work, Mark(f"aux:{name}>"))


def _at_once(issue: Issue) -> Iterator[Operation]:
    yield from (issue, Wait(issue.tag))


def _loss(length: partial[Work]) -> Iterator[Operation]:
    for phase in ("forward", "backward"):
        yield Mark(f"loss/{phase}<")
        yield length(80 * US, "loss", phase)
        yield Mark(f"loss/{phase}>")
        yield length(300 * US, "behind loss", phase)


def _pass(job: Job, groups: dict[str, Group], length: partial[Work], block: Block, phase: str) -> Iterator[Operation]:
    """One pass of a block. Its tensor-parallel exchanges stand inside."""
    total_ns = block.forward_ns if phase == "forward" else block.backward_ns
    yield Mark(f"{block.name}/{phase}<")
    exchanges = {"forward": 2, "backward": 4}[phase]
    if job.strategy in SPLIT and block.name.startswith("encoder"):
        for number in range(exchanges):
            yield length(total_ns // (exchanges + 1), block.name, phase, number)
            yield from _at_once(Issue(f"{block.name}/{phase}/{number}", groups["tensor"], "allreduce", ACTIVATIONS))
        yield length(total_ns // (exchanges + 1), block.name, phase, "rest")
    elif job.strategy == "ddp" and phase == "backward":
        yield from _gradients(length, block)
    else:
        yield length(total_ns, block.name, phase)
    yield Mark(f"{block.name}/{phase}>")


def _gradients(length: partial[Work], block: Block) -> Iterator[Operation]:
    """A backward pass with a mark `ready` behind each parameter: about when as much of it is done as they are of the
    block's bytes, up to a tenth of the pass off.
    """
    chance = random.Random(block.name)
    done = [sum(block.parameters[: number + 1]) / block.bytes for number in range(len(block.parameters))]
    at = [0.0, *sorted(min(max(part + chance.uniform(-0.1, 0.1), 0.0), 1.0) for part in done)]
    for number, (before, behind) in enumerate(pairwise(at)):
        yield length(round(block.backward_ns * (behind - before)), block.name, "backward", number)
        yield Mark(f"ready:{block.name}:{block.parameters[number]}")
    yield length(round(block.backward_ns * (1 - at[-1])), block.name, "backward", "rest")


def _whole(job: Job, groups: dict[str, Group], length: partial[Work]) -> Iterator[Operation]:
    """ddp and tp: every rank has its part of all blocks at hand."""
    for block in job.model:
        yield from _pass(job, groups, length, block, "forward")
        yield length(80 * US, "behind", block.name)
    yield from _loss(length)
    backward = [one for block in reversed(job.model) for one in _pass(job, groups, length, block, "backward")]
    total = sum(block.bytes for block in job.model)
    yield from _reduced(groups["shard"], backward, length, total) if job.strategy == "ddp" else backward


def _reduced(group: Group, backward: Sequence[Operation], length: partial[Work], left: int) -> Iterator[Operation]:
    """The backward pass of ddp with its buckets, issued as they fill up."""
    filling = 0
    buckets: list[Issue] = []
    for one in backward:
        yield one
        if not isinstance(one, Mark) or not one.name.startswith("ready:"):
            continue
        size = int(one.name.split(":")[2])
        filling, left = filling + size, left - size
        if filling < BUCKET_BYTES and left:
            continue
        bucket = Issue(f"bucket {len(buckets)}", group, "allreduce", filling)
        buckets.append(bucket)
        filling = 0
        yield bucket
    yield length(100 * US, "behind backward")
    for bucket in buckets:
        yield Wait(bucket.tag)


def _sharded(job: Job, groups: dict[str, Group], length: partial[Work]) -> Iterator[Operation]:
    """fsdp, hsdp, fsdp_tp: parameters are gathered before each pass, gradients scattered behind backward."""
    yield from _gathered(job, groups, length, list(job.model), "forward")
    yield from _loss(length)
    yield from _gathered(job, groups, length, list(reversed(job.model)), "backward")


def _gathered(
    job: Job, groups: dict[str, Group], length: partial[Work], order: list[Block], phase: str
) -> Iterator[Operation]:
    issued = 0

    def gather(upto: int) -> Iterator[Operation]:
        """Copy in and issue what is not issued yet, up to a block."""
        nonlocal issued
        for ahead in range(issued, upto + 1):
            yield length(150 * US, "copied in", order[ahead].name, phase)
            yield Issue(f"gather {order[ahead].name} {phase}", groups["shard"], "allgather", order[ahead].bytes)
        issued = max(issued, upto + 1)

    for number, block in enumerate(order):
        yield from gather(number)  # not prefetched: the first one
        yield Wait(f"gather {block.name} {phase}")
        yield length(300 * US, "copied out", block.name, phase)
        yield from gather(min(number + 1, len(order) - 1))
        yield from _pass(job, groups, length, block, phase)
        if phase == "backward":
            yield length(300 * US, "to scatter", block.name)
            yield from _at_once(Issue(f"scatter {block.name}", groups["shard"], "reducescatter", block.bytes))
            if job.strategy == "hsdp":
                part = block.bytes // job.shards
                yield from _at_once(Issue(f"reduce {block.name}", groups["replicate"], "allreduce", part))
        yield length(100 * US, "behind", block.name, phase)
