"""All ranks of a run, column by column.

Enters: scans, as they arrive. Leaves: one column over all ranks, or the collectives of one rank or of a range of
steps. Must not: hold more than what was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from aorta.analysis.readers.isolated import ISOLATED
from aorta.analysis.readers.scan import INTEGERS, KIND_METRICS, KINDS_KNOWN, ROW, Floats, Ints, Scan
from aorta.analysis.readers.store import Number, Store


@dataclass(frozen=True)
class Stored:
    """A scan whose columns stand in a store, from `offset` on."""

    scan: Scan
    offset: int

    @classmethod
    def of(cls, scan: Scan, store: Store) -> Stored:
        """Move the columns of `scan` into `store`."""
        return cls(replace(scan, blob=b""), store.append(scan.blob))

    @property
    def rows_offset(self) -> int:
        """Where its collectives begin."""
        return self.offset + 8 * self.scan.step_count * (len(INTEGERS) + len(self.scan.floats))


class Columns:
    """The columns of the ranks of one run, by rank, then global step."""

    def __init__(self, store: Store, ranks: dict[int, Stored]) -> None:
        self.store, self.ranks = store, ranks

    @cached_property
    def steps_of(self) -> Ints:
        """Steps of each rank."""
        return np.array([stored.scan.step_count for stored in self.ranks.values()], np.int64)

    @cached_property
    def row_count(self) -> int:
        """Collectives of all ranks."""
        return sum(stored.scan.row_count for stored in self.ranks.values())

    @property
    def rank(self) -> Ints:
        """The rank of each step."""
        return np.repeat(np.array(list(self.ranks), np.int64), self.steps_of)

    def integers(self, name: str) -> Ints:
        """A column of `scan.INTEGERS`, over all ranks."""
        return _joined([self.integers_of(stored, name) for stored in self.ranks.values()], np.int64)

    def integers_of(self, stored: Stored, name: str) -> Ints:
        """The same of one rank."""
        count = stored.scan.step_count
        return self.store.read(stored.offset + 8 * count * INTEGERS.index(name), count, np.int64)

    def floats(self, name: str) -> Floats:
        """A metric or a loss over all ranks; null is NaN. A kind that a rank never used is 0 where kinds are
        known.
        """
        return _joined([self.floats_of(stored, name) for stored in self.ranks.values()], np.float64)

    def floats_of(self, stored: Stored, name: str) -> Floats:
        """The same of one rank."""
        count, names = stored.scan.step_count, stored.scan.floats
        if name in names:
            place = len(INTEGERS) + names.index(name)
            return self.store.read(stored.offset + 8 * count * place, count, np.float64)
        found = np.full(count, np.nan)
        if name in KIND_METRICS and "comm_ms" in names:
            witnesses = [self.floats_of(stored, witness) for witness in KINDS_KNOWN if witness in names]
            found[~np.isnan(witnesses).any(axis=0)] = 0.0
        return found

    def isolated_of(self, stored: Stored) -> tuple[dict[str, Ints], Floats]:
        """The steps of one rank's isolated baselines: the columns of `isolated.ISOLATED`, and computation in ms."""
        count = sum(stored.scan.isolated.values())
        offset = stored.rows_offset + 8 * len(ROW) * stored.scan.row_count
        table = self.store.read(offset, count * len(ISOLATED), np.int64).reshape(len(ISOLATED), count)
        compute_ms = self.store.read(offset + 8 * table.size, count, np.float64)
        return dict(zip(ISOLATED, table, strict=True)), compute_ms

    def rows(self, stored: Stored, first: int = 0, last: int | None = None) -> Ints:
        """Collectives `first` to `last` (exclusive) of one rank, the columns of `scan.ROW`."""
        count = (stored.scan.row_count if last is None else last) - first
        width = len(ROW)
        return self.store.read(stored.rows_offset + 8 * width * first, count * width, np.int64).reshape(count, width)

    def step_ranges(self, rows: int) -> Iterator[tuple[int, int]]:
        """Ranges of global steps, `[first, last)`, that hold about `rows` collectives of all ranks each."""
        steps = self.global_steps
        if len(steps):
            each = max(1, int(rows * len(steps) / max(1, self.row_count)))
            for start in range(0, len(steps), each):
                yield int(steps[start]), int(steps[min(start + each, len(steps)) - 1]) + 1

    @cached_property
    def global_steps(self) -> Ints:
        """Every global step that some rank has, in order."""
        found = np.empty(0, np.int64)
        for stored in self.ranks.values():
            mine = self.integers_of(stored, "global_step")
            if not np.array_equal(mine, found):
                found = np.union1d(found, mine)
        return found

    def partial_steps(self) -> tuple[int, ...]:
        """Global steps that some of the ranks do not have."""
        steps = self.global_steps
        missing = np.zeros(len(steps), bool)
        for stored in self.ranks.values():
            if stored.scan.step_count < len(steps):
                missing |= ~np.isin(steps, self.integers_of(stored, "global_step"))
        return tuple(steps[missing].tolist())


def _joined(parts: Sequence[npt.NDArray[Number]], dtype: type[Number]) -> npt.NDArray[Number]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
