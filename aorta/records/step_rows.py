"""The rows of one kind in steps that are taken together. Must not know what a row stands for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aorta.timeline.arrays import Int64


class Part:
    """Rows, and the steps that they belong to, both in order.

    Args:
        step: of each row, as an index in `begin`.
        begin: of each step, in nanoseconds of the clock.
    """

    def __init__(self, rows: NDArray[Any], step: Int64, begin: Int64) -> None:
        self.rows, self.step, self._begin = rows, step, begin

    @cached_property
    def _cut(self) -> list[int]:
        """Where the rows of each step begin."""
        return np.searchsorted(self.step, np.arange(len(self._begin) + 1)).tolist()  # type: ignore[no-any-return]

    def where(self, chosen: NDArray[np.bool_] | Int64) -> Part:
        return Part(self.rows[chosen], self.step[chosen], self._begin)

    def columns(self, *names: str) -> zip[tuple[Any, ...]]:
        return zip(*(self.rows[name].tolist() for name in names), strict=True)

    def offsets(self, name: str) -> list[int]:
        """Return a column of times as nanoseconds from the begin of its step."""
        return (self.rows[name] - self.begins()).tolist()  # type: ignore[no-any-return]

    def begins(self) -> Int64:
        """Return when the step of each row began."""
        return self._begin[self.step]

    def named(self, name: str, texts: Sequence[str]) -> list[str]:
        """Return the texts whose numbers are in a column."""
        return [texts[number] for number in self.rows[name].tolist()]

    def of(self, step: int) -> slice:
        """Return where the rows of a step are."""
        return slice(self._cut[step], self._cut[step + 1])

    def rows_of(self, step: int) -> NDArray[Any]:
        return self.rows[self.of(step)]
