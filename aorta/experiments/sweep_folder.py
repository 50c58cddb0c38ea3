"""The folder of a sweep: made free for a new one, or taken up as a killed one left it (`hydra.launcher.resume=true`).

Must not delete anything, mix two sweeps, or leave a job of a killed sweep running beside a new one.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from aorta.errors import ConfigError, InputError
from aorta.experiments.process_mark import end_marked
from aorta.experiments.resume import differences, unused
from aorta.experiments.sweep_journal import (
    SWEEP_FILE,
    JobHistory,
    SweepJournal,
    SweepRequest,
    is_job_name,
    read_sweep,
)
from aorta.records.run_files import HISTORY_DIR, MANIFEST_FILE, RANK_FILE_GLOB

_SAME: Final = ("words", "options", "nproc", "command", "metric")


def make_room(folder: Path) -> None:
    """Move what an earlier sweep left there to `history/<when its journal was last written>/`.

    Raises:
        ConfigError: the folder holds a run or a sweep that runs, or cannot be written.
    """
    journal = folder / SWEEP_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / MANIFEST_FILE).exists() or any(folder.glob(RANK_FILE_GLOB)):
            raise ConfigError(f"{folder} holds a run, not a sweep; give the sweep another label=NAME")
        if not journal.exists():
            return
        SweepJournal(folder).close()  # refused while another sweep holds it
        name = f"{datetime.fromtimestamp(journal.stat().st_mtime, UTC):%Y%m%dT%H%M%SZ}"
        target = unused(folder / HISTORY_DIR / name)
        target.mkdir(parents=True)
        for path in [path for path in folder.iterdir() if path.is_dir() and is_job_name(path.name)]:
            path.rename(target / path.name)
        journal.rename(target / SWEEP_FILE)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror or error}; choose another folder") from error


def launch_id(folder: Path, job: str) -> str:
    """What marks the processes of a job: no two launches of one machine write to one folder at a time."""
    return str(folder / job)


def take_up(folder: Path, asked: SweepRequest) -> dict[str, JobHistory]:
    """Read the jobs of a sweep that is continued, and end what still runs of it. The caller holds its journal.

    Returns:
        Name -> job.

    Raises:
        ConfigError: no sweep there, or one that was asked for something else: each difference with both values.
    """
    try:
        there = read_sweep(folder)
    except InputError as error:
        raise ConfigError(f"hydra.launcher.resume: {error}") from error
    if different := differences(*({key: getattr(each, key) for key in _SAME} for each in (there.asked, asked))):
        raise ConfigError(
            f"hydra.launcher.resume: {folder} holds another sweep:\n{different}\n"
            "give what was given there, or another label=NAME"
        )
    for job in there.jobs:
        if job.ended is None:
            end_marked(launch_id(folder, job.name))
    return {job.name: job for job in there.jobs}
