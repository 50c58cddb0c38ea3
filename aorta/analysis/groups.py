"""Groups rows of columns by equal keys, with one sort.

by = Groups(group, seq)
by.reduce(np.add, length_ns)          # one value a group
by.parts(length_ns)                   # one array a group
length_ns - by.reduce(np.minimum, length_ns)[by.of_row]
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_MAX: Final = np.iinfo(np.int64).max


class Groups:
    """Rows whose keys are all equal form a group; groups are in the order of their keys, rows of one in theirs.

    Args:
        keys: columns of integers, the most significant first.

    Attributes:
        order: indices of rows, group by group; group `i` begins at `order[starts[i]]`.
        starts, sizes: of each group.
        first: the first row of each group.
    """

    def __init__(self, *keys: npt.NDArray[Any]) -> None:
        key = joined(keys)
        self.order = np.argsort(key, kind="stable")
        key = key[self.order]
        self.starts = np.flatnonzero(np.append(True, key[1:] != key[:-1])[: len(key)])
        self.sizes = np.diff(self.starts, append=len(key))
        self.first = self.order[self.starts]

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def number(self) -> npt.NDArray[np.int64]:
        """The group of each row, in the order of `order`."""
        return np.repeat(np.arange(len(self)), self.sizes)

    @cached_property
    def of_row(self) -> npt.NDArray[np.int64]:
        """The group of each row."""
        found = np.empty(len(self.order), np.int64)
        found[self.order] = self.number
        return found

    @property
    def rows(self) -> list[npt.NDArray[np.int64]]:
        """The rows of each group."""
        return self.parts(np.arange(len(self.order)))

    def reduce(self, operation: np.ufunc, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Reduce the values of each group to one."""
        return operation.reduceat(values[self.order], self.starts) if len(self) else values[:0]

    def distinct(self, values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return how many different values each group has; the rows of one must be in the order of their values."""
        fresh = np.append(True, np.diff(values[self.order]) != 0)[: len(self.order)]
        fresh[self.starts] = True
        return np.add.reduceat(fresh.astype(np.int64), self.starts) if len(self) else self.starts

    def parts(self, values: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Return the values of each group."""
        return np.split(values[self.order], self.starts[1:]) if len(self) else []


def joined(parts: tuple[npt.NDArray[Any], ...]) -> npt.NDArray[np.int64]:
    """Return one number per row that is equal exactly where all parts are equal, and ordered as they are: the parts as
    digits, compacted where they would overflow.
    """
    key, span = np.zeros(len(parts[0]), np.int64), 1
    if not len(key):
        return key
    for part in parts:
        low = int(part.min())
        digits, width = part.astype(np.int64) - low, int(part.max()) - low + 1
        if width > _MAX:
            _, digits = np.unique(part, return_inverse=True)
            width = int(digits.max()) + 1
        if span * width > _MAX:
            _, key = np.unique(key, return_inverse=True)
            span = int(key.max()) + 1
        if span * width > _MAX:
            _, digits = np.unique(digits, return_inverse=True)
            width = int(digits.max()) + 1
        key, span = key * width + digits, span * width
    return key
