"""`fabric=...`: the network between ranks."""

from __future__ import annotations

from dataclasses import dataclass

from aorta.config.groups.choices import Algorithm, Sharing


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
