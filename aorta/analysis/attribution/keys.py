"""The keys by which exposed communication is counted, their names in a sentence, and the sums of a run.

A `Totals` grows with the number of different collectives and blocks, not with the number of steps. Must not: divide;
means are formed once, from sums of whole nanoseconds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from aorta.analysis.formatting import TEXT, group_title
from aorta.analysis.frames import Region
from aorta.analysis.run import ExposedSums

WAIT: Final = "wait"
TRANSFER: Final = "transfer"
BUBBLE_PART: Final = "bubble"
UNKNOWN_PART: Final = "unknown"
UNEXPLAINED: Final = "untold"
"""Stands in place of a kind: exposed communication that the record counts but none of its rows covers."""


class ExposedKey(NamedTuple):
    """One collective of a step, the region where it was exposed, and whether the rank was then waiting for a peer
    (`part`). `order` counts the collectives of its kind and group in the step, from 0. `size` is the number of ranks of
    the group; `bytes` is -1 where the source does not say.
    """

    kind: str
    group: str
    size: int | None
    bytes: int
    order: int
    phase: str | None
    block: str | None
    part: str


_UNEXPLAINED: Final = ExposedKey(UNEXPLAINED, "", None, -1, 0, None, None, UNKNOWN_PART)


class LateRank(NamedTuple):
    """A rank that the others of its group wait for. Groups may share name and size, so `members` distinguishes them."""

    group: str
    members: tuple[int, ...]
    rank: int


@dataclass
class Totals:
    """The totals of one side of a comparison, all ranks of all its launches: `sum(exposed.values()) ==
    sums.exposed_ns`.
    """

    sums: ExposedSums = field(default_factory=ExposedSums)
    exposed: Counter[ExposedKey] = field(default_factory=Counter)
    launches: int = 0
    ranks: Counter[int] = field(default_factory=Counter)
    """Rank -> exposed nanoseconds."""
    waits: Counter[tuple[str, int | None, int]] = field(default_factory=Counter)
    """(group, its size, rank) -> exposed nanoseconds in which that rank waited for others."""
    stragglers: Counter[LateRank] = field(default_factory=Counter)
    """In how many launches a rank was named as the straggler."""
    late_ms: defaultdict[LateRank, list[float]] = field(default_factory=lambda: defaultdict(list))
    bases: defaultdict[LateRank, set[str]] = field(default_factory=lambda: defaultdict(set))
    """By how many milliseconds it was late, a value per launch that names it, and by what (`Straggler.basis`)."""

    def add(self, rank: int, sums: ExposedSums) -> None:
        """Add the sums of one rank."""
        self.sums.add(sums)
        self.ranks[rank] += sums.exposed_ns
        if sums.unexplained_ns:
            self.exposed[_UNEXPLAINED] += sums.unexplained_ns

    def waits_in(self, late: LateRank) -> dict[int, int]:
        """Return, by rank, exposed ns of waiting in all groups that share name and size with the group of `late`."""
        return {
            rank: length
            for (group, size, rank), length in self.waits.items()
            if (group, size) == (late.group, len(late.members))
        }


PARTS: Final = {
    WAIT: "waiting for peers",
    TRANSFER: "transfer",
    BUBBLE_PART: "waiting for another stage of the pipeline",
    UNKNOWN_PART: "waiting or transfer, not known which",
}
UNTOLD_WHAT: Final = "communication without a row in the record"
BUCKETED: Final = ("ddp", "ep", "cp")
"""Values of `parallel.strategy` whose only all-reduces are DistributedDataParallel's, one for each bucket."""
_NO_PLACE: Final = "not known"


def group_name(group: str, size: int | None) -> str:
    """Return the group's name, with its size."""
    return f"{group_title(group)} ({'size unknown' if size is None else f'{size} ranks'})"


def collective_name(key: ExposedKey) -> str:
    """Return kind, message size and group."""
    if key.kind == UNEXPLAINED:
        return UNTOLD_WHAT
    return f"{key.kind} of {TEXT.size(key.bytes)} on {group_name(key.group, key.size)}"


def order_name(key: ExposedKey, parallel: str) -> str:
    """Return which collective of the step it is; a bucket where DDP issues one all-reduce per bucket."""
    if key.kind == UNEXPLAINED:
        return UNTOLD_WHAT
    if parallel in BUCKETED and key.kind == "allreduce":
        return f"bucket {key.order} ({collective_name(key)})"
    return f"{collective_name(key)}, number {key.order} of its kind in the step"


def place_name(place: Region) -> str:
    """Return a pass of a block, or work outside the blocks."""
    if place.phase is None:
        return _NO_PLACE
    return place.phase if place.block is None else f"{place.phase} of {place.block}"
