"""`fabric=...`: the network between ranks, and its rules. Must not import torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aorta.config.groups.common import Algorithm, Mode, Sharing, at_least
from aorta.timeline.classes import KINDS

if TYPE_CHECKING:
    from aorta.config.schema import Config


@dataclass
class Fabric:
    """The network between ranks."""

    # none = the real one
    kind: str = "none"


@dataclass
class EmulatedFabric(Fabric):
    """A slower or larger network than the real one: collectives complete when it would have completed them."""

    kind: str = "emulated"
    # microseconds one message takes between two ranks of a node, before its first byte
    intra_latency_us: float = 25.0
    # GB/s (1e9 bytes a second) a rank sends at within a node
    intra_bandwidth_gb_per_s: float = 1.25
    # the same between nodes; a group that spans nodes uses these two
    inter_latency_us: float = 50.0
    # GB/s a rank sends at between nodes
    inter_bandwidth_gb_per_s: float = 0.125
    # consecutive ranks that make one emulated node
    ranks_per_node: int = 1
    # times are those of a ring or of a tree
    algorithm: Algorithm = Algorithm.ring
    # group = each process group has a link of its own, at full bandwidth; link = the groups of a rank share its link
    # within the node and its link between nodes, and take turns (on a CPU)
    sharing: Sharing = Sharing.group
    # groups of all ranks get the times of a world of this size; smaller groups keep their own; null = the real size
    emulated_world_size: int | None = None
    # each collective takes up to this part more or less, the same on every rank; 0 = always the same
    jitter: float = 0.0
    # seed of the jitter
    seed: int = 42
    # rank that is late to every collective; null = none
    straggler_rank: int | None = None
    # milliseconds by which it is late
    straggler_ms: float = 0.0
    # collectives that match slow_kind, slow_min_bytes and slow_max_bytes take this many times as long; 1 = none do
    slow_factor: float = 1.0
    # kind of collective that is slow (allreduce, reducescatter, allgather, ...); null = every kind
    slow_kind: str | None = None
    # bytes of the full array from which on a collective is slow; null = any
    slow_min_bytes: int | None = None
    # bytes up to which a collective is slow; null = any
    slow_max_bytes: int | None = None


def fabric_rules(config: Config, world_size: int) -> Iterator[str]:
    """One message per broken rule."""
    if isinstance(config.fabric, EmulatedFabric):
        yield from emulated_rules(config.fabric, world_size)
        if config.instrument.mode is Mode.off:
            yield "instrument.mode=off: fabric=emulated delays what is seen; set instrument.mode=observe or dedicated"


def emulated_rules(fabric: EmulatedFabric, world_size: int) -> Iterator[str]:
    """One message per broken rule of the emulated network alone."""
    for name in ("intra_bandwidth_gb_per_s", "inter_bandwidth_gb_per_s"):
        if not 0 < (value := getattr(fabric, name)) < math.inf:
            yield f"fabric.{name}={value}: must be greater than 0 and finite"
    for name in ("intra_latency_us", "inter_latency_us", "straggler_ms"):
        if not 0 <= (value := getattr(fabric, name)) < math.inf:
            yield f"fabric.{name}={value}: must be at least 0 and finite"
    yield from at_least(1, {"fabric.ranks_per_node": fabric.ranks_per_node})
    if not 0 <= fabric.jitter < 1:
        yield f"fabric.jitter={fabric.jitter}: must be in [0, 1)"
    if fabric.emulated_world_size is not None and fabric.emulated_world_size < world_size:
        yield (
            f"fabric.emulated_world_size={fabric.emulated_world_size}: must not be below the real world size "
            f"{world_size}; null takes the real one"
        )
    if fabric.straggler_rank is not None and not 0 <= fabric.straggler_rank < world_size:
        yield f"fabric.straggler_rank={fabric.straggler_rank}: must be a rank of this run, 0 to {world_size - 1}"
    if fabric.straggler_rank is None and fabric.straggler_ms != 0:
        yield f"fabric.straggler_ms={fabric.straggler_ms}: no rank is late by it; set fabric.straggler_rank"
    yield from _slow_rules(fabric)


def _slow_rules(fabric: EmulatedFabric) -> Iterator[str]:
    if not 0 < fabric.slow_factor < math.inf:
        yield f"fabric.slow_factor={fabric.slow_factor}: must be greater than 0 and finite; 1 changes nothing"
    if fabric.slow_kind is not None and fabric.slow_kind not in KINDS:
        yield f"fabric.slow_kind={fabric.slow_kind}: must be one of {', '.join(KINDS)}; null is every kind"
    low, high = fabric.slow_min_bytes, fabric.slow_max_bytes
    yield from at_least(0, {"fabric.slow_min_bytes": low, "fabric.slow_max_bytes": high})
    if low is not None and high is not None and low > high:
        yield f"fabric.slow_max_bytes={high}: must be at least fabric.slow_min_bytes={low}"
    for name in ("slow_kind", "slow_min_bytes", "slow_max_bytes"):
        if fabric.slow_factor == 1 and (value := getattr(fabric, name)) is not None:
            yield f"fabric.{name}={value}: changes nothing at fabric.slow_factor=1; set fabric.slow_factor"
