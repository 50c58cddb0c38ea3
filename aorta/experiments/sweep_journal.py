"""The journal of a sweep, `sweep.jsonl`: what was asked for and what became of each job; a killed sweep has one too.

Must not say of a job what its own record says better; metrics are read from there (`run_medians`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

from aorta.errors import InputError
from aorta.experiments.journal import Journal, read_journal

SWEEP_FILE: Final = "sweep.jsonl"
JOURNAL_VERSION: Final = 1

Status: TypeAlias = Literal["done", "failed", "stopped", "refused", "not run"]


class SweepRequest(msgspec.Struct, tag="sweep", tag_field="record", frozen=True):
    """First line. `words` are the sweep's, before they were dealt out; `command` is what starts a job."""

    journal_version: int
    started: str
    words: list[str]
    options: list[str]
    nproc: int
    command: list[str]
    metric: str


class JobPlanned(msgspec.Struct, tag="planned", tag_field="record", frozen=True):
    """A job that is to be started: its folder's name and its words."""

    job: str
    words: list[str]


class JobEnded(msgspec.Struct, tag="ended", tag_field="record", frozen=True):
    """A job's end. `value` is its result (median of the sweep's metric); None with a `reason`.

    `exit_code` is 128 + n where signal n killed it, None where it was refused before it began.
    """

    job: str
    status: Status
    exit_code: int | None
    seconds: float
    value: float | None
    reason: str | None


Line: TypeAlias = SweepRequest | JobPlanned | JobEnded


@dataclass(frozen=True)
class JobHistory:
    """One job as the journal tells it."""

    name: str
    words: tuple[str, ...]
    ended: JobEnded | None

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
    """A sweep that was read back. `problems` names lines that could not be read."""

    folder: Path
    asked: SweepRequest
    jobs: tuple[JobHistory, ...]
    problems: tuple[str, ...] = field(default=())

    def run_folder(self, job: JobHistory) -> Path:
        """Where the job's run wrote."""
        return self.folder / job.name

    @property
    def swept(self) -> list[str]:
        """Keys whose values differ between jobs, in the order of the words; a job without the key differs too."""
        keys = dict.fromkeys(key for job in self.jobs for key in job.keys)
        return [key for key in keys if len({job.keys.get(key) for job in self.jobs}) > 1]


class SweepJournal(Journal):
    """The journal of one sweep, held by one process as long as it is open.

    Raises:
        ConfigError: another process holds it, or it cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / SWEEP_FILE, "another process runs a sweep there; give this one another label=NAME")

    def write(self, *lines: Line) -> None:
        """Append lines; they are on the disk when this returns.

        Raises:
            RecordWriteError: the file cannot be written.
        """
        self.append(*map(msgspec.json.encode, lines))


def job_name(number: int) -> str:
    """The folder of a job: `00`, `01`, ..., `99`, `100`."""
    return f"{number:02d}"


def is_job_name(name: str) -> bool:
    """Whether a folder of that name is a job's."""
    return name.isascii() and name.isdigit()


def read_sweep(folder: Path) -> Sweep:
    """Read a sweep's folder.

    Raises:
        InputError: no journal there, or its first line is not one.
    """
    path = folder / SWEEP_FILE
    try:
        lines, problems = read_journal(path, msgspec.json.Decoder(Line).decode)
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror or error}; give the folder of a sweep, made by python train.py -m KEY=A,B"
        ) from error
    if not lines or not isinstance(lines[0], SweepRequest):
        found = problems[0] if problems else "it begins with another line" if lines else "it is empty"
        raise InputError(f"{path}: not the journal of a sweep: {found}")
    if lines[0].journal_version != JOURNAL_VERSION:
        raise InputError(f"{path}:1: journal_version {lines[0].journal_version}; this AORTA reads {JOURNAL_VERSION}")
    planned = {line.job: line for line in lines if isinstance(line, JobPlanned)}
    # The last line of a job counts: one that a resumed sweep planned again has not ended since.
    last = {line.job: line for line in lines if isinstance(line, JobPlanned | JobEnded)}
    ends = {name: line if isinstance(line, JobEnded) else None for name, line in last.items()}
    jobs = tuple(JobHistory(name, tuple(line.words), ends[name]) for name, line in planned.items() if is_job_name(name))
    return Sweep(folder, lines[0], jobs, tuple(problems))
