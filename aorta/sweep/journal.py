"""`sweep.jsonl`: what a sweep was asked for and what became of each job, line by line: a killed sweep has one too.

Enters: facts of the sweep, then of each job as it begins and ends. Leaves: a file, and read again a `Sweep`. Must not:
say of a job what its own record says better; metrics are read from there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

from aorta.errors import InputError, RecordWriteError
from aorta.sweep.folder import JOURNAL, is_job_name

JOURNAL_VERSION: Final = 1

Status: TypeAlias = Literal["done", "failed", "stopped", "refused", "not run"]


class Asked(msgspec.Struct, tag="sweep", tag_field="record", frozen=True):
    """First line. `words` are the sweep's, before they were dealt out; `command` is what starts a job."""

    journal_version: int
    started: str
    words: list[str]
    options: list[str]
    nproc: int
    command: list[str]
    metric: str


class Planned(msgspec.Struct, tag="planned", tag_field="record", frozen=True):
    """A job that is to be started: its folder's name and its words."""

    job: str
    words: list[str]


class Ended(msgspec.Struct, tag="ended", tag_field="record", frozen=True):
    """A job's end. `value` is its result (median of the sweep's metric); None with a `reason`.

    `exit_code` is 128 + n where signal n killed it, None where it was refused before it began.
    """

    job: str
    status: Status
    exit_code: int | None
    seconds: float
    value: float | None
    reason: str | None


Line: TypeAlias = Asked | Planned | Ended


@dataclass(frozen=True)
class Job:
    """One job as the journal tells it."""

    name: str
    words: tuple[str, ...]
    ended: Ended | None

    @property
    def status(self) -> Status:
        """What became of it."""
        return "not run" if self.ended is None else self.ended.status

    @property
    def keys(self) -> dict[str, str]:
        """Key -> value as it was written; `+` and `~` before a key are part of its value's meaning and stay."""
        return {key: value for key, _, value in (word.partition("=") for word in self.words)}


@dataclass(frozen=True)
class Sweep:
    """A sweep's folder. `problems` names lines that could not be read."""

    folder: Path
    asked: Asked
    jobs: tuple[Job, ...]
    problems: tuple[str, ...] = field(default=())

    def run_folder(self, job: Job) -> Path:
        """Where the job's run wrote."""
        return self.folder / job.name

    @property
    def swept(self) -> list[str]:
        """Keys whose values differ between jobs, in the order of the words; a job without the key differs too."""
        keys = dict.fromkeys(key for job in self.jobs for key in job.keys)
        return [key for key in keys if len({job.keys.get(key) for job in self.jobs}) > 1]


class Journal:
    """Appends lines.

    Raises:
        RecordWriteError: the file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / JOURNAL

    def write(self, lines: Sequence[Line]) -> None:
        """Append lines; they are on the disk when this returns."""
        try:
            with self._path.open("a+b") as file:
                if file.seek(0, os.SEEK_END):
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":
                        file.write(b"\n")  # a line that a kill tore stays alone
                file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RecordWriteError(f"{self._path}: cannot be written: {error.strerror or error}") from error


def read_sweep(folder: Path) -> Sweep:
    """Read a sweep's folder.

    Raises:
        InputError: no journal there, or its first line is not one.
    """
    path = folder / JOURNAL
    try:
        raw = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror or error}; give the folder of a sweep, made by python train.py -m KEY=A,B"
        ) from error
    decoder = msgspec.json.Decoder(Line)
    lines: list[Line] = []
    problems: list[str] = []
    for number, text in enumerate(raw, start=1):
        try:
            lines.append(decoder.decode(text))
        except msgspec.MsgspecError as error:
            problems.append(f"{path.name}:{number}: {error}")
    if not lines or not isinstance(lines[0], Asked):
        found = problems[0] if problems else "it is empty" if not raw else "it begins with another line"
        raise InputError(f"{path}: not the journal of a sweep: {found}")
    if lines[0].journal_version != JOURNAL_VERSION:
        raise InputError(f"{path}:1: journal_version {lines[0].journal_version}; this AORTA reads {JOURNAL_VERSION}")
    planned = {line.job: line for line in lines if isinstance(line, Planned)}
    ends = {line.job: line for line in lines if isinstance(line, Planned | Ended)}
    jobs = tuple(Job(name, tuple(line.words), _end(ends[name])) for name, line in planned.items() if is_job_name(name))
    return Sweep(folder, lines[0], jobs, tuple(problems))


def _end(last: Planned | Ended) -> Ended | None:
    """None where a job was planned again, by a sweep that was taken up, and has not ended since."""
    return last if isinstance(last, Ended) else None
