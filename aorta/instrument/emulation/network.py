"""Cost model of the emulated fabric: a collective's kind, bytes and group -> nanoseconds. Pure arithmetic.

The model is latency plus bytes over bandwidth (Hockney) with the usual costs of ring and tree algorithms: Thakur,
Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", Int. J. of High Performance
Computing Applications 19 (2005) 49-66. The arithmetic of reductions is not charged.

Must not read a clock, or import torch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from aorta.config.schema import Algorithm, EmulatedFabric, Sharing
from aorta.instrument.emulation.shared_links import SharedLinks

_NS_PER_US = 1_000
_NS_PER_MS = 1_000_000


def cost_ns(kind: str, size_bytes: int, ranks: int, *, spans_nodes: bool, settings: EmulatedFabric) -> int:
    """Time of one collective once its last rank has arrived and its link is free, in nanoseconds.

    Args:
        kind: one of `timeline.classes.KINDS`.
        size_bytes: of the full array (all-to-all: one rank's send buffer), as docs/measuring.md, section 1 counts it.
        ranks: n, the size of the group.
        spans_nodes: whether the group's slowest link is one between nodes.
        settings: latency, bandwidth and algorithm.

    Raises:
        KeyError: an unknown kind.
    """
    if ranks == 1:
        return 0
    rounds, arrays = _ring(kind, ranks) if settings.algorithm is Algorithm.ring else _tree(kind, ranks)
    if spans_nodes:
        latency_us, gb_per_s = settings.inter_latency_us, settings.inter_bandwidth_gb_per_s
    else:
        latency_us, gb_per_s = settings.intra_latency_us, settings.intra_bandwidth_gb_per_s
    # 1 GB/s is 1e9 bytes a second: 1 byte a nanosecond.
    return round(rounds * latency_us * _NS_PER_US + arrays * size_bytes / gb_per_s)


def _ring(kind: str, n: int) -> tuple[int, float]:
    """Number of consecutive messages, and how many times the full array passes a rank's link.

    Broadcast and reduce are pipelined along a chain, gather and scatter are linear at the root, all-to-all exchanges
    pairwise; a barrier is always the dissemination of Hensgen, Finkel and Manber (1988).
    """
    part = (n - 1) / n
    return {
        "allreduce": (2 * (n - 1), 2 * part),
        "reducescatter": (n - 1, part),
        "allgather": (n - 1, part),
        "alltoall": (n - 1, part),
        "broadcast": (n - 1, 1.0),
        "reduce": (n - 1, 1.0),
        "gather": (n - 1, part),
        "scatter": (n - 1, part),
        "send": (1, 1.0),
        "recv": (1, 1.0),
        "barrier": (_log2(n), 0.0),
    }[kind]


def _tree(kind: str, n: int) -> tuple[int, float]:
    """As `_ring`, for algorithms of about log2(n) rounds.

    Reduce-scatter uses recursive halving, all-gather recursive doubling, and all-reduce the one after the other
    (Rabenseifner); gather and scatter are binomial; all-to-all is Bruck's, which sends half its buffer in every round.
    """
    part, rounds = (n - 1) / n, _log2(n)
    return {
        "allreduce": (2 * rounds, 2 * part),
        "reducescatter": (rounds, part),
        "allgather": (rounds, part),
        "alltoall": (rounds, rounds / 2),
        "broadcast": (rounds, 1.0),
        "reduce": (rounds, 1.0),
        "gather": (rounds, part),
        "scatter": (rounds, part),
        "send": (1, 1.0),
        "recv": (1, 1.0),
        "barrier": (rounds, 0.0),
    }[kind]


def _log2(n: int) -> int:
    """Rounds that reach n ranks when each round doubles them."""
    return (n - 1).bit_length()


class EmulatedNetwork:
    """The emulated network of one run, as seen from one rank.

    Args:
        settings: of the fabric.
        rank, world_size: of this process.
        folder: where the ranks of one host share their arrival times (`arrivals.meeting_place`); None without.
    """

    def __init__(self, settings: EmulatedFabric, rank: int, world_size: int, folder: Path | None) -> None:
        self.settings, self.rank, self._world_size, self.folder = settings, rank, world_size, folder
        late = settings.straggler_rank == rank
        self.late_ns = round(settings.straggler_ms * _NS_PER_MS) if late else 0
        """By how much this rank is late to every collective."""

    def cost_ns(self, kind: str, size_bytes: int, ranks: Sequence[int], number: int | None) -> int:
        """Cost of collective `number` of the group with these global ranks, in nanoseconds; the same on every rank of
        it.

        Sends and receives have no number that both ends agree on (None), and so no jitter.
        """
        size = self._size(ranks)
        cost = cost_ns(kind, size_bytes, size, spans_nodes=self.spans_nodes(ranks), settings=self.settings)
        return round(cost * self._slowness(kind, size_bytes) * self._jitter(ranks, number))

    def spans_nodes(self, ranks: Sequence[int]) -> bool:
        """Whether the slowest link of the group with these global ranks is one between nodes."""
        nodes = {rank // self.settings.ranks_per_node for rank in ranks}
        return len(nodes) > 1 or self._size(ranks) > self.settings.ranks_per_node

    def shared_links(self) -> SharedLinks | None:
        """The links that the groups of a rank share; None where each group has its own."""
        if self.settings.sharing is Sharing.group:
            return None
        return SharedLinks(self.folder, self.rank, self._world_size)

    def _size(self, ranks: Sequence[int]) -> int:
        size = len(ranks)
        if size == self._world_size and self.settings.emulated_world_size is not None:
            size = self.settings.emulated_world_size
        return size

    def _slowness(self, kind: str, size_bytes: int) -> float:
        """The injected fault: the factor by which collectives of this kind and size are slower."""
        settings = self.settings
        wanted = settings.slow_kind in (None, kind)
        large_enough = settings.slow_min_bytes is None or size_bytes >= settings.slow_min_bytes
        small_enough = settings.slow_max_bytes is None or size_bytes <= settings.slow_max_bytes
        return settings.slow_factor if wanted and large_enough and small_enough else 1.0

    def _jitter(self, ranks: Sequence[int], number: int | None) -> float:
        if number is None or not self.settings.jitter:
            return 1.0
        # Not `hash`, which differs between processes, and a separate generator, so that training's random numbers stay.
        chance = random.Random(f"{self.settings.seed}/{list(ranks)}/{number}")
        return 1.0 + self.settings.jitter * chance.uniform(-1.0, 1.0)
