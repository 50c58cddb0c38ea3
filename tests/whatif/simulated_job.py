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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from tests.whatif.event_loop import US, Account, Group, Issue, Laws, Operation, Simulation, Wait

MS = 1_000_000
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
class Job(Laws):
    """One training job.

    Args:
        strategy: ddp, fsdp, hsdp, tp or fsdp_tp. shards: ranks of the inner dimension of a mesh.
        spread: each piece of computation takes up to this part more or less.
        skew: rank r computes this part times r / ranks longer, so that ranks are not alike.
    """

    strategy: str
    ranks: int = 2
    shards: int = 2
    steps: int = 8
    warmup: int = 2
    spread: float = 0.1
    skew: float = 0.05
    seed: int = 0

    def length_ns(self, rank: int, step: int, mean_ns: int, *of: object) -> int:
        """A length with this job's chance, the same whenever it is asked for."""
        chance = random.Random(f"{self.seed} {rank} {step} {of}")
        return round(mean_ns * (1 + self.skew * rank / self.ranks) * (1 + self.spread * chance.uniform(-1, 1)))


Length = Callable[..., int]
"""`Job.length_ns` of a rank and a step."""


def carry_out(job: Job) -> list[list[Account]]:
    """Really do it: of each rank the account of each step."""
    return Simulation([[_step(job, rank, step) for step in range(job.steps)] for rank in range(job.ranks)], job).run()


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
    length = partial(job.length_ns, rank, step)
    groups = groups_of(job, rank)
    yield length(50 * US, "between")
    yield "step<"
    yield from _during("aux:data", length(100 * US, "data"))
    yield from (_whole if job.strategy in ("ddp", "tp") else _sharded)(job, groups, length)
    yield length(200 * US, "before clip")
    norm = [] if job.strategy == "ddp" else _at_once(Issue("norm", groups["norm"], "allreduce", 292))
    yield from _during("aux:clip", length(700 * US, "norm"), *norm, length(400 * US, "clip"))
    yield from _during("aux:optimizer", length(9 * MS, "optimizer"))
    yield from _during("aux:loss_read", length(60 * US, "loss_read"))
    yield "step>"


def _during(name: str, *operations: Operation) -> Iterator[Operation]:
    yield from (f"{name}<", *operations, f"{name}>")


def _at_once(issue: Issue) -> list[Operation]:
    return [issue, Wait(issue.tag)]


def _loss(length: Length) -> Iterator[Operation]:
    for phase in ("forward", "backward"):
        yield from _during(f"loss/{phase}", length(80 * US, "loss", phase))
        yield length(300 * US, "behind loss", phase)


def _pass(job: Job, groups: dict[str, Group], length: Length, block: Block, phase: str) -> Iterator[Operation]:
    """One pass of a block. Its tensor-parallel exchanges stand inside."""
    total_ns = block.forward_ns if phase == "forward" else block.backward_ns
    own: list[Operation] = [length(total_ns, block.name, phase)]
    if job.strategy in ("tp", "fsdp_tp") and block.name.startswith("encoder"):
        exchanges = {"forward": 2, "backward": 4}[phase]
        parts = [length(total_ns // (exchanges + 1), block.name, phase, number) for number in range(exchanges + 1)]
        own = [parts[0]]
        for number, part in enumerate(parts[1:]):
            tag = f"{block.name}/{phase}/{number}"
            own += [*_at_once(Issue(tag, groups["tensor"], "allreduce", ACTIVATIONS)), part]
    yield from _during(f"{block.name}/{phase}", *own)


def _whole(job: Job, groups: dict[str, Group], length: Length) -> Iterator[Operation]:
    """ddp and tp: every rank has its part of all blocks at hand."""
    for block in MODEL:
        yield from _pass(job, groups, length, block, "forward")
        yield length(80 * US, "behind", block.name)
    yield from _loss(length)
    if job.strategy == "ddp":
        yield from _reduced(groups["shard"], length)
    else:
        for block in reversed(MODEL):
            yield from _pass(job, groups, length, block, "backward")


def _reduced(group: Group, length: Length) -> Iterator[Operation]:
    """The backward pass of ddp: a gradient is ready when as much of its block's pass is done as of the bytes, and
    buckets are issued as they fill up.
    """
    filling, buckets = 0, list[Issue]()
    for block in reversed(MODEL):
        yield f"{block.name}/backward<"
        for number, size in enumerate(block.parameters):
            yield length(block.backward_ns * size // block.bytes, block.name, "backward", number)
            filling += size
            if filling >= BUCKET_BYTES or (block, number) == (MODEL[0], len(block.parameters) - 1):
                buckets.append(Issue(f"bucket {len(buckets)}", group, "allreduce", filling))
                filling = 0
                yield buckets[-1]
        yield f"{block.name}/backward>"
    yield length(100 * US, "behind backward")
    yield from (Wait(bucket.tag) for bucket in buckets)


def _sharded(job: Job, groups: dict[str, Group], length: Length) -> Iterator[Operation]:
    """fsdp, hsdp, fsdp_tp: parameters are gathered before each pass, gradients scattered behind backward."""
    yield from _gathered(job, groups, length, MODEL, "forward")
    yield from _loss(length)
    yield from _gathered(job, groups, length, MODEL[::-1], "backward")


def _gathered(
    job: Job, groups: dict[str, Group], length: Length, order: Sequence[Block], phase: str
) -> Iterator[Operation]:
    def gather(block: Block) -> Iterator[Operation]:
        """Copy in and issue."""
        yield length(150 * US, "copied in", block.name, phase)
        yield Issue(f"gather {block.name}", groups["shard"], "allgather", block.bytes)

    yield from gather(order[0])
    for number, block in enumerate(order):
        yield Wait(f"gather {block.name}")
        yield length(300 * US, "copied out", block.name, phase)
        for ahead in order[number + 1 : number + 2]:
            yield from gather(ahead)
        yield from _pass(job, groups, length, block, phase)
        if phase == "backward":
            yield length(300 * US, "to scatter", block.name)
            yield from _at_once(Issue(f"scatter {block.name}", groups["shard"], "reducescatter", block.bytes))
            if job.strategy == "hsdp":
                part = block.bytes // job.shards
                yield from _at_once(Issue(f"reduce {block.name}", groups["replicate"], "allreduce", part))
        yield length(100 * US, "behind", block.name, phase)
