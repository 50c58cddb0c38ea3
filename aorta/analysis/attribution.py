"""Breaks exposed communication down: of a run where it is, of a comparison where it differs (docs/dev/attribution.md).

Totals of a launch are sums of whole nanoseconds by `ExposedKey`: they grow with the number of different collectives and
blocks, not with the number of steps. Means are formed once, from these sums, so the rows of each dimension add up to
the whole.

    totals = totals_of(dataset)                                  # of a launch, or why it is not known
    break_down([totals])                                         # `exposed` of a dataset
    break_down(candidate_totals, reference_totals)               # `attribution` of a comparison, all launches pooled

Must not: judge whether there is a difference (`compare` does) or what its cause is (`causes` does), or lose a
nanosecond; rows that are not listed are summed up in the last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from aorta.analysis.account import (
    BUBBLE,
    NOT_KNOWN,
    NOTHING,
    differs_from_rows,
    parts_of,
    why_open,
)
from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.pace import ONE_RANK
from aorta.documents.explanations import ExposedBreakdown, ExposedRow
from aorta.documents.formatting import TEXT
from aorta.read.frames import Exposed, Groups, Ints, Region
from aorta.read.run import ExposedSums, Run
from aorta.timeline.overlap import NS_PER_MS

UNEXPLAINED: Final = "unexplained"
"""Stands in place of a kind: exposed communication that the record counts but none of its rows covers."""
BUCKETED: Final = ("ddp", "ep", "cp")
"""Values of `parallel.strategy` whose only all-reduces are DistributedDataParallel's, one for each bucket."""
NO_ROW: Final = "communication without a row in the record"
SHOWN_ROWS: Final = 24
COMPUTING: Final = "computing"
"""The dimension that is no part of exposed communication: where the ranks computed, which hides it."""
_OF_COLLECTIVES: Final = ("group", "collective", "order")
_OF_RUN: Final = ("group", "collective", "region", "part")
_OF_CHANGE: Final = (*_OF_COLLECTIVES, "region", "part", "rank", COMPUTING)


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
    """Sums over the rank-steps of a launch: `sum(exposed.values()) == sums.exposed_ns`.

    Attributes:
        ranks: rank -> exposed nanoseconds.
        group_titles: process group -> what a person calls it.
        parallel: the strategy.
    """

    sums: ExposedSums = field(default_factory=ExposedSums)
    exposed: Counter[ExposedKey] = field(default_factory=Counter)
    ranks: Counter[int] = field(default_factory=Counter)
    parallel: str = ""
    group_titles: Mapping[str, str] = field(default_factory=dict)

    def add(self, rank: int, sums: ExposedSums) -> None:
        """Add the sums of one rank."""
        self.sums.add(sums)
        self.ranks[rank] += sums.exposed_ns
        if sums.unexplained_ns:
            self.exposed[ExposedKey(UNEXPLAINED, "", None, -1, 0, None, None, NOT_KNOWN)] += sums.unexplained_ns

    def ms(self, total_ns: int) -> float:
        """Return the mean over rank-steps, in milliseconds."""
        return total_ns / self.sums.rank_steps / NS_PER_MS

    def by_name(self, dimension: str, *, bucketed: bool) -> Counter[str]:
        """Return nanoseconds by what they are of in a dimension."""
        if dimension == "rank":
            return Counter({f"rank {rank}": total for rank, total in self.ranks.items()})
        totals = Counter[str]()
        if dimension == COMPUTING:
            for region, total in self.sums.computing.items():
                totals[region_name(region)] += total
        else:
            for key, total in self.exposed.items():
                totals[_name(dimension, key, self.group_titles, bucketed=bucketed)] += total
        return totals


def totals_of(dataset: LabelledRun) -> Totals | str:
    """Return the totals of a launch, or why its exposed communication cannot be broken down.

    Raises:
        InputError: a record cannot be read again.
    """
    run = dataset.run
    alone = ONE_RANK if dataset.pace.basis("overlap_ratio").reason == ONE_RANK else None
    if (unknown := alone or why_open(dataset)) is not None:
        return unknown
    totals = Totals(parallel=run.source.parallel or "", group_titles=run.group_titles)
    for exposed, sums in dataset.exposed:
        for rank, of_rank in sums.items():
            if run.traces is not None and (differs := differs_from_rows(of_rank)) is not None:
                return f"rank {rank}: {differs}"  # a record may lack rows of what it counts, a trace does not
            totals.add(rank, of_rank)
        add_exposed(totals, run, exposed, dataset.collectives.wait_ns)
    return totals if totals.sums.rank_steps else NOTHING


