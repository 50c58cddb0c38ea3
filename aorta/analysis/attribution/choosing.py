"""Two datasets -> the step that shows their difference best.

Enters: datasets. Leaves: a global step for each side, and ranks. Must not: read a record again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from aorta.analysis.aggregate import Dataset
from aorta.analysis.readers.scan import Floats

EXPOSED = "exposed_comm_ms"


@dataclass(frozen=True)
class Shown:
    """`ranks` are on both sides, the one whose exposed communication differs most first. `difference_ms`: of the mean
    over the ranks of these two steps, candidate minus reference; `mean_ms`: of the means over all steps.
    """

    reference_step: int
    candidate_step: int
    ranks: tuple[int, ...]
    difference_ms: float
    mean_ms: float


def worst_step(reference: Dataset, candidate: Dataset) -> Shown | None:
    """The step whose difference is nearest to the mean difference, so that the picture shows what the numbers say, not
    the largest hiccup: the same global step on both sides where they have steps in common, else the step of each side
    nearest to its own mean. Only steps after warm-up count, which all ranks of the side have with known exposed
    communication. None where a side has no such step, or no rank is on both sides.
    """
    left, right = _by_rank(reference), _by_rank(candidate)
    ranks = [rank for rank in left.columns if rank in right.columns]
    if left.empty or right.empty or not ranks:
        return None
    before, after = left.mean(axis=1), right.mean(axis=1)
    mean = float(after.mean() - before.mean())
    common = before.index.intersection(after.index)
    if len(common):
        chosen = int(common[_nearest((after[common] - before[common]).to_numpy(), mean)])
        steps = chosen, chosen
    else:
        first, second = (int(side.index[_nearest(side.to_numpy(), float(side.mean()))]) for side in (before, after))
        steps = first, second
    apart = {rank: abs(float(right.loc[steps[1], rank] - left.loc[steps[0], rank])) for rank in ranks}
    order = tuple(sorted(ranks, key=lambda rank: (-apart[rank], rank)))
    return Shown(*steps, order, float(after[steps[1]] - before[steps[0]]), mean)


def _by_rank(dataset: Dataset) -> pd.DataFrame:
    """A row a global step, a column a rank: exposed communication in ms; only steps that every rank has."""
    table = dataset.table("rank", "global_step", EXPOSED)
    wide: Any = table.pivot_table(index="global_step", columns="rank", values=EXPOSED, aggfunc="first", dropna=False)
    return wide.dropna()


def _nearest(values: Floats, wanted: float) -> int:
    return int(np.argmin(np.abs(values - wanted)))
