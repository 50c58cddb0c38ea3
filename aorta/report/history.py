"""A CSV file that grows by a row a launch set, for tools that look for changes over many commits (docs/history.md).

    check_history(path)                       # before anything is read: is there a file of another kind?
    append_rows(path, rows_of(subjects))

Rows are added under a lock and in one write, so several processes may append at once. Must not: change a row that is
there, add a launch set twice, or leave a part of a row behind.
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias

from aorta.analysis.compare.launch_set import Subject
from aorta.analysis.compare.verdict import GUARD, SEQUENCE
from aorta.command_line import to_stderr
from aorta.errors import InputError
from aorta.installation import commit_around
from aorta.records.files import json_text, lock_file, open_own

Row: TypeAlias = tuple[str, ...]
METRICS: Final = (GUARD, *SEQUENCE)
"""Whose medians over launches a verdict uses by default; the columns must not depend on options."""
COLUMNS: Final = ("time", "commit", "label", "launches", *METRICS, "environment")
"""The last has a fixed form, which shows that a row is complete."""
_DIGEST: Final = re.compile(r"[0-9a-f]{12}")
_ENVIRONMENT: Final = ("world_size", "versions", "environment", "collective_library", "host_facts", "devices")
"""Of the manifest: what changes a measurement and is no change of the program that is measured."""
_LOCKED_S: Final = 30.0
"""How long another process may hold the file, which takes it milliseconds."""


def rows_of(subjects: Mapping[str, Subject]) -> list[Row]:
    """Return a row for each launch set, and for a run that stands alone: when its first launch began (UTC), the commit
    of the current folder, medians over launches of the medians over steps (empty: unknown), a digest of the
    environment.

    Raises:
        InputError: a source does not say when it ran, as traces.
    """
    rows = []
    for label, subject in subjects.items():
        launches = subject.as_set()
        spans = [launch.span_ns for launch in launches.launches if launch.span_ns is not None]
        if not spans:
            raise InputError(f"--append: {label}: when it ran is not known; a history is of runs that AORTA recorded")
        began = datetime.fromtimestamp(min(spans)[0] / 1e9, UTC).isoformat(timespec="milliseconds")
        medians = [known.median if (known := launches.statistics.get(name)) else None for name in METRICS]
        values = ["" if median is None else f"{median:.6g}" for median in medians]
        manifest = subject.dataset.run.manifest or {}
        facts = {name: manifest.get(name) for name in _ENVIRONMENT}
        if isinstance(versions := facts["versions"], dict):
            facts["versions"] = {name: version for name, version in versions.items() if name != "aorta_commit"}
        digest = hashlib.sha256(json_text(facts).encode()).hexdigest()[:12]
        # A spreadsheet takes a cell that begins so for a formula; labels are from other people's records.
        inert = f"'{label}" if label.startswith(("=", "+", "-", "@")) else label
        rows.append((began, commit_around(Path.cwd()) or "", inert, str(len(launches.launches)), *values, digest))
    return rows


def check_history(path: Path) -> None:
    """Refuse a file that is no history, or cannot be written.

    Raises:
        InputError: so.
    """
    with _opened(path) as file:
        _rows_in(path, file)


def append_rows(path: Path, rows: Sequence[Row]) -> list[Row]:
    """Append rows, and the header to an empty file; returns those that are new. A launch set whose row is there already
    (`time` and `label`) is left out. A last line that another writer has not finished is removed, and said.

    Raises:
        InputError: the file has another header, or cannot be written; then it is as it was.
    """
    with _opened(path) as file:
        there, kept = _rows_in(path, file)
        known = {(row[0], row[2]) for row in there}
        new = [row for row in rows if (row[0], row[2]) not in known]
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(new if kept else [COLUMNS, *new])
        data = (b"\n" if kept and not kept.endswith(b"\n") else b"") + text.getvalue().encode()
        if file.seek(0, os.SEEK_END) > len(kept):
            to_stderr(f"{path}: its last line was cut short, and is removed")
            file.truncate(len(kept))
        if new and file.write(data) != len(data):
            file.truncate(len(kept))
            raise InputError(f"--append {path}: the disk is full; nothing is appended")
        os.fsync(file.fileno())
    return new


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a history, made where there is none, for the length of a `with` block, in which nobody else appends."""
    try:
        with open_own(path) as file:
            deadline_s = time.monotonic() + _LOCKED_S
            while not lock_file(file):
                if time.monotonic() > deadline_s:
                    raise InputError(f"--append {path}: another process holds it for {_LOCKED_S:g} s; try again")
                time.sleep(0.01)
            yield file
    except OSError as error:
        raise InputError(f"--append {path}: cannot be written: {error.strerror or error}") from error


def _rows_in(path: Path, file: BinaryIO) -> tuple[list[list[str]], bytes]:
    """Return the rows of a file, and its content without a last line that is not complete."""
    file.seek(0)
    content = file.read()
    header, *lines = content.decode(errors="replace").split("\n")
    wanted = ",".join(COLUMNS)
    if content and header.rstrip("\r") != wanted:
        raise InputError(
            f"--append {path}: its header is {header[:200]!r}, and must be {wanted!r}: give another file; rows of two "
            "kinds do not mix"
        )
    rows = [row for row in csv.reader(lines) if len(row) == len(COLUMNS)]
    if lines and lines[-1] and not (rows and _DIGEST.fullmatch(rows[-1][-1]) and lines[-1].endswith(rows[-1][-1])):
        content = content[: content.rindex(b"\n") + 1]
    return rows, content
