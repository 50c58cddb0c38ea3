"""Analyses recorded runs; it reads records and never needs the machine that made them.

    import aorta.analysis
    steps = aorta.analysis.steps("artifacts/cuda")              # pandas, one row per rank-step
    collectives = aorta.analysis.collectives("artifacts/cuda", kinds=["allreduce"])  # one row per collective and rank
    samples = aorta.analysis.device_samples("artifacts/cuda")   # pandas, one row per sample of a device
    ranges = aorta.analysis.user_ranges("artifacts/mine")       # what `recording.range` named
    run = aorta.analysis.load_run("artifacts/cuda")             # headers, columns, manifest, health

Must not: load torch, ever, nor pandas or matplotlib before a function that needs them is called.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aorta.errors import InputError, meant

if TYPE_CHECKING:
    import pandas as pd

    from aorta.read.run import Run

__all__ = ["collectives", "device_samples", "iter_collectives", "load_run", "steps", "user_ranges"]


def load_run(path: str | Path, *, jobs: int | None = None, scheduler: str | None = None) -> Run:
    """Read one run, one process per file.

    Args:
        path: its folder, or traces of another tool (`read.locations`).
        jobs: number of processes; by default one per core.
        scheduler: address of a Dask cluster whose workers read instead.

    Raises:
        InputError: nothing there can be read, or two runs are mixed; or the cluster does not answer.
        ToolMissing: `scheduler` is given and `distributed` is not installed.
    """
    from aorta.read.engines import Dask, Local
    from aorta.read.locations import load_source

    return load_source(path, Local(jobs) if scheduler is None else Dask(scheduler))


def steps(run: str | Path | Run, columns: Sequence[str] | None = None) -> pd.DataFrame:
    """Return one row per rank and step; warm-up steps are included and flagged.

    Args:
        run: what `load_run` takes, or its result; so for all functions here, which raise the errors of `load_run`.
        columns: only these columns, at 8 bytes per column and row; NaN where this run does not have them. By default
            those of `dataframes.steps_frame`, then those of `devices.step_columns`.

    Raises:
        InputError: steps have no such column.
    """
    from aorta.analysis import dataframes
    from aorta.analysis.dataframes import steps_frame
    from aorta.analysis.devices import STEP_COLUMNS, samples_of, step_columns
    from aorta.documents.metrics import METRICS_OF_STEPS

    loaded = _loaded(run)
    known = [*dataframes.STEP_COLUMNS, dataframes.STEP_MS, *dataframes.RATIO_BOUNDS, *STEP_COLUMNS]
    known += [*METRICS_OF_STEPS, *loaded.steps.metrics]
    for name in columns or ():
        if name not in known:
            hint = meant(name, known, "; ")
            if name in dataframes.collectives_frame(loaded, steps=(0, 0)):
                hint = "; it is a column of aorta.analysis.collectives(...)"
            raise InputError(f"columns: {name!r}: steps have no such column{hint}")
    if columns is not None and not set(columns) & set(STEP_COLUMNS):
        return steps_frame(loaded, columns)
    own = None if columns is None else [name for name in columns if name not in STEP_COLUMNS]
    frame = steps_frame(loaded, own).assign(**step_columns(loaded, samples_of(loaded)))
    return frame if columns is None else frame[list(columns)]


def device_samples(run: str | Path | Run) -> pd.DataFrame:
    """Return one row per sample of a rank's device; columns as in `devices.samples_frame`."""
    from aorta.analysis.devices import samples_frame

    return samples_frame(_loaded(run))


def user_ranges(run: str | Path | Run) -> pd.DataFrame:
    """Return one row per range that the loop named (`recording.range`); columns as in `dataframes.ranges_frame`."""
    from aorta.analysis.dataframes import ranges_frame

    return ranges_frame(_loaded(run))


def collectives(
    run: str | Path | Run,
    *,
    ranks: Collection[int] | None = None,
    steps: tuple[int, int] | None = None,
    kinds: Collection[str] | None = None,
) -> pd.DataFrame:
    """Return one row per collective and rank; warm-up is included and flagged. Columns as in
    `dataframes.iter_collectives`.

    Args:
        ranks, steps, kinds: keep only these rows (`steps`: a half-open range of global steps). Collectives are matched
            over all ranks before.

    Raises:
        InputError: more than `dataframes.ROW_LIMIT` rows are left, or a filter names a kind that there is not, or ranks
            or steps that the run does not have.
    """
    from aorta.analysis.dataframes import collectives_frame
    from aorta.timeline.classes import KINDS

    loaded = _loaded(run)
    known = [*KINDS, *(name.kind for name in loaded.collectives.names)]
    for kind in kinds or ():
        if kind not in known:
            hint = meant(kind, known, "; ")
            raise InputError(f"kinds: {kind!r}: no kind of collectives{hint}; there are {', '.join(KINDS)}")
    for rank in ranks or ():
        if rank not in loaded.ranks:
            raise InputError(f"ranks: {rank}: not in the run; its ranks: {min(loaded.ranks)} to {max(loaded.ranks)}")
    _check_steps(loaded, steps)
    return collectives_frame(loaded, ranks, steps, kinds)


def iter_collectives(run: str | Path | Run, *, steps: tuple[int, int] | None = None) -> Iterator[pd.DataFrame]:
    """Yield the same rows in frames of some 100,000, ordered by global step. A frame never splits a step."""
    from aorta.analysis.dataframes import iter_collectives as frames

    loaded = _loaded(run)
    _check_steps(loaded, steps)
    yield from frames(loaded, steps)


def _check_steps(run: Run, steps: tuple[int, int] | None) -> None:
    numbers = run.steps.global_step
    if steps is not None and len(numbers) and not ((numbers >= steps[0]) & (numbers < steps[1])).any():
        raise InputError(f"steps: {steps}: holds none of the run's steps, {numbers.min()} to {numbers.max()}")


def _loaded(run: str | Path | Run) -> Run:
    return load_run(run) if isinstance(run, str | Path) else run
