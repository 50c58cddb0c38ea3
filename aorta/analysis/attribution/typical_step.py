"""Chooses the step whose picture represents the difference between two datasets best.

Returns a global step for each side, and the ranks to draw. Must not: read a record again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Final

import numpy as np

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.tables import Floats, Ints

EXPOSED: Final = "exposed_comm_ms"


@dataclass(frozen=True)
class TypicalStep:
    """The steps and ranks to draw. `ranks` exist on both sides, the one whose exposed communication differs most first.
    `difference_ms` is candidate minus reference, averaged over the ranks of these two steps; `mean_ms` is the same for
    the means over all steps.
    """

    reference_step: int
    candidate_step: int
    ranks: tuple[int, ...]
    difference_ms: float
    mean_ms: float


def typical_step(reference: LabelledRun, candidate: LabelledRun) -> TypicalStep | None:
    """Choose the step whose difference is closest to the mean difference, so that the picture shows what the summary
    says and not the worst outlier.

    Where both sides have steps in common it is the same global step on both; otherwise each side's step nearest to its
    own mean. Only steps after warm-up count whose exposed communication is known on all ranks of the side.

    Returns:
        None where a side has no such step, or no rank exists on both sides.
    """
    left, right = _by_rank(reference), _by_rank(candidate)
    ranks = [rank for rank in left.ranks if rank in right.ranks]
    if left.steps.size == 0 or right.steps.size == 0 or not ranks:
        return None
    before, after = left.values.mean(axis=0), right.values.mean(axis=0)
    mean = float(after.mean() - before.mean())
    _, first, second = np.intersect1d(left.steps, right.steps, assume_unique=True, return_indices=True)
    if len(first):
        chosen = _nearest(after[second] - before[first], mean)
        at, to = int(first[chosen]), int(second[chosen])
    else:
        at, to = _nearest(before, float(before.mean())), _nearest(after, float(after.mean()))
    apart = {
        rank: abs(float(right.values[right.ranks.index(rank), to] - left.values[left.ranks.index(rank), at]))
        for rank in ranks
    }
    order = tuple(sorted(ranks, key=lambda rank: (-apart[rank], rank)))
    return TypicalStep(int(left.steps[at]), int(right.steps[to]), order, float(after[to] - before[at]), mean)


@dataclass(frozen=True)
class _Table:
    """Exposed communication in ms: one row per rank, one column per global step that every rank has."""

    ranks: list[int]
    steps: Ints
    values: Floats


def _by_rank(dataset: LabelledRun) -> _Table:
    known = {rank: _known(dataset, rank) for rank in dataset.run.ranks}
    common = reduce(np.intersect1d, (steps for steps, _ in known.values()))
    values = np.array([mine[np.searchsorted(steps, common)] for steps, mine in known.values()])
    return _Table(list(known), common, values)


def _known(dataset: LabelledRun, rank: int) -> tuple[Ints, Floats]:
    """The global steps of a rank after warm-up whose exposed communication is known, in order, and their values."""
    steps = dataset.run.ranks[rank].steps
    values = steps.column(EXPOSED)
    used = steps.used & ~np.isnan(values)
    return steps.global_step[used], values[used]


def _nearest(values: Floats, wanted: float) -> int:
    return int(np.argmin(np.abs(values - wanted)))
