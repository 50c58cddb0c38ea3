"""Which steps of a run are looked at closely: the median job step, the slowest and the fastest.

`chosen_steps` names all three for the page, `representative_step` the one that a picture shows. Must not choose a
warm-up step or one that some rank does not have, or call a time a job step that `summary.json` says is not known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pandas as pd

from aorta.analysis.aggregate import LabelledRun, by_step, job_steps
from aorta.analysis.metrics import JOB_STEP

MEDIAN: Final = "median job step"
SLOWEST: Final = "slowest job step"
FASTEST: Final = "fastest job step"
_OF_SOME: Final = {each: each.replace("job step", "step of the ranks read") for each in (MEDIAN, SLOWEST, FASTEST)}
"""What they are called where the slowest rank may be missing."""


@dataclass(frozen=True)
class ChosenStep:
    """`why` is one of `MEDIAN`, `SLOWEST`, `FASTEST`, or says that they are those of the ranks read; then
    `job_step_ms`, the max over all ranks, is None.
    """

    why: str
    global_step: int
    job_step_ms: float | None


def chosen_steps(dataset: LabelledRun) -> list[ChosenStep]:
    """The median (the lower of two middle ones), the slowest and the fastest; the earliest of equals. Empty without a
    step that is on all ranks.
    """
    times, known = _ordered(dataset)
    if times.empty:
        return []
    slowest = times[times == times.iloc[-1]].index[0]
    places = {MEDIAN: times.index[(len(times) - 1) // 2], SLOWEST: slowest, FASTEST: times.index[0]}
    return [
        ChosenStep(why if known else _OF_SOME[why], int(step), float(times.loc[step]) if known else None)
        for why, step in places.items()
    ]


def representative_step(dataset: LabelledRun) -> int | None:
    """The global step whose job step time is the median (the lower of two middle ones; the earliest of equals)."""
    chosen = chosen_steps(dataset)
    return chosen[0].global_step if chosen else None


def _ordered(dataset: LabelledRun) -> tuple[pd.Series[float], bool]:
    """Step times, the max over the ranks that were read, from the shortest; of equal ones the earlier step first. And
    whether they are job steps: not where ranks are missing or not known, which are still drawn.
    """
    ranks = dataset.run.health.ranks_read or tuple(dataset.run.ranks)
    times = job_steps(dataset.table("rank", "global_step", "step_ms"), ranks)
    return times.sort_index().sort_values(kind="stable"), by_step(dataset, JOB_STEP)[2] is None
