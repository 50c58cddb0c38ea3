"""The loggers of AORTA: TensorBoard, Prometheus' text files, Weights & Biases, MLflow.

    problem = missing_client(["wandb"])     # None, or a sentence that ends with what to install
    logger = open_logger("tensorboard", place)

Each class is opened with a `Place` and imports its client when it is. W&B and MLflow are configured the way their users
know: by `WANDB_*` and `MLFLOW_*` in the environment. Must not touch a run of these tools that the caller has open, or
import a client only to know whether it is there.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from aorta.installation import install_command
from aorta.loggers import Logger
from aorta.records.run_files import PROMETHEUS_FILE, TENSORBOARD_DIR

PROJECT: Final = "aorta"
"""The W&B project and the MLflow experiment where the environment names none."""
_MLFLOW_BATCH: Final = 1000
"""Metrics that a server of MLflow takes at once."""
_FLUSH_S: Final = 10
"""Seconds after which TensorBoard can read a value; its own default, 120, is long for someone who looks on."""


@dataclass(frozen=True)
class Place:
    """What a logger is opened for.

    Attributes:
        folder: of the run or the report; files go there.
        name: of the run or the report, for people.
        facts: identity and settings, for tools that keep them.
        prometheus_dir: folder of node_exporter's textfile collector; None: `folder`.
        event_suffix: ends the names of TensorBoard's files.
    """

    folder: Path
    name: str
    facts: Mapping[str, str | int | float]
    prometheus_dir: Path | None = None
    event_suffix: str = ""


class TensorBoardLogger:
    """Event files in `<folder>/tensorboard/`, written by tensorboardX, which needs neither torch nor TensorBoard."""

    def __init__(self, place: Place) -> None:
        from tensorboardX import SummaryWriter

        folder = str(place.folder / TENSORBOARD_DIR)
        self._writer = SummaryWriter(folder, flush_secs=_FLUSH_S, filename_suffix=place.event_suffix)

    def log_step(self, step: int, values: Mapping[str, float]) -> None:
        """Log a point of each curve."""
        for name, value in values.items():
            self._writer.add_scalar(f"aorta/{name}", value, step)

    def log_summary(self, label: str, values: Mapping[str, float | str]) -> None:
        """Log each number as a point of a curve, the rest as text."""
        for name, value in values.items():
            if isinstance(value, str):
                self._writer.add_text(f"{label}/{name}", value, 0)
            else:
                self._writer.add_scalar(f"{label}/{name}", value, 0)

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()


class PrometheusLogger:
    """One file for node_exporter's textfile collector, `aorta_<name>.prom`, replaced at every call: gauges of the last
    step, or of a report. Units are Prometheus' own: `_ms` becomes seconds. Text is the label `value` of a gauge that
    is 1 and called `..._info`.
    """

    def __init__(self, place: Place) -> None:
        from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

        self._write = write_to_textfile
        self._gauge = Gauge
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        self._label = place.name
        self._running = False
        folder = place.prometheus_dir or place.folder
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / PROMETHEUS_FILE.format(name=place.name)

    def log_step(self, step: int, values: Mapping[str, float]) -> None:
        """Replace the file with the gauges of this step."""
        self._running = True
        for gauge in self._gauges.values():  # a value that this step does not have must not be that of another
            gauge.clear()
        self._set("running", 1, "whether the run is going on", label=self._label)
        self._set("global_step", step, "global step of the other gauges, on rank 0", label=self._label)
        for name, value in values.items():
            self._number(name, value, self._label)
        self._write(str(self.path), self._registry)

    def log_summary(self, label: str, values: Mapping[str, float | str]) -> None:
        """Replace the file with these gauges and those of earlier summaries."""
        for name, value in values.items():
            if isinstance(value, str):
                self._set(f"{_word(name)}_info", 1, name, label=label, value=value)
            else:
                self._number(name, value, label)
        self._write(str(self.path), self._registry)

    def close(self) -> None:
        """Say that the run is over; its last values stay."""
        if self._running:
            self._set("running", 0, "whether the run is going on", label=self._label)
            self._write(str(self.path), self._registry)

    def _number(self, name: str, value: float, label: str) -> None:
        word = _word(name)
        if word.endswith("_ms") or "_ms_" in word:
            word, value = re.sub(r"_ms(?=_|$)", "_seconds", word), value / 1e3
        self._set(re.sub(r"_per_s$", "_per_second", word), value, name, label=label)

    def _set(self, name: str, reading: float, about: str, **labels: str) -> None:
        gauge = self._gauges.get(name)
        if gauge is None:
            gauge = self._gauges[name] = self._gauge(f"aorta_{name}", about, list(labels), registry=self._registry)
        gauge.labels(**labels).set(reading)


class WandbLogger:
    """A run of Weights & Biases, beside one that the caller may have open. Project, entity, mode and key are the
    environment's (`WANDB_PROJECT`, ...); W&B's own watching of console, machine and code is off.
    """

    def __init__(self, place: Place) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=place.name,
            dir=str(place.folder),
            config=dict(place.facts),
            reinit="create_new",
            settings=wandb.Settings(
                console="off",
                silent=True,
                save_code=False,
                x_disable_stats=True,  # AORTA samples the device itself
            ),
        )

    def log_step(self, step: int, values: Mapping[str, float]) -> None:
        """Log a point of each curve."""
        self._run.log({f"aorta/{name}": value for name, value in values.items()}, step=step)

    def log_summary(self, label: str, values: Mapping[str, float | str]) -> None:
        """Log entries of the run's summary."""
        self._run.summary.update({f"{label}/{name}": value for name, value in values.items()})

    def close(self) -> None:
        """Upload what is held, and end the run."""
        self._run.finish()


