"""Loads whatever is at a location as a run; the one module that distinguishes records, launch sets and traces.

    run = load_source("artifacts/cuda")     # or traces: a file, folder, glob or URL

Must not: trust the name of a file, or read a folder of AORTA's records as anything else.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final, TypeAlias

from aorta.documents.comparison import SIDES
from aorta.errors import InputError, meant
from aorta.read.engines import Engine
from aorta.read.record import load_run, nothing_found
from aorta.read.run import Run
from aorta.read.traces.files import KNOWN, NoTraces, is_record
from aorta.read.traces.open import is_url, opened
from aorta.records.run_files import RANK_FILE_GLOB, RANK_FILE_NAME, rank_files, why_unrecorded

Location: TypeAlias = str | Path | tuple[Path, ...]
"""A run folder, a launch set, traces (a file, folder, glob or URL), or several folders with ranks of one run."""
NOT_A_LAUNCH: Final = "history"
"""Holds earlier runs of the same folder."""
_LISTED: Final = 8
_DEEPEST, _MOST_SEARCHED = 4, 2_000
"""Where runs are looked for that an error names: `artifacts/PLAN/SIDE/00` is four folders down."""


def load_source(
    location: Location,
    engine: Engine | None = None,
    comm_patterns: Sequence[str] = (),
    *,
    spans: bool = False,
    exposed: bool = False,
) -> Run:
    """Read a run folder, or the traces of a file, directory, glob or URL. `spans`, `exposed`: of records, keep what ran
    inside each step, give its exposed communication in pieces (`RankTables`). An `InputError` says why nothing can be
    read.
    """
    if isinstance(location, tuple):
        return load_run(location, engine, spans=spans, exposed=exposed)
    text, path = str(location), Path(location)
    if not is_url(text):
        head = b""
        if path.is_file():
            with suppress(InputError), opened(text) as stream:
                head = stream.head()
        if is_record(head):
            raise InputError(f"{path}: one rank's record; give the folder it is in ({path.parent})")
        if path.is_dir() and holds_records(path):
            return load_run(path, engine, spans=spans, exposed=exposed)
        if not path.exists() and not any(mark in text for mark in "*?["):
            there = runs_below(path.parent if path.parent.is_dir() else Path())
            hint = meant(text, map(str, there), "; ")
            raise InputError(f"{text}: No such file or directory{hint or '.'} {runs_here(there)}. Expected {KNOWN}")
    from aorta.read.traces.load import load_traces

    try:
        return load_traces(text, engine, comm_patterns)
    except NoTraces as nothing:
        if is_url(text) or not path.is_dir():
            raise
        if next(path.rglob(RANK_FILE_GLOB), None) is None and why_unrecorded(path) is None:
            raise  # nothing of a run is below it either
        raise InputError(nothing_found(path)) from nothing


def launch_folders(location: Location) -> list[Path]:
    """Return the folders of a launch set; empty if `location` is none.

    A launch set has two or more run folders directly below it, or any number of folders numbered as a plan does (`00`,
    `01`, ...); those are included even if they hold no record.

    Raises:
        InputError: it is the folder of a whole plan, with a launch set for each side, or for one.
    """
    if (
        isinstance(location, tuple)
        or is_url(str(location))
        or not Path(location).is_dir()
        or rank_files(Path(location))
    ):
        return []
    path = Path(location)
    try:
        below = [child for child in path.iterdir() if child.is_dir()]
    except OSError:
        return []  # the error appears when it is read as a run
    below.sort(key=lambda child: (int(child.name) if child.name.isdecimal() else -1, child.name))
    runs = {child for child in below if child.name != NOT_A_LAUNCH and holds_records(child)}
    if len(runs) > 1 or any(run.name.isdecimal() for run in runs):
        return [child for child in below if child in runs or child.name.isdecimal()]
    sides = [side for side in SIDES if (path / side).is_dir() and launch_folders(path / side)]
    if len(sides) == 2:
        raise InputError(
            f"{path}: the folder of a plan, which holds two launch sets; compare them with --reference "
            f"{path / SIDES[0]} --candidate {path / SIDES[1]}"
        )
    if sides:
        raise InputError(
            f"{path}: the folder of a plan, which holds one launch set, of the {sides[0]}; give {path / sides[0]}"
        )
    return []


def runs_below(folder: Path) -> list[Path]:
    """Return folders of runs below `folder`; of launches the folder of their set, or of the plan."""
    folders: dict[Path, None] = {}
    for parent, below, files in islice(os.walk(folder, followlinks=True), _MOST_SEARCHED):
        path, depth = Path(parent), len(Path(parent).relative_to(folder).parts)
        below[:] = sorted(name for name in below if not name.startswith(".") and name != NOT_A_LAUNCH)
        if depth >= _DEEPEST:
            below.clear()
        if depth and any(map(RANK_FILE_NAME.match, files)):
            while path.parent != folder and (path.name.isdecimal() or path.name.partition("-")[0] in SIDES):
                path = path.parent
            folders[path] = None
    return list(folders)


def runs_here(folders: Sequence[Path]) -> str:
    """Return the first runs that `runs_below` found, for an error."""
    named = [str(path) for path in folders[:_LISTED]]
    more = [f"{len(folders) - _LISTED} more"] if len(folders) > _LISTED else []
    return f"Runs here: {', '.join([*named, *more]) or 'none'}"


def holds_records(folder: Path) -> bool:
    """Return whether AORTA recorded into this folder. Files that are named like records but cannot be read count,
    because reading the folder as a run then says what is wrong.
    """
    return bool(rank_files(folder))
