"""Carries out a plan: starts its launches one after another, says what became of each, and keeps a journal of it, so
that a plan that was killed can be taken up again.

The journal has a line for each event (`PlanOpened`, `Started`, `Ended`, `Closed`), and one process writes it. A line is
on the disk when `write` returns; one that a kill cut short stays alone, and is left out when the journal is read.

    with closing(Journal(folder / PLAN_JOURNAL, in_use="another process runs this plan")) as journal:
        run_plan(plan, journal)

Must not look into a record beyond asking whether it is there, change a line of the journal, or leave a process behind.
"""

from __future__ import annotations

import os
import secrets
import statistics
import sys
import weakref
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
from tqdm import tqdm

from aorta.command_line import rounded_time, to_stderr, tolerate_closed_terminal
from aorta.errors import EXIT_OK, SIGNAL_EXIT_BASE, ConfigError, RecordWriteError, RunIncomplete, ToolMissing
from aorta.experiments.launch_folder import host, last_error, last_lines, put_aside, run_of
from aorta.experiments.plan import Plan, PlannedLaunch
from aorta.experiments.process import LaunchEnd, StopRequest, end_marked, launch, launch_environment
from aorta.records.files import lock_file, open_own, read_lines, whole_file, write_whole
from aorta.records.run_files import MANIFEST_FILE
from aorta.redaction import hide, redact, redacted
from aorta.terminal_style import printable

PLAN_JOURNAL: Final = "journal.jsonl"
DONE: Final = "done"
"""The launch ended with 0 and left what was asked of it."""
FAILED: Final = "failed"
"""It ended with another code, left too few records, or lasted too long."""
STOPPED: Final = "stopped"
"""A signal to the runner ended it."""
LOST: Final = "lost"
"""The runner ended before the launch did; a later runner noted it."""


class _Event(msgspec.Struct, tag_field="event", frozen=True):
    time: str
    """UTC, ISO 8601."""


class _LaunchEvent(_Event, frozen=True):
    id: str
    launch: str
    order: int
    attempt: int


class PlanOpened(_Event, tag="open", frozen=True):
    """A runner of a plan began."""

    host: dict[str, Any] = {}
    pid: int | None = None


class Started(_LaunchEvent, tag="start", frozen=True):
    """A launch of a plan is about to be started. `id` marks its processes, `log` is seen from the plan's folder."""

    command: list[str] = []
    log: str | None = None


class Ended(_LaunchEvent, tag="end", frozen=True):
    """A launch of a plan has ended; `reason` says why it is not done, `kept` where its folder was put aside."""

    outcome: str
    exit_code: int | None
    seconds: float | None
    run_id: str | None
    reason: str | None = None
    kept: str | None = None
    left_behind: int = 0
    last_lines: list[str] = []


class Closed(_Event, tag="close", frozen=True):
    """The runner of a plan ended."""

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


def read_journal(folder: Path) -> list[PlanLine]:
    """Return the journal of the plan in a folder, without lines that a kill cut short; none where there is no journal.

    Raises:
        ConfigError: it cannot be read.
    """
    path = folder / PLAN_JOURNAL
    try:
        return read_lines(path, PlanLine)[0] if path.exists() else []
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error


def run_plan(plan: Plan, journal: Journal) -> int | None:
    """Launch what is not done yet, each launch at most twice. A signal ends the launch that runs, and the plan; so does
    the first launch of a side that fails: what is wrong with it would fail all the others.

    Returns:
        None when every launch is done, or 128 + n after signal n.

    Raises:
        ConfigError: the journal cannot be read. RecordWriteError: it cannot be written. RunIncomplete: names the
            launches that are missing.
    """
    lines = read_journal(plan.output)
    started = [line for line in lines if isinstance(line, Started)]
    ends = [line for line in lines if isinstance(line, Ended)]
    ended, last = {end.id for end in ends}, {end.launch: end for end in ends}
    done = {name: end.run_id for name, end in last.items() if end.outcome == DONE}
    journal.write(PlanOpened(now(), host(), os.getpid()))
    launches = list(plan.order())
    by_name = {planned.name: planned for planned in launches}
    # What a killed runner left: processes are ended, folders put aside.
    for start in [start for start in started if start.id not in ended]:
        lost, left_behind = by_name.get(start.launch), end_marked(start.id)
        journal.write(
            Ended(
                *(now(), start.id, start.launch, start.order, start.attempt),
                outcome=LOST,
                exit_code=None,
                seconds=None,
                run_id=None,
                reason="the runner was gone before the launch ended",
                kept=None if lost is None else put_aside(plan, lost, LOST),
                left_behind=left_behind,
            )
        )
    missing = [planned for planned in launches if run_of(plan.run_folder(planned))[0] != done.get(planned.name, "")]
    seconds = [end.seconds for end in ends if end.outcome == DONE and end.seconds is not None]
    progress = _Progress(len(launches), len(launches) - len(missing), seconds)
    stop = StopRequest()
    failed: dict[str, str] = {}
    ended_by = None
    with closing(progress), stop.on_signals():
        for planned in missing:
            starts = sum(start.launch == planned.name for start in started)
            why = _launch(plan, planned, 0, starts, journal, progress, stop)
            if why is not None and planned.number > 0 and stop.signal is None:
                why = _launch(plan, planned, 1, starts, journal, progress, stop)
            if why is not None:
                failed[planned.name] = why
            if why is not None and planned.number == 0:
                ended_by = planned.name
            if stop.signal is not None or ended_by is not None:
                break
    stopped_by = None if stop.signal is None else SIGNAL_EXIT_BASE + stop.signal
    journal.write(Closed(now(), stopped_by or (RunIncomplete.exit_code if failed else EXIT_OK), sorted(failed)))
    if stopped_by is not None:
        to_stderr(f"stopped; run the same command again for the missing launches in {plan.output}")
    elif ended_by is not None:
        raise RunIncomplete(
            f"{ended_by}: {failed[ended_by]}\nthe first launch of a side failed, and the others would fail as it did, "
            "so the plan ends; the same command tries it again"
        )
    elif failed:
        listed = "\n".join(f"  {name}: {why}" for name, why in failed.items())
        raise RunIncomplete(
            f"{len(failed)} of {len(launches)} launches failed twice:\n{listed}\nthe same command tries them again"
        )
    return stopped_by