class MlflowLogger:
    """A run of MLflow, written through its client, so that a run that the caller has active stays so. Server and
    experiment are the environment's (`MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME`).
    """

    def __init__(self, place: Place) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._metric = Metric
        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if known is None else known.experiment_id
        tags = {f"aorta.{key}": str(value) for key, value in place.facts.items()}
        self._id = self._client.create_run(experiment, run_name=place.name, tags=tags).info.run_id

    def log_step(self, step: int, values: Mapping[str, float]) -> None:
        """Log a point of each curve."""
        now_ms = time.time_ns() // 1_000_000
        metrics = [self._metric(f"aorta/{name}", value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def log_summary(self, label: str, values: Mapping[str, float | str]) -> None:
        """Log numbers as metrics, text as tags."""
        now_ms = time.time_ns() // 1_000_000
        numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
        metrics = [self._metric(f"{label}/{name}", value, now_ms, 0) for name, value in numbers.items()]
        for first in range(0, len(metrics), _MLFLOW_BATCH):
            self._client.log_batch(self._id, metrics=metrics[first : first + _MLFLOW_BATCH])
        for name in values.keys() - numbers.keys():
            self._client.set_tag(self._id, f"{label}/{name}", values[name])

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._id)


def _word(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


class _Known(NamedTuple):
    """What opens a logger, and the module of its client."""

    open: Callable[[Place], Logger]
    module: str


_KNOWN: Final = {
    "tensorboard": _Known(TensorBoardLogger, "tensorboardX"),
    "prometheus": _Known(PrometheusLogger, "prometheus_client"),
    "wandb": _Known(WandbLogger, "wandb"),
    "mlflow": _Known(MlflowLogger, "mlflow"),
}
"""The name is that of the extra, too."""
NAMES: Final = tuple(_KNOWN)


def missing_client(names: Iterable[str]) -> str | None:
    """Return why these loggers cannot be opened: packages not installed, and the command that installs them."""
    lacking = [name for name in names if find_spec(_KNOWN[name].module) is None]
    if not lacking:
        return None
    modules = ", ".join(_KNOWN[name].module for name in lacking)
    verb = "is" if len(lacking) == 1 else "are"
    return f"{modules} {verb} not installed: {install_command(*lacking)}"


def open_logger(name: str, place: Place) -> Logger:
    """Return the logger of this name (one of `NAMES`); whatever its client raises is raised."""
    return _KNOWN[name].open(place)
