"""The engine behind plans and sweeps: starts launches one after another, and says what became of each.

`attempt` is one launch; `run_plan` goes through those of `aorta ab`, `SweepJobs` starts those of a sweep (`aorta train
-m KEY=A,B`), each in a folder of its own:

    artifacts/sizes/         the sweep: label=NAME names it, otherwise it is artifacts/sweep/
      sweep.jsonl            a line for each job that has ended
      00/  01/  02/  ...     one run folder a job
      multirun.yaml          Hydra's own settings

Hydra composes the jobs (`aorta.train_command`), and `aorta report artifacts/sizes` prints the table. Must not look into
a record of a plan beyond asking whether it is there, let one job's failure end a sweep, or leave a process behind.
"""

from __future__ import annotations

import math
import os
import secrets
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from tqdm import tqdm

from aorta.command_line import rounded_time, to_stderr, tolerate_closed_terminal
from aorta.errors import EXIT_OK, SIGNAL_EXIT_BASE, ConfigError, InputError, RunIncomplete, ToolMissing
from aorta.experiments.launch_folder import (
    DONE,
    FAILED,
    LOST,
    STOPPED,
    Closed,
    Ended,
    Journal,
    PlanOpened,
    Started,
    host,
    last_error,
    last_lines,
    now,
    put_aside,
    read_plan_history,
    run_of,
)
from aorta.experiments.launch_plan import Plan, PlannedLaunch
from aorta.experiments.process import StopRequest, end_marked, launch, launch_environment
from aorta.records.files import whole_file, write_whole
from aorta.records.run_files import MANIFEST_FILE
from aorta.redaction import hide, redact
from aorta.terminal_style import printable


@dataclass(frozen=True)
class Outcome:
    """What became of a launch; `reason`: why it is not done."""

    status: Literal["done", "failed", "stopped"]
    exit_code: int
    seconds: float
    reason: str | None
    left_behind: int

    @property
    def sentence(self) -> str:
        """`done`, `failed: exit code 7` or `stopped by SIGTERM`."""
        return f"failed: {self.reason}" if self.status == FAILED else self.reason or self.status


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
    variables = {**launch_environment(), **(environment or {})}
    ended = launch(command, id_=id_, environment=variables, stop=stop, timeout_s=timeout_s, **how)
    went_well = ended.exit_code == EXIT_OK and not ended.timed_out
    lacks = missing() if went_well else None
    status: Literal["done", "failed", "stopped"] = FAILED
    if went_well and lacks is None:
        status, why = DONE, None
    elif stop.signal is not None:
        status, why = STOPPED, f"stopped by {stop.signal.name}"
    else:
        why = f"not done after {timeout_s} s" if ended.timed_out else lacks or f"exit code {ended.exit_code}"
    return Outcome(status, ended.exit_code, ended.seconds, why, ended.left_behind)


def run_plan(plan: Plan, journal: Journal) -> int | None:
    """Launch what is not done yet, each launch at most twice. A signal ends the launch that runs, and the plan; so does
    the first launch of a side that fails: what is wrong with it would fail all the others.

    Returns:
        None when every launch is done, or 128 + n after signal n.

    Raises:
        ConfigError: the journal cannot be read. RecordWriteError: it cannot be written. RunIncomplete: names the
            launches that are missing.
    """
    history = read_plan_history(plan.output)
    journal.write(PlanOpened(now(), host(), os.getpid()))
    launches = list(plan.order())
    by_name = {one.name: one for one in launches}
    for start in history.lost:  # what a killed runner left: processes are ended, folders put aside
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
    missing = [one for one in launches if run_of(plan.run_folder(one))[0] != history.done.get(one.name, "")]
    progress = _Progress(len(launches), len(launches) - len(missing), history.seconds)
    stop = StopRequest()
    failed: dict[str, str] = {}
    ended_by = None
    with closing(progress), stop.on_signals():
        for one in missing:
            starts = sum(start.launch == one.name for start in history.starts)
            why = _launch(plan, one, 0, starts, journal, progress, stop)
            if why is not None and one.number > 0 and stop.signal is None:
                why = _launch(plan, one, 1, starts, journal, progress, stop)
            if why is not None:
                failed[one.name] = why
            if why is not None and one.number == 0:
                ended_by = one.name
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
    one: PlannedLaunch,
    number: int,
    starts: int,
    journal: Journal,
    progress: _Progress,
    stop: StopRequest,
) -> str | None:
    """Launch once, noted in the journal; returns None, or why it is not done. `starts`: of earlier runners."""
    put_aside(plan, one, LOST)  # what an unknown hand left: a run needs an empty folder
    command, id_, folder = plan.command(one), secrets.token_hex(8), plan.run_folder(one)
    again = f"-{starts + number + 1}" if starts + number else ""
    log = plan.output / "logs" / one.side.name / f"{one.number:02d}{again}.log"

    def lacking() -> str | None:
        lacks, hint = run_of(folder)[1], ""
        if lacks is None:
            return None
        if one.side.command is not None and not (folder / MANIFEST_FILE).exists():
            lacks = f"the command wrote no record to {folder}"
            hint = " (no optimizer of torch stepped, or AORTA could not record: see the log)"
            if any("{output}" in word for word in one.side.command):
                hint = " (give {output} to aorta.record; without {output} the command is recorded without a line)"
        return f"exit code 0, but {lacks}{hint}"

    # Before the process is made: a runner that is killed now leaves word of what to look for.
    of = id_, one.name, one.order, number
    journal.write(Started(now(), *of, hide(command), str(log.relative_to(plan.output))))
    progress.started(one.shown)
    try:
        outcome = attempt(
            command,
            id_=id_,
            stop=stop,
            missing=lacking,
            timeout_s=plan.timeout_s,
            environment=one.side.environment,
            folder=plan.folder,
            log=log,
            tick=progress.tick,
        )
    except ToolMissing as error:  # a launch that failed, as it would be in a shell
        write_whole(log, f"{error}\n")
        outcome = Outcome(FAILED, error.exit_code, 0.0, f"exit code {error.exit_code}", 0)
    with (
        log.open(encoding="utf-8", errors="surrogateescape", newline="") as said,
        whole_file(log) as part,
        part.open("w", encoding="utf-8", errors="surrogateescape", newline="") as shown,
    ):
        shown.writelines(map(redact, said))
    done = outcome.status == DONE
    journal.write(
        Ended(
            *(now(), *of),
            outcome=outcome.status,
            exit_code=outcome.exit_code,
            seconds=round(outcome.seconds, 3),
            run_id=run_of(folder)[0] if done else None,
            reason=outcome.reason,
            kept=None if done else put_aside(plan, one, outcome.status),
            left_behind=outcome.left_behind,
            last_lines=[] if done else last_lines(log),
        )
    )
    progress.ended(one.shown, outcome)
    return None if done else f"{outcome.sentence}: {last_error(log)} ({log})"


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

    def ended(self, name: str, outcome: Outcome) -> None:
        done = outcome.status == DONE
        if done:
            self._done += 1
            self._seconds.append(outcome.seconds)
        line = f"[{self._done}/{self._total}] {name}: {outcome.sentence} in {outcome.seconds:.1f} s"
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