def _launch(
    plan: Plan,
    planned: PlannedLaunch,
    number: int,
    starts: int,
    journal: Journal,
    progress: _Progress,
    stop: StopRequest,
) -> str | None:
    """Launch once, noted in the journal; returns None, or why it is not done. `starts`: of earlier runners."""
    put_aside(plan, planned, LOST)  # a run needs an empty folder, and the journal has no run in it
    command, id_, folder = plan.command(planned), secrets.token_hex(8), plan.run_folder(planned)
    again = f"-{starts + number + 1}" if starts + number else ""
    log = plan.output / "logs" / planned.side.name / f"{planned.number:02d}{again}.log"

    # Before the process is made: a runner that is killed now leaves word of what to look for.
    of = id_, planned.name, planned.order, number
    journal.write(Started(now(), *of, hide(command), str(log.relative_to(plan.output))))
    progress.started(planned.shown)
    variables = {**launch_environment(), **planned.side.environment}
    try:
        ended = launch(
            command,
            id_=id_,
            environment=variables,
            stop=stop,
            timeout_s=plan.timeout_s,
            folder=plan.folder,
            log=log,
            tick=progress.tick,
        )
    except ToolMissing as error:  # a launch that failed, as it would be in a shell
        write_whole(log, f"{error}\n")
        ended = LaunchEnd(error.exit_code, 0.0, timed_out=False, left_behind=0)
    went_well = ended.exit_code == EXIT_OK and not ended.timed_out
    lacks, outcome = run_of(folder)[1] if went_well else None, FAILED
    why: str | None = f"exit code {ended.exit_code}"
    if lacks is not None:
        if planned.side.command and not (folder / MANIFEST_FILE).exists():
            lacks = f"the command wrote no record to {folder} "
            if any("{output}" in word for word in planned.side.command):
                lacks += "(give {output} to aorta.record; without {output} the command is recorded without a line)"
            else:
                lacks += "(no optimizer of torch stepped, or AORTA could not record: see the log)"
        why = f"exit code 0, but {lacks}"
    if went_well and lacks is None:  # before a signal or the timeout could end it
        outcome, why = DONE, None
    elif stop.signal is not None:
        outcome, why = STOPPED, f"stopped by {stop.signal.name}"
    elif ended.timed_out:
        why = f"not done after {plan.timeout_s} s"
    with (
        log.open(encoding="utf-8", errors="surrogateescape", newline="") as lines,
        whole_file(log) as part,
        part.open("w", encoding="utf-8", errors="surrogateescape", newline="") as shown,
    ):
        shown.writelines(map(redact, lines))
    done = outcome == DONE
    journal.write(
        Ended(
            *(now(), *of),
            outcome=outcome,
            exit_code=ended.exit_code,
            seconds=round(ended.seconds, 3),
            run_id=run_of(folder)[0] if done else None,
            reason=why,
            kept=None if done else put_aside(plan, planned, outcome),
            left_behind=ended.left_behind,
            last_lines=[] if done else last_lines(log),
        )
    )
    sentence = f"failed: {why}" if outcome == FAILED else why or outcome
    progress.ended(planned.shown, sentence, ended.seconds, done=done)
    return None if done else f"{sentence}: {last_error(log)} ({log})"


class _Progress:
    """One bar over all launches on a terminal, otherwise a line for each; on stderr, for stdout holds what a plan says
    at its end.
    """

    def __init__(self, total: int, done: int, seconds: Sequence[float]) -> None:
        self._total, self._done, self._seconds = total, done, list(seconds)
        self._on_terminal = sys.stderr.isatty()
        tqdm.monitor_interval = 0  # tqdm's own thread would wake up beside what is measured
        with tolerate_closed_terminal():
            self._bar = tqdm(
                total=total, initial=done, unit="launch", dynamic_ncols=True, disable=not self._on_terminal
            )

    def started(self, name: str) -> None:
        with tolerate_closed_terminal():
            self._bar.set_description(printable(name))

    def tick(self) -> None:
        with tolerate_closed_terminal():
            self._bar.refresh()

    def ended(self, name: str, sentence: str, seconds: float, *, done: bool) -> None:
        if done:
            self._done += 1
            self._seconds.append(seconds)
        line = f"[{self._done}/{self._total}] {name}: {sentence} in {seconds:.1f} s"
        if not self._on_terminal:
            left_s = (self._total - self._done) * statistics.fmean(self._seconds or [0.0])
            to_stderr(f"{line}, about {rounded_time(left_s)} left" if left_s else line)
            return
        with tolerate_closed_terminal():
            if done:
                self._bar.update(1)
            else:
                self._bar.write(printable(line), file=sys.stderr)

    def close(self) -> None:
        with tolerate_closed_terminal():
            self._bar.close()
