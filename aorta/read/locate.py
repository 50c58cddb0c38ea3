"""Finds the run folder or launch set of a label when no folder was given.

Takes labels, the caller's directory and the repository root; for each label it returns the first candidate folder that
holds records, its own or those of several launches. Must not: choose silently (the folder chosen is reported), or take
a path for a label that has records.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from aorta.errors import InputError, meant
from aorta.read.locations import launch_folders, runs_below, runs_here
from aorta.read.traces.reader import headers_in
from aorta.records.run_files import rank_files

OUTPUTS: Final = "artifacts"
"""Where a run writes by default; `label=NAME` makes it `artifacts/NAME`."""
_NOT_THERE: Final = "not there"
_LABEL: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


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
