"""Explains exposed communication: of one run where it is, of two sides of a comparison where it differs
(docs/dev/attribution.md).

Each side is one dataset or several launches, which are read one at a time. Its totals are sums of whole nanoseconds by
`ExposedKey`: they grow with the number of different collectives and blocks, not with the number of steps. Means are
formed once, from these sums, so the rows of each breakdown add up to the whole.

Must not: judge whether there is a difference (`compare` does) or what its cause is (`account` does), hold two launches,
or lose a nanosecond; rows that are not listed are summed up in the last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from aorta.analysis.account import BUBBLE, NOT_KNOWN, exposed_pieces, parts_of
from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.pace import ONE_RANK
from aorta.documents.comparison import AttributedSide, Attribution, AttributionRow
from aorta.documents.explanations import ExposedBreakdown, ExposedRow
from aorta.documents.formatting import TEXT
from aorta.read.frames import Exposed, Groups, Ints, Region
from aorta.read.run import ExposedSums, Run
from aorta.timeline.overlap import NS_PER_MS

Launches: TypeAlias = LabelledRun | Iterable[LabelledRun]
DEFINITION: Final = (
    "mean exposed_comm_ms over the steps of all ranks after warm-up, candidate minus reference; every exposed "
    "nanosecond belongs to one collective, one place and one part, so the rows of each dimension add up to the "
    "difference (docs/dev/attribution.md)"
)
UNEXPLAINED: Final = "unexplained"
"""Stands in place of a kind: exposed communication that the record counts but none of its rows covers."""
BUCKETED: Final = ("ddp", "ep", "cp")
"""Values of `parallel.strategy` whose only all-reduces are DistributedDataParallel's, one for each bucket."""
SHOWN_ROWS: Final = 24
_OF_COLLECTIVES: Final = ("group", "collective", "order")
_DIMENSIONS: Final = (*_OF_COLLECTIVES, "region", "part")
_RESTS_ON: Final = ("exposed_comm_ms", "compute_ms")
_KERNELS: Final = "host-bound: the profiler's kernels say how much is exposed, but not in which block or collective"
_NOTHING: Final = "no step after warm-up whose exposed communication is known"


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
            self.exposed[ExposedKey(UNEXPLAINED, "", None, -1, 0, None, None, NOT_KNOWN)] += sums.unexplained_ns

    def ms(self, total_ns: int) -> float:
        """Return the mean over rank-steps, in milliseconds."""
        return total_ns / self.sums.rank_steps / NS_PER_MS


def attribute(reference: Launches, candidate: Launches) -> Attribution:
    """Compute `attribution` of a comparison. Its rows are in milliseconds per rank-step.

    Args:
        reference, candidate: a dataset, or an iterable of launches. Launches are consumed one at a time, so they may be
            loaded lazily.

    Raises:
        InputError: a record cannot be read again.
    """
    sides = {
        side: totals_of([launches] if isinstance(launches, LabelledRun) else launches)
        for side, launches in (("reference", reference), ("candidate", candidate))
    }
    unknown = [f"{side}: {totals.host_bound}" for side, totals in sides.items() if totals.host_bound is not None]
    if unknown:
        return Attribution(definition=DEFINITION, reason="; ".join(unknown))
    empty = [side for side, totals in sides.items() if not totals.sums.rank_steps]
    if empty:
        return Attribution(definition=DEFINITION, reason=f"{' and '.join(empty)}: {_NOTHING}")
    means = Means(**sides)
    computed = (
        Counter({region_name(region): length_ns for region, length_ns in totals.sums.computing.items()})
        for totals in sides.values()
    )
    return Attribution(
        definition=DEFINITION,
        unit="ms per step and rank",
        reason=None,
        difference_ms=means.difference_ms,
        **{side: _side(totals) for side, totals in sides.items()},
        dimensions=means.dimensions(),
        computing=means.rows(*computed, shares=False),  # no part of the difference
    )


