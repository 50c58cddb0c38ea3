"""Cost model of the emulated fabric: a collective's kind, bytes and group -> nanoseconds. Pure arithmetic.

The model is latency plus bytes over bandwidth (Hockney) with the usual costs of ring and tree algorithms: Thakur,
Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", Int. J. of High Performance
Computing Applications 19 (2005) 49-66. The arithmetic of reductions is not charged.

The run that emulates a network and the analysis that asks what another network would have cost
(`aorta.analysis.whatif`) both count by it. Must not read a clock, or import torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from aorta.config.schema import Algorithm, EmulatedFabric

_NS_PER_US = 1_000


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


def network_cost_ns(
    kind: str, size_bytes: int, ranks: Sequence[int], world_size: int, settings: EmulatedFabric
) -> float:
    """As `cost_ns` for the group with these global ranks, the injected fault included, jitter not."""
    size = group_size(ranks, world_size, settings)
    between = spans_nodes(ranks, world_size, settings)
    return cost_ns(kind, size_bytes, size, spans_nodes=between, settings=settings) * slowness(
        kind, size_bytes, settings
    )


def group_size(ranks: Sequence[int], world_size: int, settings: EmulatedFabric) -> int:
    """How many ranks the group with these global ranks counts as: groups of all ranks may be emulated larger."""
    if len(ranks) == world_size and settings.emulated_world_size is not None:
        return settings.emulated_world_size
    return len(ranks)


def spans_nodes(ranks: Sequence[int], world_size: int, settings: EmulatedFabric) -> bool:
    """Whether the slowest link of the group with these global ranks is one between nodes."""
    nodes = {rank // settings.ranks_per_node for rank in ranks}
    return len(nodes) > 1 or group_size(ranks, world_size, settings) > settings.ranks_per_node


def slowness(kind: str, size_bytes: int, settings: EmulatedFabric) -> float:
    """The injected fault: the factor by which collectives of this kind and size are slower."""
    wanted = settings.slow_kind in (None, kind)
    large_enough = settings.slow_min_bytes is None or size_bytes >= settings.slow_min_bytes
    small_enough = settings.slow_max_bytes is None or size_bytes <= settings.slow_max_bytes
    return settings.slow_factor if wanted and large_enough and small_enough else 1.0
