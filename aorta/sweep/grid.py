"""Rows -> a grid over two keys: the cells of a heat map, and why the empty ones are empty.

Enters: rows and two keys. Leaves: a `Grid`. Must not: draw, or give a value to a cell without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from aorta.errors import InputError
from aorta.sweep.table import Row

MOST_VALUES: Final = 40
"""On one axis; more cannot be read in a picture, and belong to a continuous key."""
NO_JOB: Final = "no job"


@dataclass(frozen=True)
class Cell:
    """`value`: the median over the jobs here that have one; `jobs` counts those. `why`: what to write where none."""

    value: float | None
    jobs: int
    why: str | None


@dataclass(frozen=True)
class Grid:
    """`cells[row of y][column of x]`; values as they were written, numbers in order of size."""

    x_key: str
    y_key: str
    x: tuple[str, ...]
    y: tuple[str, ...]
    cells: tuple[tuple[Cell, ...], ...]
    metric: str

    @property
    def values(self) -> list[float]:
        """All values that are known."""
        return [cell.value for line in self.cells for cell in line if cell.value is not None]


def grid_of(rows: Sequence[Row], metric: str, x_key: str, y_key: str) -> Grid:
    """Arrange the jobs.

    Raises:
        InputError: a key that no job was given, twice the same, or one with too many values for a picture.
    """
    known = list(dict.fromkeys(key for row in rows for key in row.job.keys))
    for key in (x_key, y_key):
        if key not in known:
            raise InputError(f"--heat {key}: no job of this sweep was given that key; there are {', '.join(known)}")
    if x_key == y_key:
        raise InputError(f"--heat {x_key} {y_key}: give two different keys")
    x, y = (_values(rows, key) for key in (x_key, y_key))
    lines = []
    for at_y in y:
        here = [[row for row in rows if _at(row, x_key) == at_x and _at(row, y_key) == at_y] for at_x in x]
        lines.append(tuple(_cell(found, metric) for found in here))
    return Grid(x_key, y_key, x, y, tuple(lines), metric)


def _at(row: Row, key: str) -> str:
    return row.job.keys.get(key, "(default)")


def _values(rows: Sequence[Row], key: str) -> tuple[str, ...]:
    values = list(dict.fromkeys(_at(row, key) for row in rows))
    if len(values) > MOST_VALUES:
        raise InputError(f"--heat {key}: {len(values)} values; a heat map takes at most {MOST_VALUES} on one axis")
    try:
        return tuple(sorted(values, key=float))
    except ValueError:
        return tuple(values)


def _cell(rows: Sequence[Row], metric: str) -> Cell:
    values = [value for row in rows if (value := row.value(metric)) is not None]
    if values:
        return Cell(median(values), len(values), None)
    if not rows:
        return Cell(None, 0, NO_JOB)
    states = {row.job.status for row in rows} - {"done"}
    return Cell(None, 0, next(iter(sorted(states))) if states else "null")
