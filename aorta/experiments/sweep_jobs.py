"""Starts the jobs of a sweep (`aorta train -m KEY=A,B`): a launch each, one after another, each in a folder of its own.

    artifacts/sizes/         the sweep: label=NAME names it, otherwise it is artifacts/sweep/
      sweep.jsonl            a line for each job that has ended
      00/  01/  02/  ...     one run folder a job
      multirun.yaml          Hydra's own settings

Hydra composes the jobs (`aorta.train_command`), and `aorta report artifacts/sizes` prints the table. Must not let one
job's failure end the sweep, or leave a process behind.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from hydra.core.override_parser.overrides_parser import OverridesParser

from aorta.analysis.load.engines import Local
from aorta.analysis.report.launch_table import SWEEP_FILE, SweptJob
from aorta.command_line import to_stderr
from aorta.config.override_words import quoted
from aorta.errors import EXIT_OK, SIGNAL_EXIT_BASE, ConfigError, InputError, RunIncomplete
from aorta.experiments.journal import Journal
from aorta.experiments.launch_engine import attempt
from aorta.experiments.launch_folder import run_of
from aorta.experiments.launch_medians import medians_of
from aorta.experiments.process import StopRequest

RESULT: Final = "job_step_ms"
"""What a job returns to Hydra's sweeper: the median of this metric."""
_PLACING_KEYS: Final = ("label", "training.output_dir")
"""Keys by which the sweep puts each job into its folder."""


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
            found = attempt(
                [*self._command, *own, *placed, "hydra.mode=RUN"],
                id_=str(folder / name),  # no two launches of one machine write to one folder at a time
                stop=self._stop,
                missing=lambda: run_of(folder / name)[1],
                timeout_s=None,
            )
        self._journal.write(SweptJob(name, list(words), found.exit_code, round(found.seconds, 3), found.reason))
        if found.reason is not None:
            self._failed.append(f"{name} ({' '.join(words)}): {found.reason}")
            to_stderr(f"job {name}: {found.sentence}")
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
