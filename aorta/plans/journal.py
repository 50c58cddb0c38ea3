"""What happened to a plan, one JSON line per event, and what is left to do.

Enters: events as they happen. Leaves: `journal.jsonl`, only ever appended to, every line on the disk before the next
thing is done. Must not: be written by two runners at once, or trust a line that a kill tore.

Events: `open` (a runner began), `start` and `end` of a launch, `close` (the runner ended).
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from aorta.errors import ConfigError

JOURNAL_FILE: Final = "journal.jsonl"
OPEN, START, END, CLOSE = "open", "start", "end", "close"
DONE: Final = "done"
"""The launch ended with 0 and left the records of all its ranks."""
FAILED: Final = "failed"
"""It ended with another code, left too few records, or lasted too long."""
STOPPED: Final = "stopped"
"""A signal to the runner ended it."""
LOST: Final = "lost"
"""The runner was gone before the launch had ended; a later runner found it."""


class Journal:
    """The journal of one plan, held by one runner as long as it is open."""

    def __init__(self, folder: Path) -> None:
        """Raises:
        ConfigError: another runner holds it, or it cannot be written.
        """
        self.path = folder / JOURNAL_FILE
        try:
            self._file = self.path.open("a+b")
        except OSError as error:
            raise ConfigError(f"{self.path}: {error.strerror or error}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with the process, however it ends
        except BlockingIOError:
            self._file.close()
            raise ConfigError(f"{folder}: another process runs this plan; wait for it, or stop it") from None
        self.events = list(read_journal(self.path))
        self._file.seek(0, os.SEEK_END)
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")  # a line that a kill tore stays alone

    def write(self, event: str, **fields: Any) -> None:
        """Append one event; it is on the disk when this returns."""
        line = {"event": event, "time": datetime.now(UTC).isoformat(timespec="milliseconds"), **fields}
        self.events.append(line)
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def done(self) -> dict[str, str]:
        """Launch (`candidate/03`) -> run id, of those whose last end was good."""
        last = {event["launch"]: event for event in self.events if event["event"] == END}
        return {launch: event["run_id"] for launch, event in last.items() if event["outcome"] == DONE}

    def open_starts(self) -> list[dict[str, Any]]:
        """Starts without an end: their runner was killed."""
        ended = {event["id"] for event in self.events if event["event"] == END}
        return [event for event in self.events if event["event"] == START and event["id"] not in ended]

    def starts_of(self, launch: str) -> int:
        """How often a launch was started."""
        return sum(event["event"] == START and event["launch"] == launch for event in self.events)

    def seconds(self) -> list[float]:
        """How long the good launches lasted."""
        return [event["seconds"] for event in self.events if event["event"] == END and event["outcome"] == DONE]


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a journal; none where there is no file."""
    if not path.exists():
        return
    for line in path.read_bytes().split(b"\n"):
        try:
            event = json.loads(line)
        except ValueError:
            continue  # empty, or torn by a kill
        if isinstance(event, dict) and "event" in event:
            yield event