def break_down(candidate: Sequence[Totals | str], reference: Sequence[Totals | str] | None = None) -> ExposedBreakdown:
    """Break exposed communication down in every way, in milliseconds per rank-step; launches of a side are pooled.

    Args:
        candidate, reference: of the launches of a side, one at least; a sentence says why one has none. Without a
            reference it is the exposed communication of one side, else the difference.
    """
    named = {"": candidate} if reference is None else {"reference: ": reference, "candidate: ": candidate}
    unknown = [
        next((f"{side}{reason}" for reason in of_side if isinstance(reason, str)), "")
        for side, of_side in named.items()
    ]
    if any(unknown):
        return ExposedBreakdown(reason="; ".join(filter(None, unknown)))
    sides = []
    for of_side in named.values():
        whole = Totals()  # a rank-step counts once, whichever launch it belongs to
        for launch in of_side:
            assert isinstance(launch, Totals)
            whole.sums.add(launch.sums)
            whole.exposed.update(launch.exposed)  # which keeps what is negative
            whole.ranks.update(launch.ranks)
            whole.parallel = launch.parallel
            whole.group_titles = {**whole.group_titles, **launch.group_titles}
        sides.append(whole)
    before, after = (None, sides[0]) if reference is None else sides
    bucketed = {side.parallel for side in sides} in [{strategy} for strategy in BUCKETED]
    dimensions = _OF_RUN if before is None else _OF_CHANGE
    exposed_ms = after.ms(after.sums.exposed_ns)
    breakdown = ExposedBreakdown(
        reason=None,
        rank_steps=sum(side.sums.rank_steps for side in sides),
        rank_steps_left_out=sum(side.sums.left_out for side in sides),
        exposed_ms=exposed_ms,
        dimensions={name: _rows(name, before, after, bucketed=bucketed) for name in dimensions},
    )
    if before is not None:
        breakdown.reference_ms = before.ms(before.sums.exposed_ns)
        breakdown.difference_ms = exposed_ms - breakdown.reference_ms
    return breakdown


def _rows(dimension: str, before: Totals | None, after: Totals, *, bucketed: bool) -> list[ExposedRow]:
    """Return a row for each name, the largest first (of a comparison: the largest difference); those beyond
    `SHOWN_ROWS` are one last row.
    """
    of_after = after.by_name(dimension, bucketed=bucketed)
    of_before = Counter[str]() if before is None else before.by_name(dimension, bucketed=bucketed)
    total = after.ms(after.sums.exposed_ns) - (0.0 if before is None else before.ms(before.sums.exposed_ns))

    def row(what: str, left: float, right: float) -> ExposedRow:
        share = (right - left) / total if total and dimension != COMPUTING else None
        made = ExposedRow(what, right, share)
        if before is not None:
            made.reference_ms, made.difference_ms = left, right - left
        return made

    names = {
        name: (0.0 if before is None else before.ms(of_before[name]), after.ms(of_after[name]))
        for name in dict.fromkeys([*of_before, *of_after])
    }
    ordered = sorted(names, key=lambda name: (-abs(names[name][1] - names[name][0]), name))
    shown, others = ordered[:SHOWN_ROWS], ordered[SHOWN_ROWS:]
    listed = [row(name, *names[name]) for name in shown]
    if others:
        listed.append(row(f"{len(others)} others", *(sum(names[name][side] for name in others) for side in (0, 1))))
    return listed


def add_exposed(totals: Totals, run: Run, exposed: Exposed, wait_ns: Ints) -> None:
    """Add exposed communication, by collective, region, and whether the rank was then waiting for a peer.

    Args:
        exposed: its rows are those of the run.
        wait_ns: of each collective of the run; negative where it is unknown.
    """
    name = run.collectives.name[exposed.row]
    sizes = [len(members) or None for members in run.members]
    by = Groups(name, exposed.order, exposed.region)
    keys = list(zip(*(column[by.first].tolist() for column in (name, exposed.order, exposed.region)), strict=True))
    for part, of_pieces in parts_of(exposed, wait_ns[exposed.row]).items():
        for (code, order, region), total in zip(keys, by.reduce(np.add, of_pieces).tolist(), strict=True):
            if total:
                what, (phase, block) = run.collectives.names[code], exposed.regions[region]
                key = ExposedKey(what.kind, what.group, sizes[code], what.bytes, order, phase, block, part)
                totals.exposed[key] += total


def _name(dimension: str, key: ExposedKey, titles: Mapping[str, str], *, bucketed: bool) -> str:
    """Name what a key is of in a dimension; `bucketed`: an all-reduce is a bucket of DDP's."""
    if key.kind == UNEXPLAINED and dimension in _OF_COLLECTIVES:
        return NO_ROW
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
