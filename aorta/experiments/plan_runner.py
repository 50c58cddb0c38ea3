"""Carries out a plan: every launch that is not done yet, in its order, each tried at most twice.

Must not look into a record beyond asking whether it is there.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from aorta.distributed.redaction import hide
from aorta.errors import EXIT_OK, SIGNAL_EXIT_BASE, RunIncomplete, ToolMissing
from aorta.experiments.launch_plan import Plan, PlannedLaunch
from aorta.experiments.launch_progress import LaunchProgress
from aorta.experiments.plan_folder import host, last_lines, log_file, put_aside, run_of
from aorta.experiments.plan_journal import CLOSE, DONE, END, FAILED, LOST, OPEN, START, STOPPED, PlanJournal
from aorta.experiments.process import LaunchEnd, StopRequest, launch, launch_environment
from aorta.experiments.process_mark import end_marked

ATTEMPTS: Final = 2
"""A launch that failed is repeated once."""


@dataclass
class PlanResult:
    """How a plan ended.

    Attributes:
        failed: launch -> why, of those that are not done.
        stopped_by: 128 + n after signal n, otherwise None.
    """

    failed: dict[str, str] = field(default_factory=dict)
    stopped_by: int | None = None

    @property
    def exit_code(self) -> int:
        """0 when every launch is done."""
        if self.stopped_by is not None:
            return self.stopped_by
        return RunIncomplete.exit_code if self.failed else EXIT_OK


def run_plan(plan: Plan, journal: PlanJournal) -> PlanResult:
    """Launch what is not done yet. Signals end the launch that runs, and the plan."""
    journal.write(OPEN, host=host(), pid=os.getpid())
    _end_lost_launches(plan, journal)
    done = journal.done()
    missing = [one for one in plan.order() if run_of(plan.run_folder(one))[0] != done.get(one.name, "")]
    total = len(plan.sides) * plan.launches
    progress = LaunchProgress(total, total - len(missing), journal.seconds())
    runner = _Runner(plan, journal, progress)
    try:
        result = runner.run(missing)
    finally:
        progress.close()
    journal.write(CLOSE, exit_code=result.exit_code, failed=sorted(result.failed))
    return result


class _Runner:
    """One start of the command: its plan, its journal, what it shows, and the signal that stops it."""

    def __init__(self, plan: Plan, journal: PlanJournal, progress: LaunchProgress) -> None:
        self.plan, self.journal, self.progress = plan, journal, progress
        self.stop = StopRequest()

    def run(self, missing: list[PlannedLaunch]) -> PlanResult:
        """Try each launch until it is done, at most `ATTEMPTS` times; no more once a signal has come."""
        result = PlanResult()
        with self.stop.on_signals():
            for one in missing:
                for attempt in range(ATTEMPTS):
                    if self.stop.signal is not None:
                        break
                    why = self._attempt(one, attempt)
                    if why is None:
                        result.failed.pop(one.name, None)
                        break
                    result.failed[one.name] = why
                if self.stop.signal is not None:
                    result.stopped_by = SIGNAL_EXIT_BASE + self.stop.signal
                    break
        return result

    def _attempt(self, one: PlannedLaunch, attempt: int) -> str | None:
        """Launch once; returns None, or why it is not done."""
        put_aside(self.plan, one, LOST)  # what an unknown hand left: a run needs an empty folder
        command = self.plan.command(one)
        about: dict[str, Any] = {"id": secrets.token_hex(8), "launch": one.name, "order": one.order, "attempt": attempt}
        log = log_file(self.plan, one, self.journal.starts_of(one.name))

        # Before the process is made: a runner that is killed now leaves word of what to look for.
        self.journal.write(START, **about, command=hide(command), log=str(log.relative_to(self.plan.output)))
        self.progress.started(one.name)
        ended = self._launch(one, command, about["id"], log)
        run_id, missing = run_of(self.plan.run_folder(one))
        outcome, why = self._outcome(ended, missing)
        done = outcome == DONE
        self.journal.write(
            END,
            **about,
            outcome=outcome,
            exit_code=ended.exit_code,
            seconds=round(ended.seconds, 3),
            run_id=run_id if done else None,
            reason=why,
            kept=None if done else put_aside(self.plan, one, outcome),
            left_behind=ended.left_behind,
            last_lines=[] if done else last_lines(log),
        )
        self.progress.ended(one.name, ended.seconds, why or outcome, counts=done)
        return None if why is None else f"{why} ({log})"

    def _launch(self, one: PlannedLaunch, command: list[str], id_: str, log: Path) -> LaunchEnd:
        """A program that is not there is a launch that failed, as it would be in a shell."""
        try:
            return launch(
                command,
                id_=id_,
                environment={**launch_environment(), **one.side.environment},
                stop=self.stop,
                folder=self.plan.folder,
                log=log,
                timeout_s=self.plan.timeout_s,
                tick=self.progress.tick,
            )
        except ToolMissing as error:
            log.write_text(f"{error}\n", encoding="utf-8")
            return LaunchEnd(error.exit_code, 0.0, timed_out=False, left_behind=0)

    def _outcome(self, ended: LaunchEnd, missing: str | None) -> tuple[str, str | None]:
        """Outcome, and why it is not `done`. A launch that was complete before a signal could end it counts."""
        if ended.exit_code == EXIT_OK and missing is None and not ended.timed_out:
            return DONE, None
        if self.stop.signal is not None:
            return STOPPED, f"stopped by {self.stop.signal.name}"
        if ended.timed_out:
            return FAILED, f"ended after timeout_s={self.plan.timeout_s:g}"
        if ended.exit_code != EXIT_OK:
            return FAILED, f"failed with exit code {ended.exit_code}"
        return FAILED, f"failed: exit code 0, but {missing}"


def _end_lost_launches(plan: Plan, journal: PlanJournal) -> None:
    """End what a killed runner left of a launch: its processes are ended, its folder is put aside."""
    launches = {one.name: one for one in plan.order()}
    for event in journal.open_starts():
        launch = launches.get(event["launch"])
        left_behind = end_marked(event["id"])
        journal.write(
            END,
            **{name: event[name] for name in ("id", "launch", "order", "attempt")},
            outcome=LOST,
            exit_code=None,
            seconds=None,
            run_id=None,
            reason="the runner was gone before the launch ended",
            kept=None if launch is None else put_aside(plan, launch, LOST),
            left_behind=left_behind,
            last_lines=[],
        )
