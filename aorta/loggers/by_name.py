"""The loggers that can be asked for by name, and whether their clients are installed.

    problem = missing_client(["wandb"])     # None, or a sentence that ends with what to install
    logger = open_logger("tensorboard", place)

Must not import a client only to know whether it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Final, NamedTuple

from aorta.installation import install_command
from aorta.loggers import Logger
from aorta.loggers.clients import MlflowLogger, Place, PrometheusLogger, TensorBoardLogger, WandbLogger


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
    """Why these loggers cannot be opened: the packages that are not installed, and the command that installs them."""
    lacking = [name for name in names if find_spec(_KNOWN[name].module) is None]
    if not lacking:
        return None
    modules = ", ".join(_KNOWN[name].module for name in lacking)
    verb = "is" if len(lacking) == 1 else "are"
    return f"{modules} {verb} not installed: {install_command(*lacking)}"


def open_logger(name: str, place: Place) -> Logger:
    """The logger of this name (one of `NAMES`); whatever its client raises is raised."""
    return _KNOWN[name].open(place)
