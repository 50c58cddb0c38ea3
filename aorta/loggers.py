"""Send scalars to the tools that people watch: TensorBoard and Weights & Biases, or an object of the caller's.

A `Logger` takes the scalars of steps while a run goes on, and those of a finished report:

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
    """Takes scalars. Of a run only rank 0 has loggers; their calls come one at a time, from a thread of AORTA's.

    An exception from any method is logged once, and the logger is not called again; the run goes on.
    """

    def log_step(self, step: int, values: Mapping[str, float]) -> None:
        """Log a finished step, some steps after it ended.

        Args:
            step: its global step.
            values: name -> value; a value that the step does not have is left out (docs/loggers.md lists them).
        """

    def log_summary(self, label: str, values: Mapping[str, float | str]) -> None:
        """Log the numbers of one dataset of a report, or of its comparison.

        Args:
            label: of the dataset; of a comparison `CANDIDATE-vs-REFERENCE`.
            values: name -> value; text for verdicts, identities and units.
        """

    def close(self) -> None:
        """Write what is still held; called once at the end."""


@dataclass(frozen=True)
class Place:
    """What a logger is opened for.

    Attributes:
        folder: of the run or the report; files go there.
        name: of the run or the report, for people.
        facts: identity and settings, for tools that keep them.
        event_suffix: ends the names of TensorBoard's files.
    """

    folder: Path
    name: str
    facts: Mapping[str, str | int | float]
    event_suffix: str = ""


class TensorBoardLogger:
    """Event files in `<folder>/tensorboard/`, written by tensorboardX, which needs neither torch nor TensorBoard."""

    def __init__(self, place: Place) -> None:
        from tensorboardX import SummaryWriter

        folder = str(place.folder / TENSORBOARD_DIR)
        self._writer = SummaryWriter(folder, flush_secs=_FLUSH_S, filename_suffix=place.event_suffix)

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
    """A run of Weights & Biases, beside one that the caller may have open. Project, entity, mode and key are the
    environment's (`WANDB_PROJECT`, ...); W&B's own watching of console, machine and code is off.
    """

    def __init__(self, place: Place) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "aorta"),
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
        self._run.log({f"aorta/{name}": value for name, value in values.items()}, step=step)

    def log_summary(self, label: str, values: Mapping[str, float | str]) -> None:
        self._run.summary.update({f"{label}/{name}": value for name, value in values.items()})

    def close(self) -> None:
        self._run.finish()


_MODULES: Final = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""Name of a logger, and of its extra -> module of its client."""
NAMES: Final = tuple(_MODULES)


def missing_client(names: Iterable[str]) -> str | None:
    """Return why these loggers cannot be opened: packages not installed, and the command that installs them."""
    lacking = [name for name in names if find_spec(_MODULES[name]) is None]
    if not lacking:
        return None
    modules = ", ".join(_MODULES[name] for name in lacking)
    verb = "is" if len(lacking) == 1 else "are"
    return f"{modules} {verb} not installed: {install_command(*lacking)}"


def open_logger(name: str, place: Place) -> Logger:
    """Return the logger of this name (one of `NAMES`); whatever its client raises is raised."""
    return TensorBoardLogger(place) if name == "tensorboard" else WandbLogger(place)
