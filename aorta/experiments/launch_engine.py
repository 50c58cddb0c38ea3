"""The engine behind plans and sweeps: starts launches one after another, and says what became of each.

`attempt` is one launch; `run_plan` goes through those of `aorta ab`, `sweep_jobs` through those of a sweep.

Must not look into a record beyond asking whether it is there.
"""

from __future__ import annotations

import os
import secrets
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from aorta.command_line import rounded_time, to_stderr, tolerate_closed_terminal
from aorta.errors import EXIT_OK, SIGNAL_EXIT_BASE, RunIncomplete, ToolMissing
from aorta.experiments.journal import (
    DONE,
    FAILED,
    LOST,
    STOPPED,
    Closed,
    Ended,
    Journal,
    PlanHistory,
    PlanOpened,
    Started,
    now,
    read_plan_history,
)
from aorta.experiments.launch_folder import host, last_error, last_lines, log_file, put_aside, run_of
from aorta.experiments.launch_plan import Plan, PlannedLaunch, Side
from aorta.experiments.process import StopRequest, end_marked, launch, launch_environment
from aorta.records.files import whole_file, write_whole
from aorta.redaction import hide, redact
from aorta.terminal_style import printable


@dataclass(frozen=True)
class Outcome:
    status: Literal["done", "failed", "stopped"]
    exit_code: int
    seconds: float
    reason: str | None
    left_behind: int

    @property
    def sentence(self) -> str:
        """`done`, `failed: exit code 7` or `stopped by SIGTERM`."""
        return f"failed: {self.reason}" if self.status == FAILED else self.reason or self.status


@dataclass
class Finished:
    """How a plan ended.

    Attributes:
        failed: launch -> why, of those that are not done.
        stopped_by: 128 + n after signal n, otherwise None.
        ended_by: the first launch of a side, which failed and so ended the plan.
    """

    failed: dict[str, str] = field(default_factory=dict)
    stopped_by: int | None = None
    ended_by: str | None = None

    @property
    def exit_code(self) -> int:
        """0 when every launch is done."""
        if self.stopped_by is not None:
            return self.stopped_by
        return RunIncomplete.exit_code if self.failed else EXIT_OK


def attempt(
    command: Sequence[str],
    *,
    id_: str,
    stop: StopRequest,
    missing: Callable[[], str | None],
    timeout_s: float | None,
    environment: Mapping[str, str] | None = None,
    **how: Any,
) -> Outcome:
    """Start a launch, wait for its end, and say what became of it.

    One that was complete before a signal or the timeout could end it is done.

    Args:
        missing: asked when it has ended with 0; what it should have left and did not, or None.
        environment: variables added to the caller's.
        how: `folder`, `log` and `tick` of `process.launch`.

    Raises:
        ToolMissing: the program cannot be started.
    """
    ended = launch(
        command,
        id_=id_,
        environment={**launch_environment(), **(environment or {})},
        stop=stop,
        timeout_s=timeout_s,
        **how,
    )
    lacks = missing() if ended.exit_code == EXIT_OK and not ended.timed_out else None
    if ended.exit_code == EXIT_OK and not ended.timed_out and lacks is None:
        return Outcome(DONE, ended.exit_code, ended.seconds, None, ended.left_behind)
    if stop.signal is not None:
        return Outcome(STOPPED, ended.exit_code, ended.seconds, f"stopped by {stop.signal.name}", ended.left_behind)
    why = f"not done after {timeout_s} s" if ended.timed_out else lacks or f"exit code {ended.exit_code}"
    return Outcome(FAILED, ended.exit_code, ended.seconds, why, ended.left_behind)


def run_plan(plan: Plan, journal: Journal) -> Finished:
    """Launch what is not done yet, each launch at most twice. A signal ends the launch that runs, and the plan; so does
    the first launch of a side that fails: what is wrong with it would fail all the others.

    Raises:
        ConfigError: the journal cannot be read. RecordWriteError: it cannot be written.
    """
    history = read_plan_history(plan.output)
    journal.write(PlanOpened(now(), host(), os.getpid()))
    # What a killed runner left of launches: processes are ended, folders put aside.
    by_name = {one.name: one for one in plan.order()}
    for start in history.open_starts():
        lost = by_name.get(start.launch)
        left_behind = end_marked(start.id)
        journal.write(
            Ended(
                now(),
                start.id,
                start.launch,
                start.order,
                start.attempt,
                outcome=LOST,
                exit_code=None,
                seconds=None,
                run_id=None,
                reason="the runner was gone before the launch ended",
                kept=None if lost is None else put_aside(plan, lost, LOST),
                left_behind=left_behind,
            )
        )
    done = history.done()
    launches = list(plan.order())
    missing = [one for one in launches if run_of(plan.run_folder(one))[0] != done.get(one.name, "")]
    progress = LaunchProgress(len(launches), len(launches) - len(missing), history.seconds())
    runner = _PlanRunner(plan, journal, history, progress)
    result = Finished()
    with closing(progress), runner.stop.on_signals():
        for one in missing:
            why = runner.launch(one, 0)
            if why is not None and one.number > 0 and runner.stop.signal is None:
                why = runner.launch(one, 1)
            if why is not None:
                result.failed[one.name] = why
            if runner.stop.signal is not None:
                result.stopped_by = SIGNAL_EXIT_BASE + runner.stop.signal
                break
            if why is not None and one.number == 0:
                result.ended_by = one.name
                break
    journal.write(Closed(now(), result.exit_code, sorted(result.failed)))
    return result


