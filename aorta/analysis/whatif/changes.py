"""What can be changed in a what-if, as values; how they are written is `change_words`.

Whatever the order in which they are given, changes are made in the order of `ORDER`. Must not apply a change, or parse
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from aorta.config.schema import Algorithm


@dataclass(frozen=True)
class Selection:
    """Which collectives: all of one kind, group, size and place in their step; None: any."""

    kind: str | None = None
    group: str | None = None
    least_bytes: int | None = None
    most_bytes: int | None = None
    position: int | None = None


@dataclass(frozen=True)
class CommSpeed:
    """Communication `factor` times as fast; infinite: free."""

    text: str
    which: Selection
    factor: float


@dataclass(frozen=True)
class NetworkChange:
    """Another network: what is None stays. A value is a factor of the recorded one, or absolute."""

    text: str
    field: Literal["bandwidth", "latency", "algorithm"]
    factor: float | None = None
    absolute: float | None = None
    algorithm: Algorithm | None = None


@dataclass(frozen=True)
class RankLateness:
    """A rank is later to every collective, or earlier where `late_ms` is negative."""

    text: str
    rank: int
    late_ms: float


@dataclass(frozen=True)
class NoStragglers:
    """Before no operation does a rank take more own time than the typical one, step after step."""

    text: str


@dataclass(frozen=True)
class ComputeSpeed:
    """Blocks compute `factor` times as fast."""

    text: str
    factor: float


@dataclass(frozen=True)
class WorldSize:
    """Groups of all ranks have this size."""

    text: str
    size: int


@dataclass(frozen=True)
class BucketCap:
    """DDP's buckets have another cap: bytes, or a factor of the recorded one."""

    text: str
    cap_bytes: float | None = None
    factor: float | None = None


@dataclass(frozen=True)
class PrefetchDepth:
    """FSDP gathers so many blocks ahead."""

    text: str
    depth: int


@dataclass(frozen=True)
class OverlapSwitch:
    """Communication overlaps with compute, or not at all."""

    text: str
    on: bool


Change: TypeAlias = (
    CommSpeed
    | NetworkChange
    | RankLateness
    | NoStragglers
    | ComputeSpeed
    | WorldSize
    | BucketCap
    | PrefetchDepth
    | OverlapSwitch
)
ORDER: Final[tuple[type[Change], ...]] = (
    OverlapSwitch,
    BucketCap,
    PrefetchDepth,
    ComputeSpeed,
    NoStragglers,
    RankLateness,
    WorldSize,
    NetworkChange,
    CommSpeed,
)
"""The order in which changes are applied; several of one type in the order given."""


def in_order(changes: Sequence[Change]) -> tuple[Change, ...]:
    """The order in which changes are applied."""
    return tuple(sorted(changes, key=lambda change: ORDER.index(type(change))))
