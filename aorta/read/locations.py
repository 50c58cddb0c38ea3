"""Loads whatever is at a location as a run; the one module that distinguishes records, launch sets and traces. Of a
label it finds the folder: the first candidate in the caller's directory, then in the repository, that holds records.

    run = load_source("artifacts/cuda")     # or traces: a file, folder, glob or URL
    folders = locate(["cuda"], cwd, root)   # {"cuda": Path("artifacts/cuda")}

Must not: trust the name of a file, read a folder of AORTA's records as anything else, choose silently (the folder
chosen is reported), or take a path for a label that has records.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
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
from aorta.read.traces.reader import headers_in
from aorta.records.run_files import HISTORY_DIR, RANK_FILE_GLOB, RANK_FILE_NAME, rank_files, why_unrecorded

Location: TypeAlias = str | Path | tuple[Path, ...]
"""A run folder, a launch set, traces (a file, folder, glob or URL), or several folders with ranks of one run."""
OUTPUTS: Final = "artifacts"
"""Where a run writes by default; `label=NAME` makes it `artifacts/NAME`."""
_NOT_THERE: Final = "not there"
_LABEL: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
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
        if path.is_dir() and rank_files(path):  # readable or not: reading them says what is wrong
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
    if isinstance(location, tuple) or is_url(str(location)):
        return []
    path = Path(location)
    if not path.is_dir() or rank_files(path):
        return []
    try:
        below = [child for child in path.iterdir() if child.is_dir()]
    except OSError:
        return []  # the error appears when it is read as a run
    below.sort(key=lambda child: (int(child.name) if child.name.isdecimal() else -1, child.name))
    runs = {child for child in below if child.name != HISTORY_DIR and rank_files(child)}
    if len(runs) > 1 or any(run.name.isdecimal() for run in runs):
        return [child for child in below if child in runs or child.name.isdecimal()]
    sides = [side for side in SIDES if launch_folders(path / side)]
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
        below[:] = sorted(name for name in below if not name.startswith(".") and name != HISTORY_DIR)
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


def is_location(word: str, cwd: Path, root: Path) -> bool:
    """Return whether an argument names files, not a label: it has a separator, a wildcard or a scheme, or something of
    that name is in `cwd` and no run has this label. So `cuda` means the run labelled `cuda`, whatever else is there.
    """
    if any(mark in word for mark in ("/", "\\", "*", "?", "[", "::", "!")):
        return True
    # Path.exists raises an error for a word too long to be a name.
    there = bool(word) and os.path.exists(cwd / word)  # noqa: PTH110
    return there and not (_LABEL.fullmatch(word) and _folder_of(word, cwd, root))


def label_of(location: str) -> str:
    """Return a label for files: the last distinctive part of their name, without forbidden characters."""
    parts = [part for part in re.split(r"[/\\]+", location) if part.strip(".") and not set(part) & set("*?[")]
    stem = re.sub(r"(\.(json|jsonl|gz|tar|tgz|zip|csv|db|sqlite))+$", "", parts[-1] if parts else "trace")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip(".-")[:100] or "trace"


def labels_of(first: str, second: str) -> tuple[str, str]:
    """Return labels for two locations: where `label_of` gives both the same, of the last folder that differs. They are
    the same where no folder differs by its label.
    """
    while (labels := (label_of(first), label_of(second)))[0] == labels[1]:
        first, second = (re.sub(r"[/\\]*[^/\\]*[/\\]*$", "", location) for location in (first, second))
        if not (first and second):
            break
    return labels


def check_label(label: str) -> str:
    """Return the label if it can be part of a file name.

    Raises:
        InputError: it holds anything but letters, digits and `._-`, begins with a dot, is empty or too long.
    """
    if not _LABEL.fullmatch(label):
        raise InputError(
            f"label {label!r}: a label names files of the report; letters, digits and ._- are allowed, at most "
            "100, and it must not begin with a dot"
        )
    return label


def locate(labels: Sequence[str], cwd: Path, root: Path) -> dict[str, Path]:
    """Find the run folder of each label L. Searches `cwd`, then `root`, for `artifacts_L`, `artifacts_L/L` (a labelled
    run with an output folder of its own), `artifacts/L`, and `artifacts` itself if its records are labelled L or were
    made on platform L.

    Raises:
        InputError: a label has no records; lists every path searched and the commands that would create them.
    """
    folders: dict[str, Path] = {}
    missing: dict[str, list[str]] = {}
    for label in map(check_label, labels):
        folder = _folder_of(label, cwd, root)
        if folder is not None:
            folders[label] = folder
        else:
            searched = [f"  {path}  ({why_not})" for path, why_not in _candidates(label, cwd, root)]
            missing[label] = [*searched, f"  {cwd.resolve() / label}  ({_NOT_THERE})"]
    if not missing:
        return folders
    there = [path.relative_to(cwd) for path in runs_below(cwd)]
    made = [path.name.removeprefix(f"{OUTPUTS}_") for path in there]
    lines = [
        f"no records for {' and '.join(map(repr, missing))}. {runs_here(there)}",
        *filter(None, [meant(label, made, f"{label}: ") for label in missing]),
        "Searched:",
        *dict.fromkeys(line for searched in missing.values() for line in searched),
        "Give one of the runs or a folder, or make them with",
        *[f"  aorta train --nproc_per_node 2 label={label}" for label in missing],
    ]
    raise InputError("\n".join(lines))


def _folder_of(label: str, cwd: Path, root: Path) -> Path | None:
    return next((folder for folder, why_not in _candidates(label, cwd, root) if why_not is None), None)


def _candidates(label: str, cwd: Path, root: Path) -> Iterator[tuple[Path, str | None]]:
    """Yield folders in the order of the search, each with the reason why it does not qualify, or None if it does."""
    for parent in dict.fromkeys((cwd.resolve(), root.resolve())):
        own = parent / f"{OUTPUTS}_{label}"
        for folder in (own, own / label, parent / OUTPUTS / label):
            none = "no records" if folder.is_dir() else _NOT_THERE
            yield folder, None if rank_files(folder) or launch_folders(folder) else none
        shared = parent / OUTPUTS
        headers = headers_in([shared])
        names = sorted({name for header in headers for name in (header.label, header.platform)})
        if not headers:
            yield shared, "no records" if shared.is_dir() else _NOT_THERE
        else:
            yield shared, None if label in names else f"its records are labelled or made on {', '.join(names)}"
