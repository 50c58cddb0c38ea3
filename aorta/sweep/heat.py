"""A grid -> a heat map: colour and number in every cell, empty cells hatched and named.

Enters: a `grid.Grid`. Leaves: a PNG. Must not: import pyplot, or colour a cell that has no value.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import matplotlib
import numpy as np
from matplotlib.patches import Rectangle

from aorta.analysis.amounts import number
from aorta.analysis.metrics import metric_named
from aorta.analysis.plots.palette import INK
from aorta.analysis.plots.style import new_figure, save
from aorta.sweep.grid import Grid

# cividis: one order of lightness for all kinds of colour vision (Nunez, Anderton, Renslow, PLOS ONE 13(7), 2018).
_COLORS: Final = "cividis"
_DARK: Final = 0.55  # relative luminance below which white is the readable ink


def draw_heat(grid: Grid, title: str, path: Path) -> str | None:
    """Draw; returns why not where no cell has a value."""
    known = grid.values
    if not known:
        return f"{grid.metric} has no value in any job"
    metric = metric_named(grid.metric)
    # Lighter is better where a direction is; otherwise lighter is more.
    colors = matplotlib.colormaps[f"{_COLORS}_r" if metric.better == "lower" else _COLORS]
    low, high = min(known), max(known)
    scale = matplotlib.colors.Normalize(low, high if high > low else low + 1e-12)
    figure = new_figure(max(4.5, 1.1 * len(grid.x) + 2.6), max(3.2, 0.62 * len(grid.y) + 1.9))
    axes = figure.subplots()
    for row, line in enumerate(grid.cells):
        for column, cell in enumerate(line):
            corner = (column - 0.5, row - 0.5)
            if cell.value is None:
                axes.add_patch(Rectangle(corner, 1, 1, facecolor="white", edgecolor="#B0B0B0", hatch="////", lw=0))
                text, ink = str(cell.why), INK
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            else:
                color = colors(scale(cell.value))
                axes.add_patch(Rectangle(corner, 1, 1, facecolor=color, lw=0))
                luminance = float(np.dot(color[:3], (0.2126, 0.7152, 0.0722)))  # ITU-R BT.709
                text, ink = number(cell.value, metric.unit, fewer=1), "white" if luminance < _DARK else "black"
                text += f"\n{cell.jobs} jobs" if cell.jobs > 1 else ""
                box = None
            axes.text(column, row, text, ha="center", va="center", color=ink, fontsize=9, bbox=box)
    for row in range(1, len(grid.y)):  # hatched cells have no edge of their own
        axes.axhline(row - 0.5, color="white", lw=2)
    for column in range(1, len(grid.x)):
        axes.axvline(column - 0.5, color="white", lw=2)
    axes.set_xlim(-0.5, len(grid.x) - 0.5)
    axes.set_ylim(-0.5, len(grid.y) - 0.5)
    axes.set_xticks(range(len(grid.x)), grid.x)
    axes.set_yticks(range(len(grid.y)), grid.y)
    if max(map(len, grid.x)) * len(grid.x) > 60:
        axes.tick_params(axis="x", rotation=45)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(grid.x_key)
    axes.set_ylabel(grid.y_key)
    better = {"lower": ", lower is better", "higher": ", higher is better", None: ""}[metric.better]
    unit = "" if metric.unit == "ratio" else f" ({metric.unit})"
    bar = figure.colorbar(matplotlib.cm.ScalarMappable(scale, colors), ax=axes)
    bar.set_label(f"{grid.metric}{unit}{better}")
    bar.outline.set_visible(False)
    figure.suptitle(title, fontsize=11)
    save(figure, path)
    return None
