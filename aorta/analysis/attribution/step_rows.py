"""Provides the steps of one rank in the form attribution needs: collectives, computation, stalls and regions.

`steps_of(rank_input)` yields one `StepRows` per step in order of global step, with absolute nanoseconds of the rank's
clock. Must not: hold more than one step of intervals in memory, or ask which tool recorded them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from aorta.analysis.attribution.assign_exposed import CollectiveSpan
from aorta.analysis.attribution.keys import Region
from aorta.analysis.tables import NO_TIME, UNKNOWN, Floats, Ints, RankTables
from aorta.timeline.classes import BUBBLE
from aorta.timeline.intervals import Interval
from aorta.timeline.overlap import NS_PER_MS

METRICS = ("comm_ms", "exposed_comm_ms", "compute_ms")


@dataclass(frozen=True)
class RankInput:
    """One rank with what only a match across ranks could tell; it can be pickled for another process.

    Attributes:
        waits: wait of each collective in ns, in the order of its rows; negative where it is not known.
        sizes: group name, as this rank uses it -> number of ranks.
    """

    tables: RankTables
    waits: Ints
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, tables: RankTables, waits: Ints, sizes: Mapping[str, int]) -> RankInput:
        """Keep only the columns that attribution reads."""
        metrics = {name: tables.steps.column(name) for name in METRICS}
        return cls(replace(tables, steps=replace(tables.steps, metrics=metrics, losses={})), waits, sizes)

    def size_bytes(self) -> int:
        """Bytes that will be read again from disk."""
        return self.tables.details.size_bytes()

    def absolute(self) -> RankInput:
        """The same with absolute paths, for workers with another working directory."""
        return replace(self, tables=replace(self.tables, details=self.tables.details.absolute()))


@dataclass(frozen=True)
class StepRows:
    """One step. `used` as in `tables.Steps`. The communication times are those of the tables, `UNKNOWN` where null;
    `regions` are compute ranges and work outside the blocks.
    """

    window: Interval
    used: bool
    comm_ns: int
    exposed_ns: int
    compute_ns: int
    rows: list[CollectiveSpan]
    compute: list[Interval]
    stalls: list[Interval]
    regions: list[tuple[int, int, Region]]
    bubbles: list[Interval] = field(default_factory=list)


def steps_of(given: RankInput) -> Iterator[StepRows]:
    """Yield every step of a rank.

    Raises:
        InputError: the intervals of a step can no longer be read.
    """
    steps = given.tables.steps
    comm_ns, exposed_ns, compute_ns = (_nanoseconds(steps.column(name)).tolist() for name in METRICS)
    starts, ends, used = steps.start_mono_ns.tolist(), steps.end_mono_ns.tolist(), steps.used.tolist()
    for at, inside in enumerate(given.tables.details.steps()):
        zero = starts[at]
        blocks = [
            (zero + part.start_ns, zero + part.end_ns, Region(part.phase, part.block)) for part in inside.compute or ()
        ]
        beside = [(zero + part.start_ns, zero + part.end_ns, Region(part.name, None)) for part in inside.aux or ()]
        yield StepRows(
            (zero, ends[at]),
            used[at],
            comm_ns[at],
            exposed_ns[at],
            compute_ns[at],
            rows=_rows(given, at, zero),
            compute=[(zero + start, zero + end) for start, end in inside.computing()],
            stalls=[(zero + part.start_ns, zero + part.end_ns) for part in inside.stalls or ()],
            regions=[*blocks, *beside],
            bubbles=[(zero + start, zero + end) for start, end in inside.lane(BUBBLE)],
        )


def _rows(given: RankInput, at: int, zero: int) -> list[CollectiveSpan]:
    rows = given.tables.steps.rows_of(at, at + 1)
    mine, waits = given.tables.collectives.take(rows), given.waits[rows]
    orders: Counter[tuple[str, str]] = Counter()
    found: list[CollectiveSpan] = []
    for name, start, end, wait in zip(
        mine.name.tolist(), mine.start_ns.tolist(), mine.end_ns.tolist(), waits.tolist(), strict=True
    ):
        kind, group, size, _, _ = mine.names[name]
        if NO_TIME not in (start, end):
            found.append(CollectiveSpan(zero + start, zero + end, kind, group, size, orders[kind, group], wait))
        orders[kind, group] += 1
    return found


def _nanoseconds(values_ms: Floats) -> Ints:
    """Convert the record's milliseconds back to the whole nanoseconds they were divided from; rounding is exact below
    2**52 ns.
    """
    return np.where(np.isnan(values_ms), UNKNOWN, np.rint(np.nan_to_num(values_ms) * NS_PER_MS)).astype(np.int64)
