"""Carries out a plan: every launch that is not done yet, in its order, each tried at most twice.

Must not look into a record beyond asking whether it is there.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from aorta.errors import EXIT_OK, SIGNAL_EXIT_BASE, RunIncomplete, ToolMissing
from aorta.experiments.launch_plan import Plan, PlannedLaunch
from aorta.experiments.launch_progress import LaunchProgress
from aorta.experiments.plan_folder import host, last_lines, log_file, put_aside, run_of
from aorta.experiments.plan_journal import CLOSE, DONE, END, FAILED, LOST, OPEN, START, STOPPED, PlanJournal
from aorta.experiments.process import LaunchEnd, StopRequest, launch, launch_environment
from aorta.experiments.process_mark import end_marked
from aorta.launch.hiding import hide

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
    _clear_lost(plan, journal)
    done = journal.done()
    missing = [one for one in plan.order() if run_of(plan.run_folder(one))[0] != done.get(one.name, "")]
    total = len(plan.sides) * plan.launches
    progress = LaunchProgress(total, total - len(missing), journal.seconds())
    result, stop = PlanResult(), StopRequest()
    try:
        with stop.on_signals():
            for one in missing:
                for attempt in range(ATTEMPTS):
                    if stop.signal is not None:
                        break
                    why = _attempt(plan, one, attempt, journal, stop, progress)
                    if why is None:
                        result.failed.pop(one.name, None)
                        break
                    result.failed[one.name] = why
                if stop.signal is not None:
                    result.stopped_by = SIGNAL_EXIT_BASE + stop.signal
                    break
    finally:
        progress.close()
    journal.write(CLOSE, exit_code=result.exit_code, failed=sorted(result.failed))
    return result


def _attempt(
    plan: Plan, one: PlannedLaunch, attempt: int, journal: PlanJournal, stop: StopRequest, progress: LaunchProgress
) -> str | None:
    """Launch once; returns None, or why it is not done."""
    put_aside(plan, one, LOST)  # what an unknown hand left: a run needs an empty folder
    command = plan.command(one)
    about: dict[str, Any] = {"id": secrets.token_hex(8), "launch": one.name, "order": one.order, "attempt": attempt}
    log = log_file(plan, one, journal.starts_of(one.name))

    # Before the process is made: a runner that is killed now leaves word of what to look for.
    journal.write(START, **about, command=hide(command), log=str(log.relative_to(plan.output)))
    progress.started(one.name)
    ended = _launched(plan, one, command, about["id"], log, stop, progress)
    run_id, missing = run_of(plan.run_folder(one))
    outcome, why = _judge(ended, missing, stop, plan.timeout_s)
    kept = None if outcome == DONE else put_aside(plan, one, outcome)
    journal.write(
        END,
        **about,
        outcome=outcome,
        exit_code=ended.exit_code,
        seconds=round(ended.seconds, 3),
        run_id=run_id if outcome == DONE else None,
        reason=why,
        kept=None if kept is None else str(kept.relative_to(plan.output)),
        left_behind=ended.left_behind,
        last_lines=[] if outcome == DONE else last_lines(log),
    )
    progress.ended(one.name, ended.seconds, why or outcome, counts=outcome == DONE)
    return None if why is None else f"{why} ({log})"


def _launched(
    plan: Plan, one: PlannedLaunch, command: list[str], id_: str, log: Path, stop: StopRequest, progress: LaunchProgress
) -> LaunchEnd:
    """A program that is not there is a launch that failed, as it would be in a shell."""
    try:
        return launch(
            command,
            id_=id_,
            environment={**launch_environment(), **one.side.environment},
            stop=stop,
            folder=plan.folder,
            log=log,
            timeout_s=plan.timeout_s,
            tick=progress.tick,
        )
    except ToolMissing as error:
        log.write_text(f"{error}\n", encoding="utf-8")
        return LaunchEnd(error.exit_code, 0.0, timed_out=False, left_behind=0)


def _judge(ended: LaunchEnd, missing: str | None, stop: StopRequest, timeout_s: float | None) -> tuple[str, str | None]:
    """Outcome, and why it is not `done`. A launch that was complete before a signal could end it counts."""
    if ended.exit_code == EXIT_OK and missing is None and not ended.timed_out:
        return DONE, None
    if stop.signal is not None:
        return STOPPED, f"stopped by {stop.signal.name}"
    if ended.timed_out:
        return FAILED, f"ended after timeout_s={timeout_s:g}"
    if ended.exit_code != EXIT_OK:
        return FAILED, f"failed with exit code {ended.exit_code}"
    return FAILED, f"failed: exit code 0, but {missing}"


def _clear_lost(plan: Plan, journal: PlanJournal) -> None:
    """What a runner left that was killed in the midst of a launch: processes are ended, the folder is put aside."""
    launches = {one.name: one for one in plan.order()}
    for event in journal.open_starts():
        left_behind = end_marked(event["id"])
        kept = put_aside(plan, launches[event["launch"]], LOST)
        journal.write(
            END,
            **{name: event[name] for name in ("id", "launch", "order", "attempt")},
            outcome=LOST,
            exit_code=None,
            seconds=None,
            run_id=None,
            reason="the runner was gone before the launch ended",
            kept=None if kept is None else str(kept.relative_to(plan.output)),
            left_behind=left_behind,
            last_lines=[],
        )
