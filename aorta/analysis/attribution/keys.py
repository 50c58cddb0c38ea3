"""What a nanosecond of exposed communication is put down to, and the sums of a run.

Enters: exposed and nanoseconds, rank by rank. Leaves: a `Totals`, as large as a run has different collectives and
blocks, whatever its number of steps. Must not: divide; means are formed once, from sums of whole nanoseconds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Final, NamedTuple

WAIT: Final = "wait"
TRANSFER: Final = "transfer"
UNKNOWN_PART: Final = "unknown"
UNEXPLAINED: Final = "untold"
"""In place of a kind: the record counts exposed communication that none of its rows covers."""
ORDER_LIMIT: Final = 512
"""Collectives of one kind, group and step that are told apart by their order; later ones are taken together."""


class Region(NamedTuple):
    """Where in a step: a pass of a block (`forward`, `backward`), or work beside it (`optimizer`, `clip`, `data`),
    which has no block. Both None where the source tells no place.
    """

    phase: str | None
    block: str | None


NOWHERE: Final = Region(None, None)


class ExposedKey(NamedTuple):
    """One collective of a step (`order` counts those of its kind and group, from 0), where it was exposed, and whether
    the rank waited for a peer then (`part`). `size`: ranks of the group; `bytes` -1: not told.
    """

    kind: str
    group: str
    size: int | None
    bytes: int
    order: int
    phase: str | None
    block: str | None
    part: str


@dataclass
class Sums:
    """Of the rank-steps that count, in nanoseconds. `hidden_ns + exposed_ns == comm_ns`."""

    rank_steps: int = 0
    left_out: int = 0
    """Rank-steps after warm-up whose exposed communication is null."""
    window_ns: int = 0
    comm_ns: int = 0
    exposed_ns: int = 0
    compute_ns: int = 0

    def add(self, other: Sums) -> None:
        """Take another rank, or another launch, in."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def hidden_ns(self) -> int:
        """Communication that computation hid."""
        return self.comm_ns - self.exposed_ns


@dataclass
class RankTotals:
    """One rank of one launch: `sum(exposed.values()) == sums.exposed_ns`."""

    sums: Sums = field(default_factory=Sums)
    exposed: Counter[ExposedKey] = field(default_factory=Counter)
    computing: Counter[Region] = field(default_factory=Counter)
    """Computing in each pass of each block, stalls taken out, in ns."""


class LateRank(NamedTuple):
    """A rank that the others of its group wait for. Groups may share name and size: `members` tell them apart."""

    group: str
    members: tuple[int, ...]
    rank: int


@dataclass
class Totals:
    """One side of a comparison: all ranks of all its launches."""

    launches: int = 0
    sums: Sums = field(default_factory=Sums)
    exposed: Counter[ExposedKey] = field(default_factory=Counter)
    computing: Counter[Region] = field(default_factory=Counter)
    ranks: Counter[int] = field(default_factory=Counter)
    """Rank -> exposed ns."""
    waits: Counter[tuple[str, int | None, int]] = field(default_factory=Counter)
    """Group, its size and a rank -> exposed ns in which that rank waited for others."""
    stragglers: Counter[LateRank] = field(default_factory=Counter)
    """In how many launches a rank was named."""
    late_ms: defaultdict[LateRank, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By how much, in each launch that names it."""

    def add(self, rank: int, found: RankTotals) -> None:
        """Take one rank in."""
        self.sums.add(found.sums)
        self.exposed.update(found.exposed)
        self.computing.update(found.computing)
        self.ranks[rank] += found.sums.exposed_ns
        for key, length in found.exposed.items():
            if key.part == WAIT:
                self.waits[key.group, key.size, rank] += length

    def waits_in(self, late: LateRank) -> dict[int, int]:
        """Rank -> exposed ns of waiting in groups of the name and size of that of `late`, its own and others."""
        return {
            rank: length
            for (group, size, rank), length in self.waits.items()
            if (group, size) == (late.group, len(late.members))
        }
