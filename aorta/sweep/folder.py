"""The folder of a sweep: `sweep.jsonl`, `00/`, `01/`, ...; an earlier sweep there is kept under `history/`.

Enters: the folder asked for. Leaves: room for a sweep in it. Must not: delete anything, or mix two sweeps.
"""

from __future__ import annotations

import fcntl
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from aorta.errors import ConfigError
from aorta.telemetry.schema import HISTORY_DIR, MANIFEST_FILE, RANK_FILE_GLOB

JOURNAL: Final = "sweep.jsonl"


def job_name(number: int) -> str:
    """The folder of a job: `00`, `01`, ..., `99`, `100`."""
    return f"{number:02d}"


def is_job_name(name: str) -> bool:
    """Whether a folder of that name is a job's."""
    return name.isascii() and name.isdigit()


def hold(folder: Path) -> int:
    """Hold a sweep's journal, made where there is none, against other sweeps, until the descriptor that is returned is
    closed or the process ends. On a disk without locks nothing is held.

    Raises:
        ConfigError: another process holds it. OSError: it cannot be opened.
    """
    held = os.open(folder / JOURNAL, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise ConfigError(f"{folder}: another process runs a sweep there; give this one another label=NAME") from None
    except OSError:  # a disk without locks
        pass
    return held


def make_room(folder: Path) -> None:
    """Move what an earlier sweep left there to `history/<when its journal was last written>/`.

    Raises:
        ConfigError: the folder holds a run or a sweep that runs, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / MANIFEST_FILE).exists() or any(folder.glob(RANK_FILE_GLOB)):
            raise ConfigError(f"{folder} holds a run, not a sweep; give the sweep another label=NAME")
        if not (folder / JOURNAL).exists():
            return
        os.close(hold(folder))
        name = f"{datetime.fromtimestamp((folder / JOURNAL).stat().st_mtime, UTC):%Y%m%dT%H%M%SZ}"
        target, copies = folder / HISTORY_DIR / name, 1
        while target.exists():
            copies += 1
            target = target.with_name(f"{name}-{copies}")
        target.mkdir(parents=True)
        for path in [path for path in folder.iterdir() if path.is_dir() and is_job_name(path.name)]:
            path.rename(target / path.name)
        (folder / JOURNAL).rename(target / JOURNAL)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror or error}; choose another folder") from error
