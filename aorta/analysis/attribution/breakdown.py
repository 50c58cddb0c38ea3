"""Breaks a difference in exposed communication down by collective, region, rank and so on.

The totals of each side are sums of whole nanoseconds by `ExposedKey`; they grow with the number of different
collectives and blocks, not with the number of steps. Means are formed once, from these sums. The rows of each breakdown
add up to the whole difference. Must not: lose a nanosecond; rows that are not listed are summed up in the last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np

from aorta.analysis.account import exposed_pieces
from aorta.analysis.aggregate import LabelledRun
from aorta.documents.comparison import AttributionRow
from aorta.documents.formatting import TEXT
from aorta.read.frames import Exposed, Groups, Ints, Region
from aorta.read.run import ExposedSums, Run
from aorta.timeline.overlap import NS_PER_MS

WAIT: Final = "wait"
TRANSFER: Final = "transfer"
BUBBLE_PART: Final = "bubble"
UNKNOWN_PART: Final = "unknown"
PARTS: Final = {
    WAIT: "waiting for peers",
    TRANSFER: "transfer",
    BUBBLE_PART: "waiting for another stage of the pipeline",
    UNKNOWN_PART: "waiting or transfer, not known which",
}
UNEXPLAINED: Final = "untold"
"""Stands in place of a kind: exposed communication that the record counts but none of its rows covers."""
BUCKETED: Final = ("ddp", "ep", "cp")
"""Values of `parallel.strategy` whose only all-reduces are DistributedDataParallel's, one for each bucket."""
SHOWN_ROWS: Final = 24
_RESTS_ON: Final = ("exposed_comm_ms", "compute_ms")
_KERNELS: Final = "host-bound: the profiler's kernels say how much is exposed, but not in which block or collective"


class ExposedKey(NamedTuple):
    """One collective of a step, the region where it was exposed, and whether the rank was then waiting for a peer
    (`part`). `order` counts the collectives of its kind and group in the step, from 0; `bytes` is -1 where the source
    does not say.
    """

    kind: str
    group: str
    group_size: int | None
    bytes: int
    order: int
    phase: str | None
    block: str | None
    part: str


@dataclass
class Totals:
    """One side of a comparison, all ranks of all its launches: `sum(exposed.values()) == sums.exposed_ns`.

    Attributes:
        ranks: rank -> exposed nanoseconds.
        group_titles: process group -> what a person calls it.
        parallel: the strategy of the first launch.
        host_bound: why marks do not bear the exposed communication and computation of a launch; nothing after it is
            added.
    """

    sums: ExposedSums = field(default_factory=ExposedSums)
    exposed: Counter[ExposedKey] = field(default_factory=Counter)
    launches: int = 0
    ranks: Counter[int] = field(default_factory=Counter)
    parallel: str = ""
    group_titles: dict[str, str] = field(default_factory=dict)
    host_bound: str | None = None

    def add(self, rank: int, sums: ExposedSums) -> None:
        """Add the sums of one rank."""
        self.sums.add(sums)
        self.ranks[rank] += sums.exposed_ns
        if sums.unexplained_ns:
            self.exposed[ExposedKey(UNEXPLAINED, "", None, -1, 0, None, None, UNKNOWN_PART)] += sums.unexplained_ns

    def ms(self, total_ns: int) -> float:
        """Return the mean over rank-steps, in milliseconds."""
        return total_ns / self.sums.rank_steps / NS_PER_MS


def totals_of(launches: Iterable[LabelledRun]) -> Totals:
    """Add up all launches of one side, one at a time. A rank-step counts once, whichever launch it belongs to.

    Raises:
        InputError: a record cannot be read again.
    """
    totals = Totals()
    for dataset in launches:
        run = dataset.run
        if not totals.launches:
            totals.parallel = run.source.parallel or ""
        for basis in map(dataset.pace.basis, _RESTS_ON):
            if basis.source != "marks":
                totals.host_bound = basis.reason or _KERNELS
        if totals.host_bound is not None:
            break
        totals.launches += 1
        totals.group_titles = run.group_titles | totals.group_titles
        for exposed, sums in exposed_pieces(run):
            for rank, of_rank in sums.items():
                totals.add(rank, of_rank)
            add_exposed(totals, run, exposed, dataset.collectives.wait_ns)
        del dataset, run  # otherwise the next launch is loaded while this one is still in memory
    return totals


def add_exposed(totals: Totals, run: Run, exposed: Exposed, wait_ns: Ints) -> None:
    """Add exposed communication, by collective, region, and whether the rank was then waiting for a peer.

    Args:
        exposed: its rows are those of the run.
        wait_ns: of each collective of the run; negative where it is unknown.
    """
    name, wait_ns = run.collectives.name[exposed.row], wait_ns[exposed.row]
    length_ns = exposed.to_ns - exposed.from_ns
    waited_ns = np.clip(wait_ns - exposed.from_ns, 0, length_ns)
    unknown = ~exposed.bubble & (wait_ns < 0)
    known = ~exposed.bubble & ~unknown
    lengths = {WAIT: waited_ns * known, TRANSFER: (length_ns - waited_ns) * known}
    lengths |= {BUBBLE_PART: length_ns * exposed.bubble, UNKNOWN_PART: length_ns * unknown}
    sizes = [len(members) or None for members in run.frames.members]
    by = Groups(name, exposed.order, exposed.region)
    keys = list(zip(*(column[by.first].tolist() for column in (name, exposed.order, exposed.region)), strict=True))
    for part, of_pieces in lengths.items():
        for (code, order, region), total in zip(keys, by.reduce(np.add, of_pieces).tolist(), strict=True):
            if total:
                what, (phase, block) = run.collectives.names[code], exposed.regions[region]
                key = ExposedKey(what.kind, what.group, sizes[code], what.bytes, order, phase, block, part)
                totals.exposed[key] += total


