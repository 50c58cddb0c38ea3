"""A sweep that is taken up again: `hydra.launcher.resume=true` in the folder of one that did not come to its end.

Enters: the folder, what is asked for now. Leaves: the jobs as they stand, or a refusal that names each difference. Must
not: mix two sweeps, or start a job beside one that a killed sweep left running.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from aorta.errors import ConfigError, InputError
from aorta.processes.marks import end_marked
from aorta.sweep.journal import Asked, Job, read_sweep

_SAME: Final = ("words", "options", "nproc", "command", "metric")


def mark_of(folder: Path, job: str) -> str:
    """The mark of a job's processes: no two launches of one machine write to one folder at a time."""
    return str(folder / job)


def taken_up(folder: Path, asked: Asked) -> dict[str, Job]:
    """Name -> job of the sweep in `folder`, which its caller holds. What still runs of a killed one is ended.

    Raises:
        ConfigError: no sweep there, or one that was asked for something else: each difference with both values.
    """
    try:
        there = read_sweep(folder)
    except InputError as error:
        raise ConfigError(f"hydra.launcher.resume: {error}") from error
    differences = [
        f"  {key}: {before!r} there, {now!r} now"
        for key in _SAME
        if (before := getattr(there.asked, key)) != (now := getattr(asked, key))
    ]
    if differences:
        raise ConfigError(
            f"hydra.launcher.resume: {folder} holds another sweep:\n"
            + "\n".join(differences)
            + "\ngive what was given there, or another label=NAME"
        )
    for job in there.jobs:
        if job.ended is None:
            end_marked(mark_of(folder, job.name))
    return {job.name: job for job in there.jobs}
