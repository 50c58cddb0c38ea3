"""`hydra/sweeper=optuna`: Optuna proposes the next job of a sweep from the results of those before it.

Of the sweep's words those with `interval(a,b)`, `int(interval(a,b))`, `tag(log,interval(a,b))`, `range(a,b,c)` or
`a,b,c` vary. Each trial is one job; `optimization_results.yaml` has the best so far.

Must not import Optuna before it is asked for, or know how a job is started.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from aorta.analysis.metrics import metric_named
from aorta.config.multirun import PLUGIN_MODULE, register_plugin
from aorta.errors import ConfigError, ToolMissing
from aorta.installation import install_command

if TYPE_CHECKING:
    import optuna

    Suggest: TypeAlias = Callable[[optuna.Trial], str]

RESULTS: Final = "optimization_results.yaml"
SAMPLERS: Final = {"tpe": "TPESampler", "random": "RandomSampler", "gp": "GPSampler"}
DIRECTIONS: Final = ("minimize", "maximize")
_OF_BETTER: Final = {"lower": "minimize", "higher": "maximize"}


@dataclass
class OptunaConf:
    """`hydra.sweeper` of `hydra/sweeper=optuna`."""

    _target_: str = f"{PLUGIN_MODULE}.OptunaSweeper"
    # jobs
    n_trials: int = 20
    # minimize or maximize; null = the better direction of hydra.launcher.metric
    direction: str | None = None
    # tpe, random or gp (which needs torch and scipy)
    sampler: str = "tpe"
    # of the sampler: the same results lead to the same proposals
    seed: int = 42
    # where the study is kept, for instance sqlite:///study.db (needs the package sqlalchemy); null = in memory
    storage: str | None = None
    # its name there; a study that is there is continued
    study_name: str | None = None


class OptunaSweeper(Sweeper):
    """Asks Optuna, launches, tells Optuna. Arguments are those of `OptunaConf`."""

    def __init__(
        self,
        n_trials: int,
        direction: str | None,
        sampler: str,
        seed: int,
        storage: str | None,
        study_name: str | None,
    ) -> None:
        if n_trials < 1:
            raise ConfigError(f"hydra.sweeper.n_trials={n_trials}: must be at least 1")
        if sampler not in SAMPLERS:
            raise ConfigError(f"hydra.sweeper.sampler={sampler}: must be one of {', '.join(SAMPLERS)}")
        if direction is not None and direction not in DIRECTIONS:
            raise ConfigError(f"hydra.sweeper.direction={direction}: must be one of {', '.join(DIRECTIONS)}, or null")
        self._n_trials, self._direction, self._seed = n_trials, direction, seed
        self._sampler, self._storage, self._study_name = sampler, storage, study_name

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Prepare, for Hydra, which calls it once."""
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run the trials.

        Raises:
            ConfigError: nothing varies, or what varies is no space. ToolMissing: Optuna is not installed.
        """
        assert self.config is not None
        assert self.launcher is not None
        assert self.hydra_context is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        overrides = parser.parse_overrides(arguments)
        fixed = [f"{each.get_key_element()}={each.get_value_element_as_str()}" for each in overrides if _fixed(each)]
        space = {each.get_key_element(): suggestion(each) for each in overrides if not _fixed(each)}
        if not space:
            raise ConfigError("hydra/sweeper=optuna: nothing varies; give a key a space, as in 'KEY=interval(1,25)'")
        metric = str(self.config.hydra.launcher.metric)
        study = self._study(metric)
        for number in range(self._n_trials):
            trial = study.ask()
            words = [*fixed, *(f"{key}={suggest(trial)}" for key, suggest in space.items())]
            (returned,) = self.launcher.launch([words], initial_job_idx=number)
            value = float(returned.return_value)
            if math.isnan(value):  # failed, or the metric is null
                study.tell(trial, state=_optuna().trial.TrialState.FAIL)
            else:
                study.tell(trial, value)
            self._write(study, metric)

    def _study(self, metric: str) -> optuna.Study:
        direction = self._direction or _OF_BETTER.get(metric_named(metric).better or "")
        if direction is None:
            raise ConfigError(f"{metric}: neither direction is good in itself; set hydra.sweeper.direction=minimize")
        library = _optuna()
        library.logging.set_verbosity(library.logging.WARNING)
        sampler = getattr(library.samplers, SAMPLERS[self._sampler])(seed=self._seed)
        try:
            study: optuna.Study = library.create_study(
                storage=self._storage,
                sampler=sampler,
                study_name=self._study_name,
                direction=direction,
                load_if_exists=self._study_name is not None,
            )
        except Exception as error:  # the storages' own, which share no base
            raise ConfigError(f"hydra.sweeper.storage={self._storage}: no study there: {error}") from error
        return study

    def _write(self, study: optuna.Study, metric: str) -> None:
        """Write the best so far, after each trial: a sweep that is stopped has it."""
        assert self.config is not None
        done = [trial for trial in study.trials if trial.value is not None]
        best = study.best_trial if done else None
        results: dict[str, Any] = {
            "name": "optuna",
            "metric": metric,
            "direction": study.direction.name.lower(),
            "trials": len(study.trials),
            "trials_failed": len(study.trials) - len(done),
            "best_params": None if best is None else dict(best.params),
            "best_value": None if best is None else best.value,
        }
        folder = Path(str(self.config.hydra.sweep.dir))
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(OmegaConf.create(results), folder / RESULTS)


OptunaSweeper.__module__ = PLUGIN_MODULE


def register() -> None:
    """Make `hydra/sweeper=optuna` known."""
    register_plugin("hydra/sweeper", "optuna", OptunaSweeper, OptunaConf)


def suggestion(override: Override) -> Suggest:
    """Return a function that asks a trial for a value of one word's space, as that word's right-hand side.

    Raises:
        ConfigError: an empty or one-sided space.
    """
    key, space = override.get_key_element(), override.value()
    if override.is_choice_sweep():
        values = list(override.sweep_string_iterator())
        return lambda trial: str(trial.suggest_categorical(key, values))
    if isinstance(space, RangeSweep):
        points = [cast("float", point) for point in override.sweep_iterator()]
        if not points:
            raise ConfigError(f"{override.input_line}: an empty range")
        low, high, step = points[0], points[-1], space.step
        return _number(key, min(low, high), max(low, high), abs(step), log=False)
    assert isinstance(space, IntervalSweep)
    if space.start is None or space.end is None or not space.start < space.end:
        raise ConfigError(f"{override.input_line}: an interval goes from a smaller number to a larger one")
    log = "log" in space.tags
    if log and space.start <= 0:
        raise ConfigError(f"{override.input_line}: a logarithmic interval begins above 0")
    return _number(key, space.start, space.end, None, log=log)


def _number(key: str, low: float, high: float, step: float | None, *, log: bool) -> Suggest:
    if isinstance(low, int) and isinstance(high, int) and not isinstance(step, float):
        whole = 1 if step is None else int(step)
        return lambda trial: str(trial.suggest_int(key, low, high, step=whole, log=log))
    return lambda trial: repr(trial.suggest_float(key, low, high, step=step, log=log))


def _fixed(override: Override) -> bool:
    return not override.is_sweep_override()


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ToolMissing(f"hydra/sweeper=optuna needs Optuna: {install_command('optuna')}") from error
    return optuna