def exposed_breakdown(dataset: LabelledRun) -> ExposedBreakdown:
    """Break the exposed communication of one run down by group, collective, region of the step, part and rank: the
    difference from a run that has none.

    Raises:
        InputError: a record cannot be read again.
    """
    if dataset.pace.basis("overlap_ratio").reason == ONE_RANK:
        return ExposedBreakdown(reason=ONE_RANK)
    totals = totals_of([dataset])
    if totals.host_bound is not None or not totals.sums.rank_steps:
        return ExposedBreakdown(reason=totals.host_bound or _NOTHING)
    means = Means(Totals(sums=ExposedSums(rank_steps=1)), totals)
    found = means.dimensions()
    rows = {
        name: [ExposedRow(row.what, row.candidate_ms, row.share) for row in found[name]]
        for name in ("group", "collective", "region", "part", "rank")
    }
    steps = totals.sums.rank_steps
    return ExposedBreakdown(reason=None, rank_steps=steps, exposed_ms=means.difference_ms, **rows)


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
    name = run.collectives.name[exposed.row]
    sizes = [len(members) or None for members in run.frames.members]
    by = Groups(name, exposed.order, exposed.region)
    keys = list(zip(*(column[by.first].tolist() for column in (name, exposed.order, exposed.region)), strict=True))
    for part, of_pieces in parts_of(exposed, wait_ns[exposed.row]).items():
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

    def dimensions(self) -> dict[str, list[AttributionRow]]:
        """Break the difference down in every way. The rows of each add up to the difference."""
        before, after = self.reference, self.candidate
        titles = after.group_titles | before.group_titles
        bucketed = before.parallel == after.parallel and after.parallel in BUCKETED
        found = {}
        for name in _DIMENSIONS:
            sums = Counter[str](), Counter[str]()
            for side, totals in zip(sums, (before, after), strict=True):
                for key, length_ns in totals.exposed.items():
                    side[_name(name, key, titles, bucketed=bucketed)] += length_ns
            found[name] = self.rows(*sums)
        of_ranks = (Counter({f"rank {rank}": ns for rank, ns in side.ranks.items()}) for side in (before, after))
        return {**found, "rank": self.rows(*of_ranks)}

    def rows(self, before: Counter[str], after: Counter[str], *, shares: bool = True) -> list[AttributionRow]:
        """Return a row for each name, the largest difference first; those beyond `SHOWN_ROWS` are one last row.

        Args:
            before, after: nanoseconds by name of what they are of, on each side.
        """

        def row(what: str, before_ns: int, after_ns: int) -> AttributionRow:
            left, right, total = self.reference.ms(before_ns), self.candidate.ms(after_ns), self.difference_ms
            share = (right - left) / total if shares and total else None
            return AttributionRow(what, left, right, right - left, share)

        found = [row(name, before[name], after[name]) for name in dict.fromkeys([*before, *after])]
        found.sort(key=lambda row: (-abs(row.difference_ms), row.what))
        if others := [row.what for row in found[SHOWN_ROWS:]]:
            sums = (sum(side[name] for name in others) for side in (before, after))
            found[SHOWN_ROWS:] = [row(f"{len(others)} others", *sums)]
        return found


def _name(dimension: str, key: ExposedKey, titles: Mapping[str, str], *, bucketed: bool) -> str:
    """Name what a key is of in a dimension; `bucketed`: an all-reduce is a bucket of DDP's."""
    if key.kind == UNEXPLAINED and dimension in _OF_COLLECTIVES:
        return "communication without a row in the record"
    size = "size unknown" if key.group_size is None else f"{key.group_size} ranks"
    group = f"{titles.get(key.group, key.group)} ({size})"
    collective = f"{key.kind} of {TEXT.size(key.bytes, exact=dimension == 'collective')} on {group}"
    match dimension:
        case "group":
            return group
        case "collective":
            return collective
        case "order" if bucketed and key.kind == "allreduce":
            return f"bucket {key.order} ({collective})"
        case "order":
            return f"{collective}, number {key.order} of its kind in the step"
        case "region":
            return region_name(Region(key.phase, key.block))
        case _:
            return "waiting for another stage of the pipeline" if key.part == BUBBLE else key.part


def region_name(region: Region) -> str:
    """Return a pass of a block, or work outside the blocks."""
    if region.phase is None:
        return "not known"
    return region.phase if region.block is None else f"{region.phase} of {region.block}"


def _side(totals: Totals) -> AttributedSide:
    sums = totals.sums
    return AttributedSide(
        launches=totals.launches,
        rank_steps=sums.rank_steps,
        rank_steps_left_out=sums.left_out,
        window_ms=totals.ms(sums.window_ns),
        comm_ms=totals.ms(sums.comm_ns),
        compute_comm_ms=totals.ms(sums.hidden_ns),
        exposed_comm_ms=totals.ms(sums.exposed_ns),
        compute_ms=totals.ms(sums.compute_ns),
        unexplained_ms=totals.ms(sums.unexplained_ns),
    )
