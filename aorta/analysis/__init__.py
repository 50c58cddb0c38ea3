"""What a run means: the analysis half. It reads records; it never needs the machine that made them.

    import aorta.analysis
    steps = aorta.analysis.steps("artifacts/cuda")              # pandas, one row a rank-step
    collectives = aorta.analysis.collectives("artifacts/cuda")  # pandas, one row a collective on a rank
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

__all__ = ["collectives", "load_run", "steps"]


def load_run(path: str | Path) -> Run:
    """Read one run folder.

    Raises:
        InputError: nothing there can be read, or two runs are mixed.
    """
    from aorta.analysis.readers.run_folder import load_run as load

    return load(path)


def steps(path: str | Path) -> pd.DataFrame:
    """One row per rank and step, warm-up included and flagged; columns as in `frames.steps_frame`.

    Raises:
        InputError: as `load_run`.
    """
    from aorta.analysis.frames import steps_frame

    return steps_frame(load_run(path))


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
