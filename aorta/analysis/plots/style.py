"""What all pictures share: colours, size, saving.

Enters: a figure to fill. Leaves: a PNG. Must not: import pyplot, which would choose a backend for the whole process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from aorta.analysis.aggregate import Dataset

# Okabe and Ito's palette, told apart by all common kinds of colour blindness (https://jfly.uni-koeln.de/color/).
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#F0E442",
)
GREY: Final = "#D9D9D9"
INK: Final = "#333333"
DPI: Final = 120
SERIES: Final = ((BLUE, "-"), (RED, "--"), (GREEN, "-."), (PURPLE, ":"), (ORANGE, "-"), (SKY, "--"), (INK, "-."))


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, inches, whose parts make room for each other."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def tidy(axes: Axes) -> None:
    """Grid behind the data, no box round it."""
    axes.set_axisbelow(True)
    axes.grid(visible=True, color="#E6E6E6", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def heading(figure: Figure, dataset: Dataset, what: str) -> None:
    """Title with the facts without which a picture misleads: who, where, and whether the fabric was emulated."""
    header, health = dataset.run.header, dataset.run.health
    facts = f"{header.platform}, {header.parallel}, {len(health.ranks_read)} of {health.world_size} ranks"
    emulated = ", EMULATED FABRIC" if health.fabric is not None else ""
    figure.suptitle(f"{dataset.label}: {what}\n{facts}{emulated}", fontsize=11)


def save(figure: Figure, path: Path) -> None:
    """Write a PNG, replacing what is there."""
    figure.savefig(path, dpi=DPI, format="png")
