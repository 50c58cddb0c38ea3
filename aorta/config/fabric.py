"""`fabric=...`: the network between ranks, its rules, and what a collective costs in it.

The cost model is latency plus bytes over bandwidth (Hockney) with the usual costs of ring and tree algorithms: Thakur,
Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", Int. J. of High Performance
Computing Applications 19 (2005) 49-66. The arithmetic of reductions is not charged. The run that emulates a network and
the analysis that asks what another network would have cost (`aorta.whatif`) both count by it. Must not read a
clock, or import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from aorta.config.loop import Mode, number_rules
from aorta.timeline.classes import KINDS

if TYPE_CHECKING:
    from aorta.config.schema import Config


class Algorithm(Enum):
    """The algorithm of a collective: around a ring, or in about log2(n) rounds."""

    ring = "ring"
    tree = "tree"


class Sharing(Enum):
    """Whether each process group has a link of its own, or the groups of a rank take turns on its links."""

    group = "group"
    link = "link"


@dataclass
class Fabric:
    """The network between ranks."""

    # none = the real one
    kind: str = "none"


@dataclass
class EmulatedFabric(Fabric):
    """Collectives complete when a slower or larger network would have completed them.

    The default is Ethernet (10 Gb/s within a node, 1 Gb/s between nodes, latencies of TCP), slow enough for gloo on a
    laptop. Accelerators, one direction, a device: NVLink 4 450 GB/s, PCIe 5.0 x16 63 GB/s, NDR InfiniBand 50 GB/s.
    """

    kind: str = "emulated"
    # microseconds to the first byte of a message within a node
    intra_latency_us: float = 25.0
    # GB/s (1e9 bytes) a rank sends within a node
    intra_bandwidth_gb_per_s: float = 1.25
    # microseconds between nodes, for groups that span nodes
    inter_latency_us: float = 50.0
    # GB/s between nodes
    inter_bandwidth_gb_per_s: float = 0.125
    # consecutive ranks per emulated node
    ranks_per_node: int = 1
    # algorithm of the collectives
    algorithm: Algorithm = Algorithm.ring
    # group = a link per process group; link = a rank's groups take turns on its links (on a CPU)
    sharing: Sharing = Sharing.group
    # ranks that one process stands for; null = every rank is a process
    ranks: int | None = None
    # world size assumed for groups of all ranks; null = the real size
    emulated_world_size: int | None = None
    # relative variation of collectives' times, equal on all ranks
    jitter: float = 0.0
    # seed of the jitter
    seed: int = 42
    # rank that is late to every collective; null = none
    straggler_rank: int | None = None
    # its delay in milliseconds
    straggler_ms: float = 0.0
    # factor for collectives of slow_kind, slow_min_bytes and slow_max_bytes
    slow_factor: float = 1.0
    # slow kind (allreduce, allgather, ...); null = every kind
    slow_kind: str | None = None
    # least bytes of the full array; null = any
    slow_min_bytes: int | None = None
    # most bytes of the full array; null = any
    slow_max_bytes: int | None = None


STRATEGIES_OF_ONE_PROCESS = ("ddp", "fsdp", "fsdp1", "hsdp", "tp", "fsdp_tp", "cp", "fsdp_cp")
"""Values of `parallel` whose ranks all do the same work, so that one of them can stand for all."""

MOST_EMULATED = 1 << 16
"""Ranks that one process can stand for: groups are lists of them. The largest jobs have some 100,000."""


def emulated_ranks(fabric: Fabric) -> int | None:
    """Return how many ranks the only process of a run stands for; None where every rank is a process."""
    return fabric.ranks if isinstance(fabric, EmulatedFabric) else None


def fabric_rules(config: Config, processes: int) -> Iterator[str]:
    """Yield one message per broken rule."""
    fabric, training = config.fabric, config.training
    if not isinstance(fabric, EmulatedFabric):
        return
    ranks, key = fabric.ranks, f"fabric.ranks={fabric.ranks}"
    yield from emulated_rules(fabric, processes if ranks is None else ranks)
    if ranks is None:
        if config.instrument.mode is Mode.off:
            yield "instrument.mode=off: fabric=emulated delays what is seen; set instrument.mode=observe or dedicated"
        return
    if not 2 <= ranks <= MOST_EMULATED:
        yield f"{key}: must be at least 2 and at most {MOST_EMULATED}; null where every rank is a process"
    if processes > 1:
        yield f"{key}: one process stands for all ranks, and {processes} were started; start one, without torchrun"
    if (strategy := config.parallel.strategy) not in STRATEGIES_OF_ONE_PROCESS:
        allowed = ", ".join(STRATEGIES_OF_ONE_PROCESS)
        yield f"{key}: parallel={strategy} cannot be emulated: its ranks do different work; use one of {allowed}"
    if config.workload.name == "moe":
        yield f"{key}: workload=moe computes what other ranks' values decide; use another workload"
    if fabric.straggler_rank is not None:
        yield f"{key}: no other rank waits for a straggler; set fabric.straggler_rank=null"
    if training.checkpoint_interval or training.start_step:
        yield f"{key}: one process has no trained parameters; leave out training.checkpoint_interval and start_step"


def emulated_rules(fabric: EmulatedFabric, world_size: int) -> Iterator[str]:
    """Yield one message per broken rule of the network itself."""
    yield from number_rules("fabric", fabric)
    size, straggler = fabric.emulated_world_size, fabric.straggler_rank
    if size is not None and size < world_size:
        yield f"fabric.emulated_world_size={size}: must be at least the world size {world_size}; null takes that"
    if straggler is not None and not 0 <= straggler < world_size:
        yield f"fabric.straggler_rank={straggler}: must be a rank of this run, 0 to {world_size - 1}"
    if straggler is None and fabric.straggler_ms != 0:
        yield f"fabric.straggler_ms={fabric.straggler_ms}: no rank is late by it; set fabric.straggler_rank"
    if fabric.slow_kind is not None and fabric.slow_kind not in KINDS:
        yield f"fabric.slow_kind={fabric.slow_kind}: must be one of {', '.join(KINDS)}; null is every kind"
    low, high = fabric.slow_min_bytes, fabric.slow_max_bytes
    if low is not None and high is not None and low > high:
        yield f"fabric.slow_max_bytes={high}: must be at least fabric.slow_min_bytes={low}"
    for name in ("slow_kind", "slow_min_bytes", "slow_max_bytes"):
        if fabric.slow_factor == 1 and (value := getattr(fabric, name)) is not None:
            yield f"fabric.{name}={value}: changes nothing at fabric.slow_factor=1; set fabric.slow_factor"


_NS_PER_US = 1_000


def cost_ns(kind: str, size_bytes: int, ranks: int, *, spans_nodes: bool, settings: EmulatedFabric) -> int:
    """Return the time of one collective once its last rank has arrived and its link is free, in nanoseconds.

    Ring: broadcast and reduce are pipelined along a chain, gather and scatter are linear at the root, all-to-all
    exchanges pairwise. Tree, in about log2(n) rounds: reduce-scatter uses recursive halving, all-gather recursive
    doubling, and all-reduce the one after the other (Rabenseifner); gather and scatter are binomial; all-to-all is
    Bruck's, which sends half its buffer in every round. A barrier is always the dissemination of Hensgen, Finkel and
    Manber (1988).

    Args:
        kind: one of `timeline.classes.KINDS`; another is a KeyError.
        size_bytes: of the full array, as docs/dev/measuring.md, section 1, counts it (all-to-all: one rank's send
            buffer).
        ranks: n, the size of the group.
        spans_nodes: whether the group's slowest link is one between nodes.
        settings: latency, bandwidth and algorithm.
    """
    if ranks == 1:
        return 0
    ring, part = settings.algorithm is Algorithm.ring, (ranks - 1) / ranks
    doublings = (ranks - 1).bit_length()  # rounds that reach all ranks when each doubles them
    rounds = ranks - 1 if ring else doublings
    # Consecutive messages, and how many times the full array passes a rank's link.
    messages, arrays = {
        "allreduce": (2 * rounds, 2 * part),
        "reducescatter": (rounds, part),
        "allgather": (rounds, part),
        "alltoall": (rounds, part if ring else rounds / 2),
        "broadcast": (rounds, 1.0),
        "reduce": (rounds, 1.0),
        "gather": (rounds, part),
        "scatter": (rounds, part),
        "send": (1, 1.0),
        "recv": (1, 1.0),
        "barrier": (doublings, 0.0),
    }[kind]
    latency_us, gb_per_s = settings.intra_latency_us, settings.intra_bandwidth_gb_per_s
    if spans_nodes:
        latency_us, gb_per_s = settings.inter_latency_us, settings.inter_bandwidth_gb_per_s
    # 1 GB/s is 1e9 bytes a second: 1 byte a nanosecond.
    return round(messages * latency_us * _NS_PER_US + arrays * size_bytes / gb_per_s)


def network_cost_ns(
    kind: str, size_bytes: int, ranks: Sequence[int], world_size: int, settings: EmulatedFabric
) -> float:
    """Return `cost_ns` of the group with these global ranks, the injected fault included, jitter not."""
    size, between = _group_size(ranks, world_size, settings), spans_nodes(ranks, world_size, settings)
    ns = cost_ns(kind, size_bytes, size, spans_nodes=between, settings=settings)
    slow = settings.slow_kind in (None, kind)
    slow &= settings.slow_min_bytes is None or size_bytes >= settings.slow_min_bytes
    slow &= settings.slow_max_bytes is None or size_bytes <= settings.slow_max_bytes
    return ns * (settings.slow_factor if slow else 1.0)


def _group_size(ranks: Sequence[int], world_size: int, settings: EmulatedFabric) -> int:
    """Return how many ranks the group with these global ranks counts as: groups of all ranks may be emulated larger."""
    larger = settings.emulated_world_size if len(ranks) == world_size else None
    return len(ranks) if larger is None else larger


def spans_nodes(ranks: Sequence[int], world_size: int, settings: EmulatedFabric) -> bool:
    """Return whether the slowest link of the group with these global ranks is one between nodes."""
    nodes = {rank // settings.ranks_per_node for rank in ranks}
    return len(nodes) > 1 or _group_size(ranks, world_size, settings) > settings.ranks_per_node
