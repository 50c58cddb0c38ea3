"""What a run means: the analysis half. It reads records; it never needs the machine that made them.

    import aorta.analysis
    steps = aorta.analysis.steps("artifacts/cuda")              # pandas, one row a rank-step
    collectives = aorta.analysis.collectives("artifacts/cuda")  # pandas, one row a collective on a rank
    samples = aorta.analysis.device_samples("artifacts/cuda")   # pandas, one row a sample of a device
    run = aorta.analysis.load_run("artifacts/cuda")             # headers, records, manifest, health

Enters: run folders. Leaves: tables, summaries, pictures. Must not: load torch, ever, nor pandas or matplotlib before
a function that needs them is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from aorta.analysis.readers.run_folder import Run

__all__ = ["collectives", "device_samples", "load_run", "steps"]


def load_run(path: str | Path) -> Run:
    """Read one run folder.

    Raises:
        InputError: nothing there can be read, or two runs are mixed.
    """
    from aorta.analysis.readers.run_folder import load_run as load

    return load(path)


def steps(path: str | Path) -> pd.DataFrame:
    """One row per rank and step, warm-up included and flagged; columns as in `frames.steps_frame`, then those of
    `devices.step_columns`.

    Raises:
        InputError: as `load_run`.
    """
    from aorta.analysis.devices import samples_frame, step_columns
    from aorta.analysis.frames import steps_frame

    run = load_run(path)
    frame = steps_frame(run)
    return frame.join(step_columns(run, frame, samples_frame(run)))


def device_samples(path: str | Path) -> pd.DataFrame:
    """One row per sample of a rank's device; columns as in `devices.samples_frame`.

    Raises:
        InputError: as `load_run`.
    """
    from aorta.analysis.devices import samples_frame

    return samples_frame(load_run(path))


def collectives(path: str | Path) -> pd.DataFrame:
    """One row per collective and rank, warm-up included and flagged; columns as in `frames.collective_rows` and
    `matching.matched`.

    Raises:
        InputError: as `load_run`.
    """
    from aorta.analysis.frames import collective_rows
    from aorta.analysis.matching import matched

    run = load_run(path)
    return matched(collective_rows(run), run)
