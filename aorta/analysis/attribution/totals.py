"""Adds up the ranks and launches of one side of a comparison.

Launches are read one at a time. Must not: hold two launches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.attribution.accumulate import accumulate
from aorta.analysis.attribution.keys import LateRank, RankTotals, Totals
from aorta.analysis.attribution.step_rows import RankInput
from aorta.analysis.collective_matching import group_members
from aorta.analysis.load.engines import Engine, Local, progress
from aorta.analysis.tables import Run
from aorta.errors import InputError


def totals_of(launches: Iterable[LabelledRun], engine: Engine | None = None) -> Totals:
    """Add up all launches of one side. A rank-step counts once, whichever launch it belongs to.

    Raises:
        InputError: a record cannot be read again.
    """
    totals = Totals()
    for dataset in launches:
        totals.launches += 1
        for rank, found in _of_ranks(dataset, engine or Local()):
            totals.add(rank, found)
        for entry in dataset.collectives.stragglers:
            if entry["rank"] is not None:
                late = LateRank(entry["group"], tuple(entry["group_ranks"]), entry["rank"])
                totals.stragglers[late] += 1
                totals.late_ms[late].append(entry["late_ms"])
        del dataset  # otherwise the next launch is loaded while this one is still in memory
    return totals


def _of_ranks(dataset: LabelledRun, engine: Engine) -> Iterator[tuple[int, RankTotals]]:
    run, waits, sizes = dataset.run, dataset.collectives.waits, _sizes(dataset.run)
    inputs = [RankInput.of(tables, waits[rank], sizes[rank]) for rank, tables in run.ranks.items()]
    with progress(len(inputs), f"attributing {run.location}") as tick:
        for rank, found in zip(run.ranks, engine.map(accumulate, inputs), strict=True):
            tick()
            if isinstance(found, InputError):
                raise found
            yield rank, found


def _sizes(run: Run) -> dict[int, dict[str, int]]:
    sizes: dict[int, dict[str, int]] = {rank: {} for rank in run.ranks}
    for (rank, group), members in group_members(run).items():
        sizes.setdefault(rank, {})[group] = len(members)
    return sizes
