"""Computes the data of figures, once for pictures and page: which steps are shown closely, where a step's time goes,
curves over ranks, and rank by step maps, in as many points as a screen has. Arrays hold NaN for a gap.

Must not: use a warm-up step, drop a step (where more than fit, neighbours share a point, and their lowest and highest
stay in its band), choose a step that some rank does not have, or call a time a job step that `summary.json` says is not
known.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import pandas as pd

from aorta.analysis.aggregate import LabelledRun, by_step, job_steps
from aorta.analysis.devices import JOINED_ON, STEP_COLUMNS, THROTTLED, step_columns
from aorta.analysis.metrics import JOB_STEP
from aorta.analysis.report.palette import light

POINTS: Final = 1_000
"""Of a curve; more than a screen is wide."""
MARKED_STEPS: Final = 60
"""With more, markers run into a thick line."""
MAP_STEPS: Final = 250
MAP_RANKS: Final = 64
_STEP_MS: Final = "step_ms"
_STILL: Final = 0.002
"""Less than the samplers resolve: 1 MHz of 1,700."""
_STILL_SHARE: Final = 0.02
"""A line 2 pixels high."""


@dataclass(frozen=True)
class Curve:
    """`x` is the middle global step of each point; `low` and `high` are over the ranks and steps of the point."""

    x: np.ndarray
    low: np.ndarray
    middle: np.ndarray
    high: np.ndarray

    def constant(self, whole: float | None = None) -> float | None:
        """Return the median of values that do not change, so that a chart of them would show nothing; None where they
        do, or none is known. Not to change means: from the lowest to the highest it is at most `_STILL` of the median,
        or of the `whole` that a share is drawn on at most `_STILL_SHARE`.
        """
        values = np.concatenate([self.low, self.high])
        known = values[~np.isnan(values)]
        if not len(known):
            return None
        middle = float(np.median(known))
        room = _STILL * abs(middle) if whole is None else _STILL_SHARE * whole
        return middle if float(known.max() - known.min()) <= room else None

    @property
    def known(self) -> bool:
        """Whether any point has a value."""
        return bool(len(self.middle)) and not np.isnan(self.middle).all()


@dataclass(frozen=True)
class Map:
    """`values` [rows, columns]: the mean over the ranks of a row and the steps of a column; NaN where none of them was
    read. The first row begins with `first_rank`, the first column with `first_step`; `end_rank` and `end_step` are
    behind the last. `steps_a_column` counts steps as far apart as the run has them.
    """

    values: np.ndarray
    first_step: int
    end_step: int
    first_rank: int
    end_rank: int
    steps_a_column: int
    ranks_a_row: int


def over_steps(global_steps: np.ndarray, values: pd.Series[float]) -> Curve:
    """Return the median of `values` over the ranks and steps of each point, between the lowest and the highest. Of up
    to `POINTS` steps each is a point; of more, neighbours share one.
    """
    steps = np.unique(global_steps)
    together = steps_a_point(steps)
    points = values.groupby(np.searchsorted(steps, global_steps) // together)
    x = pd.Series(steps).groupby(np.arange(len(steps)) // together).mean().to_numpy()
    return Curve(x, points.min().to_numpy(), points.median().to_numpy(), points.max().to_numpy())


def steps_a_point(steps: np.ndarray) -> int:
    """Return how many of these global steps share a point of a curve."""
    return max(1, -(-len(steps) // POINTS))


class Series:
    """Curves and maps of one dataset."""

    def __init__(self, dataset: LabelledRun) -> None:
        self._dataset = dataset

    @cached_property
    def _frame(self) -> pd.DataFrame:
        return self._dataset.table("rank", "global_step", _STEP_MS)

    @cached_property
    def steps_a_point(self) -> int:
        """How many global steps share a point of a curve."""
        return steps_a_point(self._dataset.global_steps)

    def curve(self, name: str) -> Curve:
        """Return a metric: the median over the ranks and steps of each point, between the lowest and the highest."""
        return self._curve(pd.Series(self._dataset.values(name), index=self._frame.index))

    def job_step(self) -> Curve:
        """Return the job step time in ms (max over ranks); its band reaches from the fastest rank of the point to the
        slowest. A gap throughout where `why_no_job_step` says why.
        """
        values, at, _ = by_step(self._dataset, JOB_STEP)
        times = pd.Series(values, index=at).reindex(self._dataset.global_steps)
        band = self._curve(self._frame[_STEP_MS])
        middle = times.groupby(np.arange(len(times)) // self.steps_a_point).median().to_numpy()
        return Curve(band.x, band.low, middle, band.high)

    @property
    def why_no_job_step(self) -> str | None:
        """Why `summary.json` has none either; None where it has."""
        return by_step(self._dataset, JOB_STEP)[2]

    @cached_property
    def _sampled(self) -> pd.DataFrame | None:
        if not self._dataset.has_samples:
            return None
        steps = self._dataset.table(*JOINED_ON, "global_step")
        return step_columns(self._dataset.run, steps, self._dataset.device_samples)

    def devices(self) -> dict[str, Curve]:
        """Return what was sampled of the devices, over the steps; empty without a sample that belongs to one."""
        if self._sampled is None:
            return {}
        curves = {name: self._curve(self._sampled[name]) for name in STEP_COLUMNS}
        return {name: curve for name, curve in curves.items() if curve.known}

    @property
    def throttled(self) -> np.ndarray:
        """The global steps in which a device was throttled."""
        if self._sampled is None:
            return np.empty(0)
        return np.unique(self._frame["global_step"][self._sampled[THROTTLED] == 1.0])

    def map(self, name: str) -> Map | None:
        """Return a metric, rank by step; None where it is null throughout."""
        values = (self._frame[_STEP_MS] if name == _STEP_MS else pd.Series(self._dataset.values(name))).to_numpy()
        if not len(values) or np.isnan(values).all():
            return None
        step, rank = (self._frame[key].to_numpy(np.int64) for key in ("global_step", "rank"))
        steps = self._dataset.global_steps
        first_step, stride = int(steps[0]), max(1, int(np.gcd.reduce(np.diff(steps))))
        columns = (int(steps[-1]) - first_step) // stride + 1
        # Rows of traces that do not tell their rank have negative numbers; a world has its ranks from 0 on.
        numbers = [*self._dataset.run.ranks, *np.unique(rank).tolist()]
        if min(numbers) >= 0:
            numbers += [0, self._dataset.run.health.world_size - 1]
        first_rank, rows = min(numbers), max(numbers) - min(numbers) + 1
        each_step, each_rank = max(1, -(-columns // MAP_STEPS)), max(1, -(-rows // MAP_RANKS))
        shape = (-(-rows // each_rank), -(-columns // each_step))
        known = ~np.isnan(values)
        row, column = (rank - first_rank) // each_rank, (step - first_step) // (stride * each_step)
        place = (row * shape[1] + column)[known]
        sums = np.bincount(place, values[known], shape[0] * shape[1])
        counts = np.bincount(place, minlength=shape[0] * shape[1])
        mean = np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0).reshape(shape)
        # All columns are as wide, and all rows as high, as a full one; the last may hold fewer.
        end_step, end_rank = first_step + shape[1] * each_step * stride, first_rank + shape[0] * each_rank
        return Map(mean.astype(np.float32), first_step, end_step, first_rank, end_rank, each_step, each_rank)

    def _curve(self, values: pd.Series[float]) -> Curve:
        return over_steps(self._frame["global_step"].to_numpy(), values)


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
    """Return the median (the lower of two middle ones), the slowest and the fastest; the earliest of equals. Empty
    without a step that is on all ranks.
    """
    ranks = dataset.run.health.ranks_read or tuple(dataset.run.ranks)
    times = job_steps(dataset.table("rank", "global_step", _STEP_MS), ranks).sort_index().sort_values(kind="stable")
    known = by_step(dataset, JOB_STEP)[2] is None  # not where ranks are missing; those read are still drawn
    if times.empty:
        return []
    slowest = times[times == times.iloc[-1]].index[0]
    places = {MEDIAN: times.index[(len(times) - 1) // 2], SLOWEST: slowest, FASTEST: times.index[0]}
    return [
        ChosenStep(why if known else _OF_SOME[why], int(step), float(times.loc[step]) if known else None)
        for why, step in places.items()
    ]


PARTS = (
    ("communication hidden in computation", light("hidden"), ""),
    ("computation alone", light("compute"), ""),
    ("exposed communication", light("exposed"), "//"),
    ("copies, optimizer, other", light("other-work"), ""),
    ("idle", light("idle"), ""),
)
NEEDED = ["window_ms", "compute_ms", "compute_comm_ms", "exposed_comm_ms", "idle_ms"]


def parts(dataset: LabelledRun) -> pd.DataFrame:
    """Return the mean ms per step of each part (columns) for each rank (rows), over the steps used where all are known.
    Empty where there is none, and where marks do not bear them all; one rank is held at a time.
    """
    titles = [title for title, _, _ in PARTS]
    if any(dataset.pace.basis(name).source != "marks" for name in NEEDED):
        return pd.DataFrame(columns=titles)
    rows: dict[int, list[float]] = {}
    for rank, tables in dataset.run.ranks.items():
        steps = np.column_stack([tables.steps.column(name) for name in NEEDED])
        known = tables.steps.used & ~np.isnan(steps).any(axis=1)
        if known.any():
            window, compute, hidden, exposed, idle = steps[known].mean(axis=0).tolist()
            other = max(window - compute - exposed - idle, 0.0)  # below 0 only by rounding
            rows[rank] = [hidden, compute - hidden, exposed, other, idle]
    return pd.DataFrame.from_dict(rows, orient="index", columns=titles)
