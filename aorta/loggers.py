"""Scalars of running steps and of reports, for TensorBoard, Weights & Biases, or an object of the caller's:

    class Printer:
        def log_step(self, step, values): print(step, values["overlap_ratio"])
        def log_summary(self, label, values): print(label, values)
        def close(self): pass

    with aorta.record("artifacts/mine", model=model, loggers=["tensorboard", Printer()]) as recording:
        ...

W&B is configured by `WANDB_*` in the environment. Must not compute a metric (values come from the record and from
`summary.json`), load torch, import a client that was not asked for, or touch a run of W&B that the caller has open.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from aorta.installation import install_command
from aorta.records.run_files import TENSORBOARD_DIR

_FLUSH_S: Final = 10
"""Seconds after which TensorBoard can read a value; its own default, 120, is long for someone who looks on."""


@runtime_checkable
class Logger(Protocol):
    """Takes scalars, on rank 0 of a run, one call at a time, from a thread of AORTA's. After an exception, which is
    logged, it is not called again.
    """

    def log_step(self, step: int, values: Mapping[str, float]) -> None:
        """Log a finished step, some steps after it ended. `values`: those that the step has (docs/loggers.md)."""

    def log_summary(self, label: str, values: Mapping[str, float | str]) -> None:
        """Log the numbers of a dataset of a report, or of its comparison (`label`: `CANDIDATE-vs-REFERENCE`). Verdicts,
        identities and units are text.
        """

    def close(self) -> None:
        """Write what is still held; called once at the end."""


@dataclass(frozen=True)
class LoggedRun:
    """The run or report that a logger is opened for."""

    folder: Path  # files go there
    name: str  # for people
    facts: Mapping[str, str | int | float]  # identity and settings, for tools that keep them
    event_suffix: str = ""  # ends the names of TensorBoard's files


class TensorBoardLogger:
    """Event files in `<folder>/tensorboard/`, written by tensorboardX, which needs neither torch nor TensorBoard."""

    def __init__(self, logged: LoggedRun) -> None:
        from tensorboardX import SummaryWriter

        folder = str(logged.folder / TENSORBOARD_DIR)
        self._writer = SummaryWriter(folder, flush_secs=_FLUSH_S, filename_suffix=logged.event_suffix)

    def log_step(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"aorta/{name}", value, step)

    def log_summary(self, label: str, values: Mapping[str, float | str]) -> None:
        for name, value in values.items():
            add = self._writer.add_text if isinstance(value, str) else self._writer.add_scalar
            add(f"{label}/{name}", value, 0)

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """A run of Weights & Biases, beside one that the caller may have open. Project, entity, mode and key come from the
    environment; W&B does not watch console, machine and code.
    """

    def __init__(self, logged: LoggedRun) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "aorta"),
            name=logged.name,
            dir=str(logged.folder),
            config=dict(logged.facts),
            reinit="create_new",
            settings=wandb.Settings(
                console="off",
                silent=True,
                save_code=False,
                x_disable_stats=True,  # AORTA samples the device itself
            ),
        )

    def log_step(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({f"aorta/{name}": value for name, value in values.items()}, step=step)

    def log_summary(self, label: str, values: Mapping[str, float | str]) -> None:
        self._run.summary.update({f"{label}/{name}": value for name, value in values.items()})

    def close(self) -> None:
        self._run.finish()


_MODULES: Final = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""Name of a logger, and of its extra -> module of its client."""
NAMES: Final = tuple(_MODULES)


def missing_client(names: Iterable[str]) -> str | None:
    """Return the packages that these loggers lack, and the command that installs them; None: none."""
    lacking = [name for name in names if find_spec(_MODULES[name]) is None]
    if not lacking:
        return None
    modules = ", ".join(_MODULES[name] for name in lacking)
    verb = "is" if len(lacking) == 1 else "are"
    return f"{modules} {verb} not installed: {install_command(*lacking)}"


def open_logger(name: str, logged: LoggedRun) -> Logger:
    """Return the logger of this name (one of `NAMES`); whatever its client raises is raised."""
    return TensorBoardLogger(logged) if name == "tensorboard" else WandbLogger(logged)
