"""The journal of launches: JSON lines that one process appends to, so that whatever was killed can be taken up again.

A plan keeps `journal.jsonl` (`PlanOpened`, `Started`, `Ended`, `Closed`), a sweep `sweep.jsonl` (`SweepRequest`,
`JobPlanned`, `JobEnded`). A line is on the disk when `write` returns; one that a kill cut short stays alone, and is
left out when the journal is read.

    with closing(Journal(folder / PLAN_JOURNAL, in_use="another process runs this plan")) as journal:
        journal.write(Closed(now(), exit_code=0, failed=[]))

Must not change a line that is there, be written by two processes at once, or judge a launch (`launch_engine` does).
"""

from __future__ import annotations

import fcntl
import os
import weakref
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec

from aorta.errors import ConfigError, InputError, RecordWriteError
from aorta.records.files import SMALL_BYTES, open_regular

PLAN_JOURNAL: Final = "journal.jsonl"
SWEEP_FILE: Final = "sweep.jsonl"
SWEEP_VERSION: Final = 1
DONE: Final = "done"
"""The launch ended with 0 and left what was asked of it."""
FAILED: Final = "failed"
"""It ended with another code, left too few records, or lasted too long."""
STOPPED: Final = "stopped"
"""A signal to the runner ended it."""
LOST: Final = "lost"
"""The runner was gone before the launch had ended; a later runner found it."""

Status: TypeAlias = Literal["done", "failed", "stopped", "refused", "not run"]


class PlanOpened(msgspec.Struct, tag="open", tag_field="event", frozen=True):
    """A runner of a plan began. `time` here and below: UTC, ISO 8601."""

    time: str
    host: dict[str, Any] = {}
    pid: int | None = None


class Started(msgspec.Struct, tag="start", tag_field="event", frozen=True):
    """A launch of a plan is about to be started. `id` marks its processes, `log` is seen from the plan's folder."""

    time: str
    id: str
    launch: str
    order: int
    attempt: int
    command: list[str] = []
    log: str | None = None


class Ended(msgspec.Struct, tag="end", tag_field="event", frozen=True):
    """A launch of a plan has ended; `reason` says why it is not done, `kept` where its folder was put aside."""

    time: str
    id: str
    launch: str
    order: int
    attempt: int
    outcome: str
    exit_code: int | None
    seconds: float | None
    run_id: str | None
    reason: str | None = None
    kept: str | None = None
    left_behind: int = 0
    last_lines: list[str] = []


class Closed(msgspec.Struct, tag="close", tag_field="event", frozen=True):
    """The runner of a plan ended."""

    time: str
    exit_code: int
    failed: list[str]


class SweepRequest(msgspec.Struct, tag="sweep", tag_field="record", frozen=True):
    """First line of a sweep. `words` are its overrides, before they were expanded; `command` is what starts a job."""

    journal_version: int
    started: str
    words: list[str]
    options: list[str]
    nproc: int
    command: list[str]
    metric: str


class JobPlanned(msgspec.Struct, tag="planned", tag_field="record", frozen=True):
    """A job that is to be started: its folder's name and its overrides."""

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


PlanLine: TypeAlias = PlanOpened | Started | Ended | Closed
SweepLine: TypeAlias = SweepRequest | JobPlanned | JobEnded