RESULT: Final = "job_step_ms"
"""What a job of a sweep returns to Hydra's sweeper: the median of this metric."""
_PLACING_KEYS: Final = ("label", "training.output_dir")
"""Keys by which a sweep puts each job into its folder."""


class SweepJobs:
    """The jobs of one sweep.

    Args:
        program: what follows the interpreter or torchrun (`training_program`).
        options: words that every job gets first (`--config-dir=...`).
        ranks: of each job, as `torchrun --nproc_per_node` takes them; None: one process without torchrun.
    """

    def __init__(self, program: Sequence[str], options: Sequence[str], ranks: str | None) -> None:
        torchrun = ["-m", "aorta.distributed.torchrun", "--standalone", "--nproc_per_node", str(ranks)]
        self._command = [sys.executable, *([] if ranks is None else torchrun), *program, *options]
        self._journal: Journal | None = None
        self._failed: list[str] = []
        self._stop = StopRequest()
        self.count = 0

    def launch(self, words: Sequence[str], folder: Path) -> float:
        """Launch the next job; returns its median step time in milliseconds, NaN where there is none.

        Raises:
            ConfigError: the folder holds another sweep or a run, or a key that places jobs is swept.
            RecordWriteError: the journal cannot be written. ToolMissing: the interpreter is not there.
        """
        from hydra.core.override_parser.overrides_parser import OverridesParser

        from aorta.config.override_words import quoted
        from aorta.experiments.launch_medians import medians_of
        from aorta.read.engines import Local
        from aorta.report.launch_table import SWEEP_FILE, SweptJob

        if self._stop.signal is not None:
            return math.nan
        if self._journal is None:
            if (folder / SWEEP_FILE).exists() or any(folder.glob("[0-9][0-9]/")) or any(folder.glob("rank_*")):
                raise ConfigError(f"{folder}: holds an earlier sweep or a run; give this sweep another label=NAME")
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"{folder}: cannot be written: {error.strerror or error}") from error
            in_use = "another process runs a sweep there; give this one another label=NAME"
            self._journal = Journal(folder / SWEEP_FILE, in_use)
        name, self.count = f"{self.count:02d}", self.count + 1
        to_stderr(f"job {name}: {' '.join(words)}")
        parsed = zip(words, OverridesParser.create().parse_overrides(list(words)), strict=True)
        own = [word for word, override in parsed if override.key_or_group not in _PLACING_KEYS]
        placed = [quoted("training.output_dir", str(folder)), quoted("label", name)]
        with self._stop.on_signals():
            outcome = attempt(
                [*self._command, *own, *placed, "hydra.mode=RUN"],
                id_=str(folder / name),  # no two launches of one machine write to one folder at a time
                stop=self._stop,
                missing=lambda: run_of(folder / name)[1],
                timeout_s=None,
            )
        self._journal.write(SweptJob(name, list(words), outcome.exit_code, round(outcome.seconds, 3), outcome.reason))
        if outcome.reason is not None:
            self._failed.append(f"{name} ({' '.join(words)}): {outcome.reason}")
            to_stderr(f"job {name}: {outcome.sentence}")
            return math.nan
        try:
            value = medians_of(folder / name, Local(1))[0].get(RESULT)
        except InputError:  # the report says why
            value = None
        return math.nan if value is None else value

    def finish(self) -> int:
        """Return exit code 0, or 128 + n after signal n.

        Raises:
            RunIncomplete: names the jobs that failed.
        """
        if self._stop.signal is not None:
            to_stderr(f"sweep stopped by {self._stop.signal.name} in job {self.count - 1:02d}")
            return SIGNAL_EXIT_BASE + self._stop.signal
        assert self._journal is not None
        folder = self._journal.path.parent
        to_stderr(f"{self.count} job(s) in {folder}; aorta report {folder}")
        if self._failed:
            raise RunIncomplete(f"{len(self._failed)} of {self.count} jobs failed: {'; '.join(self._failed)}")
        return EXIT_OK