@dataclass(frozen=True)
class Means:
    """Turns sums of nanoseconds into rows: means per rank-step of each side, and shares of the whole difference."""

    reference: Totals
    candidate: Totals

    @property
    def difference_ms(self) -> float:
        """Difference of the mean exposed communication, candidate minus reference."""
        before, after = self.reference, self.candidate
        return after.ms(after.sums.exposed_ns) - before.ms(before.sums.exposed_ns)

    def row(self, dimension: str, what: str, before_ns: int, after_ns: int, **key: Any) -> AttributionRow:
        """Return one row. It keeps the sums in nanoseconds so that anybody can add the rows up exactly."""
        left, right, total = self.reference.ms(before_ns), self.candidate.ms(after_ns), self.difference_ms
        return AttributionRow(
            what=what,
            dimension=dimension,
            reference_ms=left,
            candidate_ms=right,
            difference_ms=right - left,
            share=(right - left) / total if total else None,
            reference_ns=before_ns,
            candidate_ns=after_ns,
            **key,
        )

    def rows(
        self,
        dimension: str,
        before: Mapping[Any, int],
        after: Mapping[Any, int],
        describe: Callable[[Any], tuple[str, dict[str, Any]]],
    ) -> list[AttributionRow]:
        """Return one row per key, the largest difference first; those beyond `SHOWN_ROWS` are one last row."""
        found = []
        for key in dict.fromkeys([*before, *after]):
            what, fields = describe(key)
            found.append(self.row(dimension, what, before.get(key, 0), after.get(key, 0), **fields))
        found.sort(key=lambda row: (-abs(row.difference_ms), row.what))
        if rest := found[SHOWN_ROWS:]:
            sums = sum(row.reference_ns for row in rest), sum(row.candidate_ns for row in rest)
            found[SHOWN_ROWS:] = [self.row(dimension, f"{len(rest)} others", *sums, others=len(rest))]
        return found


_KEYS: Final = {
    "kind": ("kind",),
    "group": ("group", "group_size"),
    "collective": ("kind", "group", "group_size", "bytes"),
    "order": ("kind", "group", "group_size", "bytes", "order"),
    "phase": ("phase",),
    "block": ("block",),
    "region": ("phase", "block"),
    "part": ("part",),
}
"""Breakdown -> the fields of `ExposedKey` that its rows are by."""


def dimensions(means: Means, parallel: str) -> dict[str, list[AttributionRow]]:
    """Break the difference down by all of `_KEYS`, by rank, and as a balance: exposed time changes with the time spent
    in communication and with how much of it is hidden. The rows of each breakdown add up to the difference.

    Args:
        parallel: the strategy of the runs. With DDP an all-reduce is named as a bucket.
    """
    found, titles = {}, means.candidate.group_titles | means.reference.group_titles
    for dimension, fields in _KEYS.items():
        of = attrgetter(*fields)
        examples: dict[Any, ExposedKey] = {}
        sides: list[Counter[Any]] = [Counter(), Counter()]
        for side, totals in zip(sides, (means.reference, means.candidate), strict=True):
            for key, length_ns in totals.exposed.items():
                side[of(key)] += length_ns
                examples.setdefault(of(key), key)
        described = {
            value: (_name(dimension, key, parallel, titles), {name: getattr(key, name) for name in fields})
            for value, key in examples.items()
        }
        found[dimension] = means.rows(dimension, sides[0], sides[1], described.__getitem__)
    before, after = means.reference, means.candidate
    found["rank"] = means.rows("rank", before.ranks, after.ranks, lambda rank: (f"rank {rank}", {"rank": rank}))
    comm_ns, hidden_ns = (before.sums.comm_ns, after.sums.comm_ns), (-before.sums.hidden_ns, -after.sums.hidden_ns)
    found["balance"] = [
        means.row("balance", "time in communication", *comm_ns, term="communication"),
        means.row("balance", "communication that is hidden", *hidden_ns, term="hidden"),
    ]
    return found


def _name(dimension: str, key: ExposedKey, parallel: str, titles: Mapping[str, str]) -> str:
    if key.kind == UNEXPLAINED and dimension in ("kind", "group", "collective", "order"):
        return "communication without a row in the record"
    size = "size unknown" if key.group_size is None else f"{key.group_size} ranks"
    group = f"{titles.get(key.group, key.group)} ({size})"
    collective = f"{key.kind} of {TEXT.size(key.bytes, exact=dimension == 'collective')} on {group}"
    match dimension:
        case "kind":
            return key.kind
        case "group":
            return group
        case "collective":
            return collective
        case "order" if parallel in BUCKETED and key.kind == "allreduce":
            return f"bucket {key.order} ({collective})"
        case "order":
            return f"{collective}, number {key.order} of its kind in the step"
        case "block":
            return key.block or "outside of every block"
        case "part":
            return PARTS[key.part]
        case _:
            return place_name(Region(key.phase, key.block if dimension == "region" else None))


def place_name(place: Region) -> str:
    """Return a pass of a block, or work outside the blocks."""
    if place.phase is None:
        return "not known"
    return place.phase if place.block is None else f"{place.phase} of {place.block}"


def computing(means: Means) -> list[AttributionRow]:
    """Compute time of each pass of each block, per rank-step. It is no part of the difference, so it has no share."""
    before, after = means.reference.sums.computing, means.candidate.sums.computing
    rows = means.rows("computing", before, after, lambda place: (place_name(place), place._asdict()))
    for row in rows:
        row.share = None
    return rows
