"""What a collective costs on the simulated network, written down once more from the papers' tables.

Rounds of latency and passes of the array, for rings and for recursive halving and doubling (Thakur, Rabenseifner,
Gropp, Int. J. of High Performance Computing Applications 19 (2005) 49-66). Beside it two things that no predictor
knows: jitter, and a node that is slower than the others. Must not share code with `aorta`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.analysis.whatif.event_loop import Collective


@dataclass(frozen=True)
class Network:
    """One link a group, at full bandwidth.

    Args:
        jitter: each collective takes up to this part more or less.
        slow_node: a rank whose groups are `slow_factor` times as slow.
        world: groups of all ranks cost what those of so many would.
    """

    gb_per_s: float = 0.125
    latency_us: float = 50.0
    algorithm: str = "ring"
    jitter: float = 0.0
    seed: int = 0
    slow_node: int | None = None
    slow_factor: float = 1.0
    world: int | None = None

    def cost_ns(self, one: Collective, all_ranks: int) -> int:
        """In nanoseconds, from the moment when all are there and the link is free."""
        ranks = len(one.group.ranks)
        if ranks == all_ranks and self.world is not None:
            ranks = self.world
        if ranks == 1:
            return 0
        halves = 2 if one.kind == "allreduce" else 1  # an all-reduce is a reduce-scatter and an all-gather
        rounds = ranks - 1 if self.algorithm == "ring" else (ranks - 1).bit_length()
        passes = (ranks - 1) / ranks
        cost = halves * (rounds * self.latency_us * 1e3 + passes * one.bytes / self.gb_per_s)
        if self.slow_node in one.group.ranks:
            cost *= self.slow_factor
        if self.jitter:
            chance = random.Random(f"{self.seed} {one.group} {one.seq}")
            cost *= 1 + self.jitter * chance.uniform(-1, 1)
        return round(cost)
