"""Starts the jobs of a sweep: one launch each, one after another, each into a folder of its own, with a journal.

Hydra's side of a sweep is `aorta.config.multirun`: it composes and checks the jobs that are started here.

Must not let one job's failure end the sweep, or leave a process behind.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from hydra.core.override_parser.overrides_parser import OverridesParser

from aorta.command_line import rounded_time, to_stderr
from aorta.config.multirun import SweepBatch, SweepJob, SweepStopped, TorchrunConf
from aorta.config.override_words import quoted
from aorta.errors import EXIT_OK, SIGNAL_EXIT_BASE, ConfigError, InputError, RunIncomplete
from aorta.experiments.process import LaunchEnd, StopRequest, launch, launch_environment
from aorta.experiments.run_medians import check_metric, read_medians
from aorta.experiments.sweep_folder import launch_id, make_room, take_up
from aorta.experiments.sweep_journal import (
    JOURNAL_VERSION,
    SWEEP_FILE,
    JobEnded,
    JobHistory,
    JobPlanned,
    SweepJournal,
    SweepRequest,
    job_name,
)

PLACING_KEYS: Final = ("label", "training.output_dir")
"""Keys by which the sweep puts each job into its folder."""


class TorchrunJobs:
    """Starts the jobs of one sweep.

    Args:
        program: what follows the interpreter or torchrun (`training_program`).
        options: words that every job gets first (`--config-dir=...`).
    """

    def __init__(self, program: Sequence[str], options: Sequence[str]) -> None:
        self._program, self._options = list(program), list(options)
        self._journal: SweepJournal | None = None
        self._folder = Path()
        self._before: dict[str, JobHistory] = {}
        self._jobs = 0
        self._failed: list[str] = []

    def launch(self, batch: SweepBatch) -> list[float]:
        """Start the jobs of a batch, one after another.

        Returns:
            Of each job the median of the sweep's metric; NaN where there is none.

        Raises:
            ConfigError: nothing was started: the folder holds something else, or a word cannot be swept over.
            RecordWriteError: the journal cannot be written. ToolMissing: `hydra.launcher.command` is not there.
            SweepStopped: a signal ended the sweep; the job of the moment ended first.
        """
        words = [_without_placing_keys(job) for job in batch.jobs]
        if self._journal is None:
            self._journal = self._open(batch)
        before = [self._done_before(job) for job in batch.jobs]
        missing = [job for job, there in zip(batch.jobs, before, strict=True) if there is None]
        self._journal.write(*(JobPlanned(job_name(job.number), list(job.words)) for job in missing))
        values = []
        stop = StopRequest()
        with stop.on_signals():
            for place, (job, own, there) in enumerate(zip(batch.jobs, words, before, strict=True), 1):
                self._jobs += 1
                ended = there or self._one(job, own, batch.options, stop)
                if there is None:
                    self._journal.write(ended)
                    _say_left(ended, sum(one is None for one in before[place:]))
                values.append(math.nan if ended.value is None else ended.value)
                if stop.signal is not None:
                    to_stderr(f"sweep stopped by {stop.signal.name} in job {ended.job}")
                    raise SweepStopped(SIGNAL_EXIT_BASE + stop.signal)
        return values

    def finish(self) -> int:
        """Exit code 0.

        Raises:
            RunIncomplete: names the jobs that failed.
        """
        to_stderr(f"{self._jobs} job(s) in {self._folder}; aorta sweep {self._folder}")
        if self._failed:
            raise RunIncomplete(f"{len(self._failed)} of {self._jobs} jobs failed: {'; '.join(self._failed)}")
        return EXIT_OK

    def _open(self, batch: SweepBatch) -> SweepJournal:
        _check(batch)
        self._folder, options = batch.folder, batch.options
        asked = SweepRequest(
            journal_version=JOURNAL_VERSION,
            started=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            words=list(batch.words),
            options=self._options,
            nproc=options.nproc,
            command=self._command(options),
            metric=options.metric,
        )
        resumed = options.resume and (self._folder / SWEEP_FILE).exists()
        if not resumed:
            make_room(self._folder)
        journal = SweepJournal(self._folder)
        if resumed:
            self._before = take_up(self._folder, asked)
        else:
            journal.write(asked)
        return journal

    def _done_before(self, job: SweepJob) -> JobEnded | None:
        """How a job ended that is done and need not run again.

        Raises:
            ConfigError: the job of that number was another one.
        """
        name = job_name(job.number)
        there = self._before.get(name)
        if there is not None and there.words != job.words:
            raise ConfigError(
                f"hydra.launcher.resume: job {name} of {self._folder} was {' '.join(there.words)}, and is "
                f"{' '.join(job.words)} now; give what was given there, or another label=NAME"
            )
        if there is None or there.ended is None or there.status != "done":
            return None
        return there.ended if read_medians(self._folder / name).readable else None

    def _command(self, options: TorchrunConf) -> list[str]:
        if options.command is not None:
            return options.command
        if options.nproc == 1:
            return [sys.executable, *self._program]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*torchrun, "--nproc_per_node", str(options.nproc), *self._program]

    def _one(self, job: SweepJob, own: list[str], options: TorchrunConf, stop: StopRequest) -> JobEnded:
        name = job_name(job.number)
        said = " ".join(job.words)
        if job.refused is not None:
            self._failed.append(f"{name} ({said}): {job.refused}")
            return JobEnded(name, "refused", None, 0.0, None, job.refused)
        to_stderr(f"job {name}: {said}")
        folder = [quoted("training.output_dir", str(self._folder)), quoted("label", name)]
        words = [*self._options, *own, *folder, "hydra.mode=RUN"]
        ended = launch(
            [*self._command(options), *words],
            id_=launch_id(self._folder, name),
            environment=launch_environment(),
            stop=stop,
            timeout_s=options.timeout_s,
        )
        if ended.left_behind:
            to_stderr(f"job {name} left {ended.left_behind} process(es), which were ended")
        if stop.signal is not None:
            return JobEnded(name, "stopped", ended.exit_code, ended.seconds, None, f"stopped by {stop.signal.name}")
        if ended.exit_code != EXIT_OK:
            why = f"not done after {options.timeout_s} s" if ended.timed_out else f"exit code {ended.exit_code}"
            self._failed.append(f"{name} ({said}): {why}")
            to_stderr(f"job {name} failed: {why}; the sweep goes on")
            return JobEnded(name, "failed", ended.exit_code, ended.seconds, None, why)
        return self._done(name, ended, options.metric)

    def _done(self, name: str, ended: LaunchEnd, metric: str) -> JobEnded:
        result = read_medians(self._folder / name)
        value, reason = result.of(metric)
        if not result.readable:  # it says that it ran, and left nothing to read
            self._failed.append(f"{name}: {result.problem}")
            return JobEnded(name, "failed", ended.exit_code, ended.seconds, None, result.problem)
        to_stderr(f"job {name}: {metric} = {f'unknown ({reason})' if value is None else f'{value:.6g}'}")
        return JobEnded(name, "done", ended.exit_code, ended.seconds, value, reason)


def _without_placing_keys(job: SweepJob) -> list[str]:
    """The job's words but for those that say where it writes: the sweep's folder was made from them."""
    parsed = OverridesParser.create().parse_overrides(list(job.words))
    return [word for word, override in zip(job.words, parsed, strict=True) if override.key_or_group not in PLACING_KEYS]


def _check(batch: SweepBatch) -> None:
    """Raises:
    ConfigError: a sweep over what names its folder, or for a metric that no run has.
    """
    try:
        check_metric(batch.options.metric, "hydra.launcher.metric")
    except InputError as error:
        raise ConfigError(str(error)) from None
    for key in PLACING_KEYS:
        values = {word for job in batch.jobs for word in job.words if word.lstrip("+").startswith(f"{key}=")}
        if len(values) > 1:
            raise ConfigError(
                f"{', '.join(sorted(values))}: {key} says where the sweep writes and cannot be swept over; its jobs "
                "are numbered"
            )


def _say_left(ended: JobEnded, left: int) -> None:
    """How many jobs of a batch are left to run, and about how long they take if each lasts as long as the last."""
    if left and ended.status == "done":
        to_stderr(f"{left} job{'s' if left > 1 else ''} left, about {rounded_time(left * ended.seconds)}")
