"""Starts the jobs of a sweep: one launch each, one after another, each into a folder of its own, with a journal.

Hydra's side of a sweep is `aorta.config.multirun`: it composes and checks the jobs that are started here.

Must not let one job's failure end the sweep, or leave a process behind.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Final

from hydra.core.override_parser.overrides_parser import OverridesParser

from aorta.command_line import rounded_time, to_stderr
from aorta.config.multirun import SweepBatch, SweepJob, SweepStopped, TorchrunConf
from aorta.config.override_words import quoted
from aorta.errors import EXIT_OK, ConfigError, InputError, RunIncomplete
from aorta.experiments.journal import (
    FAILED,
    SWEEP_FILE,
    SWEEP_VERSION,
    JobEnded,
    JobHistory,
    JobPlanned,
    Journal,
    SweepRequest,
    job_name,
    sweep_journal,
)
from aorta.experiments.launch_engine import attempt, run_all
from aorta.experiments.launch_folder import launch_id, move_earlier_sweep, take_up
from aorta.experiments.launch_medians import check_metric, read_medians
from aorta.experiments.process import StopRequest

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
        self._journal: Journal | None = None
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
        for job in batch.jobs:
            _without_placing_keys(job)  # a word that cannot be read
        if self._journal is None:
            self._journal = self._open(batch)
        jobs = {job_name(job.number): job for job in batch.jobs}
        ended = {name: end for name, job in jobs.items() if (end := self._done_before(name, job)) is not None}
        missing = [name for name in jobs if name not in ended]
        self._journal.write(*(JobPlanned(name, list(jobs[name].words)) for name in missing))
        stop = StopRequest()

        def once(name: str, _attempt: int) -> str | None:
            end = ended[name] = self._one(jobs[name], batch.options, stop)
            assert self._journal is not None
            self._journal.write(end)
            _log_remaining(end, sum(each not in ended for each in missing))
            return None if end.status == "done" else f"{name} ({' '.join(jobs[name].words)}): {end.reason}"

        result = run_all(missing, once, stop, attempts=1)
        self._jobs += len(jobs)
        self._failed += result.failed.values()
        if result.stopped_by is not None:
            assert stop.signal is not None
            last = next((name for name in reversed(missing) if name in ended), missing[0])
            to_stderr(f"sweep stopped by {stop.signal.name} in job {last}")
            raise SweepStopped(result.stopped_by)
        values = [ended[name].value for name in jobs]
        return [math.nan if value is None else value for value in values]

    def finish(self) -> int:
        """Exit code 0.

        Raises:
            RunIncomplete: names the jobs that failed.
        """
        to_stderr(f"{self._jobs} job(s) in {self._folder}; aorta sweep {self._folder}")
        if self._failed:
            raise RunIncomplete(f"{len(self._failed)} of {self._jobs} jobs failed: {'; '.join(self._failed)}")
        return EXIT_OK

    def _open(self, batch: SweepBatch) -> Journal:
        _check(batch)
        self._folder, options = batch.folder, batch.options
        asked = SweepRequest(
            journal_version=SWEEP_VERSION,
            started=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            words=list(batch.words),
            options=self._options,
            nproc=options.nproc,
            command=self._command(options),
            metric=options.metric,
        )
        resumed = options.resume and (self._folder / SWEEP_FILE).exists()
        if not resumed:
            move_earlier_sweep(self._folder)
        journal = sweep_journal(self._folder)
        if resumed:
            self._before = take_up(self._folder, asked)
        else:
            journal.write(asked)
        return journal

    def _done_before(self, name: str, job: SweepJob) -> JobEnded | None:
        """Return how a job ended that is done and need not run again.

        Raises:
            ConfigError: the job of that number was another one.
        """
        earlier = self._before.get(name)
        if earlier is not None and earlier.words != job.words:
            raise ConfigError(
                f"hydra.launcher.resume: job {name} of {self._folder} was {' '.join(earlier.words)}, and is "
                f"{' '.join(job.words)} now; give what was given there, or another label=NAME"
            )
        if earlier is None or earlier.ended is None or earlier.status != "done":
            return None
        return earlier.ended if read_medians(self._folder / name).readable else None

    def _command(self, options: TorchrunConf) -> list[str]:
        if options.command is not None:
            return options.command
        if options.nproc == 1:
            return [sys.executable, *self._program]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*torchrun, "--nproc_per_node", str(options.nproc), *self._program]

    def _one(self, job: SweepJob, options: TorchrunConf, stop: StopRequest) -> JobEnded:
        name = job_name(job.number)
        if job.refused is not None:
            return JobEnded(name, "refused", None, 0.0, None, job.refused)
        to_stderr(f"job {name}: {' '.join(job.words)}")
        medians = cache(partial(read_medians, self._folder / name))
        placed = [quoted("training.output_dir", str(self._folder)), quoted("label", name)]
        words = [*self._options, *_without_placing_keys(job), *placed, "hydra.mode=RUN"]
        found = attempt(
            [*self._command(options), *words],
            id_=launch_id(self._folder, name),
            stop=stop,
            missing=lambda: None if medians().readable else medians().problem,
            timeout_s=options.timeout_s,
        )
        if found.left_behind:
            to_stderr(f"job {name} left {found.left_behind} process(es), which were ended")
        if found.status != "done":
            if found.status == FAILED:
                to_stderr(f"job {name} failed: {found.reason}; the sweep goes on")
            return JobEnded(name, found.status, found.exit_code, found.seconds, None, found.reason)
        value, reason = medians().of(options.metric)
        to_stderr(f"job {name}: {options.metric} = {f'unknown ({reason})' if value is None else f'{value:.6g}'}")
        return JobEnded(name, "done", found.exit_code, found.seconds, value, reason)


def _without_placing_keys(job: SweepJob) -> list[str]:
    """Return the job's overrides but for those that say where it writes, which gave the sweep's folder."""
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


def _log_remaining(ended: JobEnded, left: int) -> None:
    """Say how many jobs of a batch are left to run, and about how long they take if each lasts as long as the last."""
    if left and ended.status == "done":
        to_stderr(f"{left} job{'s' if left > 1 else ''} left, about {rounded_time(left * ended.seconds)}")
