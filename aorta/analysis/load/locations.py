"""Loads whatever is at a location as a run; the one place that distinguishes records, launch sets and traces.

A location is a folder of AORTA's records, a folder of several such folders, or anything in which `trace_files` finds
traces. Must not: trust a file's name, or read a folder of AORTA's records as anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from aorta.analysis.load.detect import AORTA, detect
from aorta.analysis.load.engines import Engine
from aorta.analysis.load.open import is_url, opened
from aorta.analysis.load.records import load_run
from aorta.analysis.tables import Run
from aorta.errors import InputError
from aorta.records.run_files import rank_files

_SIDES: Final = ("reference", "candidate")
"""Folders of launches that an experiment plan creates."""
NOT_A_LAUNCH: Final = "history"
"""Holds earlier runs of the same folder."""


def load_source(
    location: str | Path,
    engine: Engine | None = None,
    comm_patterns: Sequence[str] = (),
    *,
    contents: bool = False,
) -> Run:
    """Read a run folder, or the traces of a file, directory, glob or URL.

    Args:
        contents: of records, keep what ran inside each step as well (`RankTables.contents`).

    Raises:
        InputError: nothing there can be read.
    """
    text = str(location)
    if not is_url(text):
        path = Path(text)
        if path.is_file() and _is_record(path):
            raise InputError(f"{path}: one rank's record; give the folder it is in ({path.parent})")
        if path.is_dir() and holds_records(path):
            return load_run(path, engine, contents=contents)
    from aorta.analysis.load.trace_files import NoTraces
    from aorta.analysis.load.traces import load_traces

    try:
        return load_traces(text, engine, comm_patterns)
    except NoTraces as nothing:
        if is_url(text) or not Path(text).is_dir():
            raise
        try:
            return load_run(Path(text), engine, contents=contents)
        except InputError as error:
            raise InputError(f"{error}. {nothing}") from nothing


def launch_folders(location: str | Path) -> list[Path]:
    """The folders of a launch set; empty if `location` is none.

    A launch set has two or more run folders directly below it, or any number of folders numbered as a plan does (`00`,
    `01`, ...); those are included even if they hold no record.

    Raises:
        InputError: it is the folder of a whole plan, with a launch set for each side, or for one.
    """
    text = str(location)
    path = Path(text)
    if is_url(text) or not path.is_dir() or rank_files(path):
        return []
    try:
        below = sorted((child for child in path.iterdir() if child.is_dir()), key=_in_order)
    except OSError:
        return []  # the error appears when it is read as a run
    runs = {child for child in below if child.name != NOT_A_LAUNCH and holds_records(child)}
    if len(runs) > 1 or any(run.name.isdecimal() for run in runs):
        return [child for child in below if child in runs or child.name.isdecimal()]
    sides = [side for side in _SIDES if (path / side).is_dir() and launch_folders(path / side)]
    if len(sides) == 2:
        raise InputError(
            f"{path}: the folder of a plan, which holds two launch sets; compare them with --reference "
            f"{path / _SIDES[0]} --candidate {path / _SIDES[1]}"
        )
    if sides:
        raise InputError(
            f"{path}: the folder of a plan, which holds one launch set, of the {sides[0]}; give {path / sides[0]}"
        )
    return []


def _in_order(folder: Path) -> tuple[int, str]:
    return int(folder.name) if folder.name.isdecimal() else -1, folder.name


def holds_records(folder: Path) -> bool:
    """Whether AORTA recorded into this folder. Files that are named like records but cannot be read count, because
    reading the folder as a run then says what is wrong. The first AORTA used the same file names.
    """
    files = rank_files(folder)
    return bool(files) and not all(_first(file) == "aorta-2025" for file in files)


def _is_record(path: Path) -> bool:
    return _first(path) == AORTA


def _first(path: Path) -> str | None:
    try:
        with opened(str(path)) as stream:
            return detect(stream.head())
    except InputError:
        return None
