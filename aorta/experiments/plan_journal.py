"""The journal of a plan, `journal.jsonl`: what happened to its launches, and so what is left to do.

Events: `open` (a runner began), `start` and `end` of a launch, `close` (the runner ended).

Must not judge a launch; `plan_runner` does.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from aorta.errors import ConfigError
from aorta.experiments.journal import Journal, read_journal

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


class _Started(msgspec.Struct, tag_field="event", tag=START):
    """What every start says, and is relied on."""

    id: str
    launch: str
    order: int
    attempt: int


class _Ended(msgspec.Struct, tag_field="event", tag=END):
    """What every end says, and is relied on."""

    id: str
    launch: str
    outcome: str
    run_id: str | None
    seconds: float | None


_DECODER: Final[msgspec.json.Decoder[_Started | _Ended]] = msgspec.json.Decoder(_Started | _Ended)


class PlanJournal(Journal):
    """The journal of one plan, held by one runner as long as it is open; `events` are those that stand in it.

    Raises:
        ConfigError: another runner holds it, or it cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / JOURNAL_FILE, "another process runs this plan; wait for it, or stop it")
        try:
            self.events = read_events(self.path)
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read: {error.strerror or error}") from error

    def write(self, event: str, **fields: Any) -> None:
        """Append one event; it is on the disk when this returns.

        Raises:
            RecordWriteError: the file cannot be written.
        """
        line = {"event": event, "time": datetime.now(UTC).isoformat(timespec="milliseconds"), **fields}
        self.events.append(line)
        self.append(json.dumps(line).encode())

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
        ends = [event for event in self.events if event["event"] == END and event["outcome"] == DONE]
        return [event["seconds"] for event in ends if event["seconds"] is not None]


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a journal, without lines that a kill cut short; none where there is no file."""
    return read_journal(path, _event)[0] if path.exists() else []


def _event(line: bytes) -> dict[str, Any]:
    event = json.loads(line)
    if not isinstance(event, dict) or "event" not in event:
        raise ValueError("not an event")
    if event["event"] in (START, END):
        _DECODER.decode(line)
    return event
