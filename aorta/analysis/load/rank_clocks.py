"""Reads what a run measured of its ranks' clocks against each other (`clock_sync.json`, R9).

Must not fail a report because the file is missing or damaged, nor use that of another run or attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from aorta.errors import InputError
from aorta.records.clock_offsets import CLOCK_SYNC_FILE, RankClock, read_clock_sync


def clocks_of(folder: Path, run_id: str | None, attempt: int | None) -> tuple[Mapping[int, RankClock], str | None]:
    """The clocks by rank and None, or none and why."""
    path = folder / CLOCK_SYNC_FILE
    if not path.is_file():
        return {}, f"there is no {CLOCK_SYNC_FILE}"
    try:
        sync = read_clock_sync(path)
    except InputError as error:
        return {}, str(error)
    if (sync.run_id, sync.attempt) != (run_id, attempt):
        return {}, f"{CLOCK_SYNC_FILE} is of run {sync.run_id!r}, attempt {sync.attempt}"
    return {clock.rank: clock for clock in sync.ranks}, None
