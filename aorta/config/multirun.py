"""Hydra's side of `python train.py -m`: composes and checks the jobs of a sweep, and passes them on to be started.

`aorta.experiments.sweep_launcher` starts them; each job's result is returned to Hydra's sweeper.

Must not start a process, or start anything before every job of the first batch has been validated.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from aorta.config import schema
from aorta.config.resolve import Resolved, environment_number, resolve
from aorta.errors import ConfigError

PLUGIN_MODULE: Final = "hydra_plugins.aorta"
"""Hydra accepts plugins only below `hydra_plugins`; `register_plugin` creates this module in memory."""


def register_plugin(group: str, name: str, plugin: type[Any], schema: type[Any]) -> None:
    """Make `GROUP=NAME` select a plugin, whose `__module__` must be `PLUGIN_MODULE`.

    Args:
        group, name: of Hydra's configuration, e.g. `hydra/launcher` and `torchrun`.
        plugin: a launcher or sweeper class.
        schema: the dataclass of its settings.
    """
    plugins = Plugins.instance()  # scans installed plugins before our module exists
    above, _, last = PLUGIN_MODULE.rpartition(".")
    try:
        parent = importlib.import_module(above)
    except ImportError:
        parent = sys.modules[above] = ModuleType(above)
        parent.__path__ = []
    module = sys.modules.setdefault(PLUGIN_MODULE, ModuleType(PLUGIN_MODULE))
    setattr(parent, last, module)
    setattr(module, plugin.__name__, plugin)
    plugins.register(plugin)
    ConfigStore.instance().store(group=group, name=name, node=schema, provider="aorta")


LAUNCHER: Final = "torchrun"
UNNAMED: Final = "sweep"
"""The folder name of a sweep without a label."""
INSIDE_TORCHRUN: Final = (
    "--multirun inside torchrun: each rank would sweep for itself, and they would wait for each other for ever; start "
    "the sweep with python train.py -m, which starts one torchrun a job (hydra.launcher.nproc=N)"
)


@dataclass
class TorchrunConf:
    """`hydra.launcher` of a sweep. Each job is a launch of its own, one after another."""

    _target_: str = f"{PLUGIN_MODULE}.TorchrunLauncher"
    # ranks of each job: 1 = python train.py, more = torchrun --standalone --nproc_per_node N train.py
    nproc: int = 1
    # start jobs with this program in place of those; the words of the job are appended. nproc = how many ranks it makes
    command: list[str] | None = None
    # the result of a job, for sweepers that optimise: this metric's median over the steps of its ranks
    metric: str = "overlap_ratio"
    # seconds after which a job is stopped and has failed; null = none
    timeout_s: float | None = None
    # take up the sweep in this folder: jobs that are done there are not run again
    resume: bool = False


@dataclass(frozen=True)
class SweepJob:
    """One point of a sweep. `refused` says why it cannot be run; `resolved` is None then."""

    number: int
    words: tuple[str, ...]
    resolved: Resolved | None
    refused: str | None = None


@dataclass(frozen=True)
class SweepBatch:
    """Jobs to be started one after another. `words` are the sweep's own arguments, `folder` is absolute."""

    jobs: tuple[SweepJob, ...]
    folder: Path
    options: TorchrunConf
    words: tuple[str, ...]


class SweepStopped(Exception):
    """A signal ended the sweep; `exit_code` is 128 + its number."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"stopped with exit code {exit_code}")
        self.exit_code = exit_code


class HydraTask:
    """The task function that Hydra runs: stores the configuration of a single run, or passes on the batches of a sweep.

    Args:
        start: starts the jobs of a batch, one after another; returns the result of each, NaN where there is none, or
            raises `SweepStopped`.
    """

    def __init__(self, start: Callable[[SweepBatch], list[float]]) -> None:
        self._start = start
        self.composed: list[DictConfig] = []
        self.batches = 0

    def __call__(self, config: DictConfig) -> None:
        """Run a single job, for Hydra.

        Raises:
            ConfigError: another Hydra launcher calls it for a job of a sweep, whose jobs must be separate launches.
        """
        if not OmegaConf.is_missing(HydraConfig.get().job, "num"):
            chosen = HydraConfig.get().runtime.choices["hydra/launcher"]
            raise ConfigError(
                f"hydra/launcher={chosen}: the jobs of a sweep are started by hydra/launcher={LAUNCHER}; a program "
                "that starts them elsewhere goes into hydra.launcher.command"
            )
        self.composed.append(config)

    def launch(self, batch: SweepBatch) -> list[float]:
        """Run the jobs of a sweep, for Hydra's launcher."""
        self.batches += 1
        return self._start(batch)


class TorchrunLauncher(Launcher):
    """Hydra's launcher `torchrun`: checks jobs, passes them on, returns their results.

    A job that failed returns NaN, which optimising sweepers treat as a failed trial, and the sweep continues. Arguments
    are those of `TorchrunConf`.
    """

    def __init__(self, **settings: Any) -> None:
        options = self._options = TorchrunConf(**settings)
        if options.nproc < 1:
            raise ConfigError(f"hydra.launcher.nproc={options.nproc}: must be at least 1")
        if options.timeout_s is not None and not options.timeout_s > 0:
            raise ConfigError(f"hydra.launcher.timeout_s={options.timeout_s}: must be greater than 0, or null")
        if options.command is not None:
            options.command = list(options.command)
            if not options.command:
                raise ConfigError("hydra.launcher.command=[]: name a program, or null")

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Prepare a sweep, once, before the sweeper parses its arguments.

        Raises:
            ConfigError: inside torchrun.
        """
        if environment_number("WORLD_SIZE", 1) > 1:
            raise ConfigError(INSIDE_TORCHRUN)
        self._context, self._task, self._config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        """Check a batch and run it.

        Raises:
            ConfigError: a job of the first batch cannot be run. In later batches, which an optimiser makes, it counts
                as failed.
        """
        if not isinstance(self._task, HydraTask):
            raise ConfigError(f"hydra/launcher={LAUNCHER} runs AORTA's train.py only")
        jobs = [self._job(initial_job_idx + place, list(words)) for place, words in enumerate(job_overrides)]
        refused = [job for job in jobs if job.refused is not None]
        if refused and not self._task.batches:
            raise ConfigError("\n".join(f"job {job.number} ({' '.join(job.words)}): {job.refused}" for job in refused))
        folder = Path(str(self._config.hydra.sweep.dir)).absolute()
        words = tuple(map(str, self._config.hydra.overrides.task))
        values = self._task.launch(SweepBatch(tuple(jobs), folder, self._options, words))
        return [_returned(job, value) for job, value in zip(jobs, values, strict=True)]

    def _job(self, number: int, words: list[str]) -> SweepJob:
        config = self._context.config_loader.load_sweep_config(self._config, words)
        with open_dict(config):
            del config["hydra"]
        try:
            return SweepJob(number, tuple(words), resolve(config, self._options.nproc))
        except ConfigError as error:
            return SweepJob(number, tuple(words), None, str(error))


TorchrunLauncher.__module__ = PLUGIN_MODULE


def register() -> None:
    """Register with Hydra everything that `default.yaml` names: the schemas, the launcher, the name of a sweep's
    folder.
    """
    schema.register()
    OmegaConf.register_new_resolver("aorta.sweep_name", lambda label: label or UNNAMED, replace=True)
    register_plugin("hydra/launcher", LAUNCHER, TorchrunLauncher, TorchrunConf)


def _returned(job: SweepJob, value: float) -> JobReturn:
    result = JobReturn(overrides=list(job.words), status=JobStatus.COMPLETED)
    result.return_value = value
    return result
