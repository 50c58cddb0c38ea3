"""Training jobs for the simulator: what the ranks of each strategy do, and the record of it that AORTA would have made.

    job = Job("fsdp", ranks=4)
    record(job, folder)                                          # rank_<r>_metrics.jsonl and run.json
    record(replace(job, network=Network(gb_per_s=1)), elsewhere) # the same job with the change really made

Every length is drawn once by name (rank, step, block), so that a change leaves everything else as it was. Programs
follow what torch does on a CPU: DDP issues buckets within the backward pass and waits for all of them behind it, FSDP2
waits for a block's all-gather before issuing that of the next one, and for its reduce-scatter at once. Must not share
code with `aorta.whatif`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from tests.whatif.event_loop import US, Account, Group, Issue, Laws, Operation, Simulation, Wait

MS = 1_000_000
ACTIVATIONS = 131_072
"""Bytes of what a tensor-parallel block exchanges."""


class Block(NamedTuple):
    """One block of the model: its passes, and the bytes of its parameters."""

    name: str
    forward_ns: int
    backward_ns: int
    bytes: int


MODEL = (
    Block("embedding", 1 * MS, 2 * MS, 1_065_192),
    *(Block(f"encoder.{number}", 8 * MS, 17 * MS, 791_040) for number in range(4)),
    Block("scorer", 200 * US, 300 * US, 516),
)


@dataclass(frozen=True)
class Job(Laws):
    """One training job.

    Args:
        strategy: ddp, fsdp, hsdp or fsdp_tp. shards: ranks of the inner dimension of a mesh.
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


def groups_of(job: Job, rank: int) -> tuple[Group, Group]:
    """The group that shards or reduces, and the other dimension of a mesh, which counts its inner dimension first."""
    world = Group("0", tuple(range(job.ranks)))
    outer = Group("1", tuple(range(rank % job.shards, job.ranks, job.shards)))
    first = rank // job.shards * job.shards
    inner = Group("3", tuple(range(first, first + job.shards)))
    return {"hsdp": (inner, outer), "fsdp_tp": (outer, inner)}.get(job.strategy, (world, world))


def _step(job: Job, rank: int, step: int) -> Iterator[Operation]:
    length = partial(job.length_ns, rank, step)
    groups = groups_of(job, rank)
    yield length(50 * US, "between")
    yield "step<"
    yield from _during("aux:data", length(100 * US, "data"))
    if job.strategy == "ddp":
        yield from _reduced(groups[0], length)
    else:
        yield from _gathered(job.strategy, *groups, length)
        yield from _during("aux:clip", length(700 * US, "norm"), *_at_once(Issue("norm", groups[0], "allreduce", 292)))
    yield length(200 * US, "before optimizer")
    yield from _during("aux:optimizer", length(9 * MS, "optimizer"))
    yield "step>"


def _during(name: str, *operations: Operation) -> Iterator[Operation]:
    yield from (f"{name}<", *operations, f"{name}>")


def _at_once(issue: Issue) -> tuple[Operation, ...]:
    return issue, Wait(issue.tag)


def _reduced(group: Group, length: Length) -> Iterator[Operation]:
    """ddp: every block has two buckets, which are issued as they fill up."""
    for block in MODEL:
        yield from _during(f"{block.name}/forward", length(block.forward_ns, block.name, "forward"))
        yield length(80 * US, "behind", block.name)
    buckets = []
    for block in reversed(MODEL):
        own = list[Operation]()
        for part in range(2):
            buckets.append(Issue(f"{block.name} {part}", group, "allreduce", block.bytes // 2))
            own += [length(block.backward_ns // 2, block.name, "backward", part), buckets[-1]]
        yield from _during(f"{block.name}/backward", *own)
    yield length(100 * US, "behind backward")
    yield from (Wait(bucket.tag) for bucket in buckets)


def _gathered(strategy: str, shard: Group, other: Group, length: Length) -> Iterator[Operation]:
    """fsdp, hsdp, fsdp_tp: parameters are gathered before each pass, gradients scattered behind backward; exchanges of
    tensor parallelism stand inside a pass.
    """
    for phase, order in (("forward", MODEL), ("backward", MODEL[::-1])):
        gathers = [Issue(f"gather {block.name}", shard, "allgather", block.bytes) for block in order]
        yield gathers[0]
        for number, block in enumerate(order):
            yield Wait(gathers[number].tag)
            yield length(300 * US, "copied out", block.name, phase)
            yield from gathers[number + 1 : number + 2]
            total_ns = block.forward_ns if phase == "forward" else block.backward_ns
            own: list[Operation] = [length(total_ns // 2, block.name, phase)]
            if strategy == "fsdp_tp":
                own += _at_once(Issue(f"exchange {block.name}", other, "allreduce", ACTIVATIONS))
            yield from _during(f"{block.name}/{phase}", *own, length(total_ns // 2, block.name, phase, "rest"))
            if phase == "backward":
                yield from _at_once(Issue(f"scatter {block.name}", shard, "reducescatter", block.bytes))
                if strategy == "hsdp":
                    part = block.bytes // len(shard.ranks)
                    yield from _at_once(Issue(f"reduce {block.name}", other, "allreduce", part))
            yield length(100 * US, "behind", block.name, phase)