def now() -> str:
    """Return the time as lines have it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Journal:
    """A journal open for appending, made where there is none, and locked against other processes.

    The lock is gone with `close`, with this object or with the process, however it ends. On a disk that has no locks
    there is none.

    Args:
        path: of the file. Its folder must be there.
        in_use: what to tell a person while another process holds the lock.

    Raises:
        ConfigError: another process holds it, or it cannot be opened.
    """

    def __init__(self, path: Path, in_use: str) -> None:
        self.path = path
        try:
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error
        self.close = weakref.finalize(self, self._file.close)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ConfigError(f"{path.parent}: {in_use}") from None
        except OSError:  # a disk without locks
            pass

    def write(self, *lines: PlanLine | SweepLine) -> None:
        """Append lines; they are on the disk when this returns.

        Raises:
            RecordWriteError: the file cannot be written.
        """
        data = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        try:
            if self._torn():
                data = b"\n" + data
            while data:
                data = data[self._file.write(data) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise RecordWriteError(f"{self.path}: cannot be written: {error.strerror or error}") from error

    def _torn(self) -> bool:
        """Return whether the last line has no end."""
        if not self._file.seek(0, os.SEEK_END):
            return False
        self._file.seek(-1, os.SEEK_END)
        return self._file.read(1) != b"\n"


def plan_journal(folder: Path) -> Journal:
    """Return the journal of the plan in a folder. Raises as `Journal`."""
    return Journal(folder / PLAN_JOURNAL, "another process runs this plan; wait for it, or stop it")


def sweep_journal(folder: Path) -> Journal:
    """Return the journal of the sweep in a folder. Raises as `Journal`."""
    return Journal(folder / SWEEP_FILE, "another process runs a sweep there; give this one another label=NAME")


def read_journal(path: Path, lines: Any) -> tuple[list[Any], list[str]]:
    """Read every line of a journal, also while another process writes it.

    Args:
        lines: what a line may be, `PlanLine` or `SweepLine`.

    Returns:
        The lines, and of each that says nothing its number and why, as `journal.jsonl:7: ...`.

    Raises:
        OSError: the file cannot be read.
    """
    decoder = msgspec.json.Decoder(lines)
    found, problems = [], []
    with open_regular(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(SMALL_BYTES), b""), start=1):
            try:
                found.append(decoder.decode(line.removesuffix(b"\n")))
            except (ValueError, RecursionError) as error:
                problems.append(f"{path.name}:{number}: {error}")
    return found, problems


@dataclass(frozen=True)
class PlanHistory:
    """What the journal of a plan says of its launches, and so what is left to do."""

    started: tuple[Started, ...]
    ended: tuple[Ended, ...]

    def done(self) -> dict[str, str | None]:
        """Launch (`candidate/03`) -> run id, of those whose last end was good."""
        last = {end.launch: end for end in self.ended}
        return {launch: end.run_id for launch, end in last.items() if end.outcome == DONE}

    def open_starts(self) -> list[Started]:
        """Return the starts without an end: their runner was killed."""
        ended = {end.id for end in self.ended}
        return [start for start in self.started if start.id not in ended]

    def starts_of(self, launch: str) -> int:
        """Return how often a launch was started."""
        return sum(start.launch == launch for start in self.started)

    def seconds(self) -> list[float]:
        """Return how long the good launches lasted."""
        return [end.seconds for end in self.ended if end.outcome == DONE and end.seconds is not None]


def read_plan_history(folder: Path) -> PlanHistory:
    """Return the launches of the plan in a folder, without lines that a kill cut short; none where there is no journal.

    Raises:
        ConfigError: the journal cannot be read.
    """
    path = folder / PLAN_JOURNAL
    try:
        lines = read_journal(path, PlanLine)[0] if path.exists() else []
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    return PlanHistory(
        tuple(line for line in lines if isinstance(line, Started)),
        tuple(line for line in lines if isinstance(line, Ended)),
    )


@dataclass(frozen=True)
class JobHistory:
    """One job as the journal of its sweep tells it."""

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
        """Return where the job's run wrote."""
        return self.folder / job.name

    @property
    def swept(self) -> list[str]:
        """Keys whose values differ between jobs, in the order of the overrides; a job without the key differs too."""
        keys = dict.fromkeys(key for job in self.jobs for key in job.keys)
        return [key for key in keys if len({job.keys.get(key) for job in self.jobs}) > 1]


def job_name(number: int) -> str:
    """Return the folder of a job: `00`, `01`, ..., `99`, `100`."""
    return f"{number:02d}"


def is_job_name(name: str) -> bool:
    """Return whether a folder of that name is a job's."""
    return name.isascii() and name.isdigit()


def read_sweep(folder: Path) -> Sweep:
    """Read a sweep's folder.

    Raises:
        InputError: no journal there, or its first line is not one.
    """
    path = folder / SWEEP_FILE
    try:
        lines, problems = read_journal(path, SweepLine)
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror or error}; give the folder of a sweep, made by python train.py -m KEY=A,B"
        ) from error
    if not lines or not isinstance(lines[0], SweepRequest):
        found = problems[0] if problems else "it begins with another line" if lines else "it is empty"
        raise InputError(f"{path}: not the journal of a sweep: {found}")
    if lines[0].journal_version != SWEEP_VERSION:
        raise InputError(f"{path}:1: journal_version {lines[0].journal_version}; this AORTA reads {SWEEP_VERSION}")
    planned = {line.job: line for line in lines if isinstance(line, JobPlanned)}
    # The last line of a job counts: one that a resumed sweep planned again has not ended since.
    last = {line.job: line for line in lines if isinstance(line, JobPlanned | JobEnded)}
    ends = {name: line if isinstance(line, JobEnded) else None for name, line in last.items()}
    jobs = tuple(JobHistory(name, tuple(line.words), ends[name]) for name, line in planned.items() if is_job_name(name))
    return Sweep(folder, lines[0], jobs, tuple(problems))
