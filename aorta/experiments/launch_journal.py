"""The journal of a plan: what became of its launches, so that a plan that was killed can be taken up again.

It has a line for each event (`PlanOpened`, `Started`, `Ended`, `Closed`), and one process writes it. A line is on the
disk when `write` returns; one that a kill cut short stays alone, and is left out when the journal is read.

    with closing(Journal(folder / PLAN_JOURNAL, in_use="another process runs this plan")) as journal:
        journal.write(Closed(now(), exit_code=0, failed=[]))

Must not change a line that is there.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from aorta.errors import ConfigError, RecordWriteError
from aorta.records.files import lock_file, open_own, read_lines
from aorta.redaction import redacted

PLAN_JOURNAL: Final = "journal.jsonl"
DONE: Final = "done"
"""The launch ended with 0 and left what was asked of it."""
FAILED: Final = "failed"
"""It ended with another code, left too few records, or lasted too long."""
STOPPED: Final = "stopped"
"""A signal to the runner ended it."""
LOST: Final = "lost"
"""The runner ended before the launch did; a later runner noted it."""


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


PlanLine: TypeAlias = PlanOpened | Started | Ended | Closed


def now() -> str:
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
            self._file = open_own(path)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error
        self.close = weakref.finalize(self, self._file.close)
        if not lock_file(self._file):
            self.close()
            raise ConfigError(f"{path.parent}: {in_use}")

    def write(self, *lines: msgspec.Struct) -> None:
        """Append lines, without secrets; they are on the disk when this returns.

        Raises:
            RecordWriteError: the file cannot be written.
        """
        data = msgspec.json.Encoder().encode_lines(redacted(msgspec.to_builtins(lines)))
        try:
            if self._file.seek(0, os.SEEK_END):
                self._file.seek(-1, os.SEEK_END)
                if self._file.read(1) != b"\n":  # the last line has no end
                    data = b"\n" + data
            while data:
                data = data[self._file.write(data) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise RecordWriteError(f"{self.path}: cannot be written: {error.strerror or error}") from error


@dataclass(frozen=True)
class PlanHistory:
    """What the journal of a plan says of its launches.

    Attributes:
        done: launch (`candidate/03`) -> run id, of those whose last end was good.
        starts: of every launch, in order.
        lost: the starts without an end: their runner was killed.
        seconds: of each launch that was done.
    """

    done: dict[str, str | None]
    starts: list[Started]
    lost: list[Started]
    seconds: list[float]


def read_plan_history(folder: Path) -> PlanHistory:
    """Return the launches of the plan in a folder, without lines that a kill cut short; none where there is no journal.

    Raises:
        ConfigError: the journal cannot be read.
    """
    path = folder / PLAN_JOURNAL
    try:
        lines = read_lines(path, PlanLine)[0] if path.exists() else []
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    starts = [line for line in lines if isinstance(line, Started)]
    ends = [line for line in lines if isinstance(line, Ended)]
    last, ended = {end.launch: end for end in ends}, {end.id for end in ends}
    return PlanHistory(
        {launch: end.run_id for launch, end in last.items() if end.outcome == DONE},
        starts,
        [start for start in starts if start.id not in ended],
        [end.seconds for end in ends if end.outcome == DONE and end.seconds is not None],
    )