@dataclass(frozen=True)
class _PlanRunner:
    """One start of the command: its plan, its journal and what stood in it, what it shows, the signal that stops it."""

    plan: Plan
    journal: Journal
    history: PlanHistory
    progress: LaunchProgress
    stop: StopRequest = field(default_factory=StopRequest)

    def launch(self, one: PlannedLaunch, number: int) -> str | None:
        """Launch once, noted in the journal; returns None, or why it is not done."""
        put_aside(self.plan, one, LOST)  # what an unknown hand left: a run needs an empty folder
        command, id_, folder = self.plan.command(one), secrets.token_hex(8), self.plan.run_folder(one)
        log = log_file(self.plan, one, self.history.starts_of(one.name) + number)

        # Before the process is made: a runner that is killed now leaves word of what to look for.
        seen = str(log.relative_to(self.plan.output))
        self.journal.write(Started(now(), id_, one.name, one.order, number, hide(command), seen))
        self.progress.started(one.shown)
        try:
            found = attempt(
                command,
                id_=id_,
                stop=self.stop,
                missing=lambda: _lacking(folder, one.side),
                timeout_s=self.plan.timeout_s,
                environment=one.side.environment,
                folder=self.plan.folder,
                log=log,
                tick=self.progress.tick,
            )
        except ToolMissing as error:  # a launch that failed, as it would be in a shell
            write_whole(log, f"{error}\n")
            found = Outcome(FAILED, error.exit_code, 0.0, f"exit code {error.exit_code}", 0)
        with (
            log.open(encoding="utf-8", errors="surrogateescape", newline="") as said,
            whole_file(log) as part,
            part.open("w", encoding="utf-8", errors="surrogateescape", newline="") as shown,
        ):
            shown.writelines(map(redact, said))
        done = found.status == DONE
        self.journal.write(
            Ended(
                now(),
                id_,
                one.name,
                one.order,
                number,
                outcome=found.status,
                exit_code=found.exit_code,
                seconds=round(found.seconds, 3),
                run_id=run_of(folder)[0] if done else None,
                reason=found.reason,
                kept=None if done else put_aside(self.plan, one, found.status),
                left_behind=found.left_behind,
                last_lines=[] if done else last_lines(log),
            )
        )
        self.progress.ended(one.shown, found)
        return None if done else f"{found.sentence}: {last_error(log)} ({log})"


def _lacking(folder: Path, side: Side) -> str | None:
    """Return what a launch that ended with 0 should have left in its run folder and did not."""
    lacks = run_of(folder)[1]
    if lacks is None:
        return None
    hint = ""
    if side.command is not None and any("{output}" in word for word in side.command):
        hint = "; the program has to give {output} of its command to aorta.record"
    return f"exit code 0, but {lacks}{hint}"


class LaunchProgress:
    """One bar over all launches on a terminal, otherwise a line for each; on stderr, for stdout holds what a plan says
    at its end.
    """

    def __init__(self, total: int, done: int, seconds: list[float]) -> None:
        self._total, self._done, self._seconds = total, done, list(seconds)
        self._bar: Any = None
        if sys.stderr.isatty():
            # tqdm's own thread would wake up beside what is measured.
            tqdm.monitor_interval = 0
            with tolerate_closed_terminal():
                self._bar = tqdm(
                    total=total, initial=done, unit="launch", dynamic_ncols=True, file=sys.stderr, leave=True
                )

    def started(self, name: str) -> None:
        if self._bar is not None:
            with tolerate_closed_terminal():
                self._bar.set_description(printable(name))

    def tick(self) -> None:
        if self._bar is not None:
            with tolerate_closed_terminal():
                self._bar.refresh()

    def ended(self, name: str, outcome: Outcome) -> None:
        done = outcome.status == DONE
        if done:
            self._done += 1
            self._seconds.append(outcome.seconds)
        left = self._total - self._done
        line = f"[{self._done}/{self._total}] {name}: {outcome.sentence} in {outcome.seconds:.1f} s"
        if self._bar is None:
            about = (
                f", about {rounded_time(left * statistics.fmean(self._seconds))} left" if left and self._seconds else ""
            )
            to_stderr(f"{line}{about}")
            return
        with tolerate_closed_terminal():
            if done:
                self._bar.update(1)
            else:
                self._bar.write(printable(line), file=sys.stderr)

    def close(self) -> None:
        if self._bar is not None:
            with tolerate_closed_terminal():
                self._bar.close()
