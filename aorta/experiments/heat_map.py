"""The heat map of a sweep or a study over two keys: colour and number in every cell; empty ones say why.

Must not import pyplot, or give a value or a colour to a cell that has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import matplotlib
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from aorta.analysis.formatting import TEXT
from aorta.analysis.metrics import metric_named
from aorta.analysis.report.charts.style import new_figure, save
from aorta.analysis.report.palette import INK, text_on
from aorta.errors import InputError

# cividis: one order of lightness for all kinds of colour vision (Nunez, Anderton, Renslow, PLOS ONE 13(7), 2018).
_COLORS: Final = "cividis"

MOST_VALUES: Final = 40
"""On one axis; more cannot be read in a picture, and belong to a continuous key."""
NO_JOB: Final = "no job"
NULL: Final = "null"


@dataclass(frozen=True)
class HeatPoint:
    """A job of a sweep or a cell of a study, by the values of its keys as they were written.

    Attributes:
        why: what to write where there is no value.
        below: a second line below the value.
    """

    keys: Mapping[str, str]
    value: float | None
    why: str = NULL
    below: str | None = None


@dataclass(frozen=True)
class HeatCell:
    """Points that share both values.

    Attributes:
        value: the median over the points that have one.
        jobs: how many those are.
        why: what to write where there is no value.
        below: a second line below the value of a single point.
    """

    value: float | None
    jobs: int
    why: str | None
    below: str | None = None


@dataclass(frozen=True)
class HeatGrid:
    """`cells[row of y][column of x]`; keys' values as they were written, numbers in order of size."""

    x_key: str
    y_key: str
    x: tuple[str, ...]
    y: tuple[str, ...]
    cells: tuple[tuple[HeatCell, ...], ...]
    metric: str

    @property
    def values(self) -> list[float]:
        """All values that are known."""
        return [cell.value for line in self.cells for cell in line if cell.value is not None]


def arrange(points: Sequence[HeatPoint], metric: str, x_key: str, y_key: str) -> HeatGrid:
    """Put points into cells by the values of two keys.

    Raises:
        InputError: a key that no job was given, twice the same, or one with too many values for a picture.
    """
    known = list(dict.fromkeys(key for point in points for key in point.keys))
    for key in (x_key, y_key):
        if key not in known:
            raise InputError(f"--heat {key}: no job of this sweep was given that key; there are {', '.join(known)}")
    if x_key == y_key:
        raise InputError(f"--heat {x_key} {y_key}: give two different keys")
    x, y = (_values(points, key) for key in (x_key, y_key))
    lines = []
    for at_y in y:
        here = [[point for point in points if (_at(point, x_key), _at(point, y_key)) == (at_x, at_y)] for at_x in x]
        lines.append(tuple(_cell(found) for found in here))
    return HeatGrid(x_key, y_key, x, y, tuple(lines), metric)


def _at(point: HeatPoint, key: str) -> str:
    return point.keys.get(key, "(default)")


def _values(points: Sequence[HeatPoint], key: str) -> tuple[str, ...]:
    values = list(dict.fromkeys(_at(point, key) for point in points))
    if len(values) > MOST_VALUES:
        raise InputError(f"--heat {key}: {len(values)} values; a heat map takes at most {MOST_VALUES} on one axis")
    try:
        return tuple(sorted(values, key=float))
    except ValueError:
        return tuple(values)


def _cell(points: Sequence[HeatPoint]) -> HeatCell:
    values = [point.value for point in points if point.value is not None]
    if values:
        return HeatCell(median(values), len(values), None, points[0].below if len(points) == 1 else None)
    if not points:
        return HeatCell(None, 0, NO_JOB)
    return HeatCell(None, 0, min({point.why for point in points} - {NULL}, default=NULL))


def draw(grid: HeatGrid, title: str, path: Path) -> str | None:
    """Write a PNG. Returns None, or why nothing was drawn: no cell has a value."""
    known = grid.values
    if not known:
        return f"{grid.metric} has no value in any job"
    metric = metric_named(grid.metric)
    # Lighter is better where a direction is; otherwise lighter is more.
    colors = matplotlib.colormaps[f"{_COLORS}_r" if metric.better == "lower" else _COLORS]
    low, high = min(known), max(known)
    scale = matplotlib.colors.Normalize(low, high if high > low else low + 1e-12)
    width = 1.9 if any(cell.below for line in grid.cells for cell in line) else 1.1
    figure = new_figure(max(4.5, width * len(grid.x) + 2.6), max(3.2, 0.62 * len(grid.y) + 1.9))
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
                text, ink = TEXT.number(cell.value, metric.unit, fewer=1), text_on(to_hex(color))
                text += f"\n{cell.jobs} jobs" if cell.jobs > 1 else ""
                text += f"\n{cell.below}" if cell.below else ""
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
