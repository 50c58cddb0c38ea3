"""Blocks of columns put together, and put in order.

Enters: arrays of a record's steps and collectives. Leaves: new arrays. Must not: know what a column means.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt


def joined(parts: Iterable[npt.NDArray[Any]], rows: int) -> npt.NDArray[Any]:
    """Blocks of `rows` rows each, side by side."""
    found = list(parts)
    return np.concatenate(found, axis=1) if found else np.empty((rows, 0), np.int64)


def reordered(
    steps: npt.NDArray[np.int64], rows: npt.NDArray[np.int64], chosen: npt.NDArray[np.intp], rows_end: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The chosen steps (columns of `steps`) in their order, and their rows. Row `rows_end` of `steps` says where the
    rows of each end.
    """
    starts = np.concatenate([[0], steps[rows_end, :-1]])
    parts = [rows[starts[at] : steps[rows_end, at]] for at in chosen]
    steps = steps[:, chosen].copy()
    steps[rows_end] = np.cumsum([len(part) for part in parts])
    return steps, np.concatenate([rows[:0], *parts])
