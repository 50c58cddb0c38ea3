"""Launches -> the ledger of one side, one launch at a time.

Enters: datasets. Leaves: a `Ledger`. Must not: hold two launches, or more of one than the columns of a few ranks and a
piece of its collectives (`across.PIECE_ROWS`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast, overload

import numpy as np

from aorta.analysis.aggregate import Dataset
from aorta.analysis.attribution.cells import Late, Ledger, OfRank
from aorta.analysis.attribution.looks import NOT_KNOWN, RankSource, StepTable, looks_of_trace
from aorta.analysis.attribution.tally import tally, tally_record
from aorta.analysis.matching import group_members
from aorta.analysis.readers.columns import Stored
from aorta.analysis.readers.engines import Engine, Local, progress
from aorta.analysis.readers.run_folder import Run
from aorta.analysis.readers.scan import Floats, Ints
from aorta.analysis.traces.run import TraceRecord
from aorta.errors import InputError
from aorta.timeline.overlap import NS_PER_MS


def ledger_of(launches: Iterable[Dataset], engine: Engine | None = None) -> Ledger:
    """Add up all launches of one side: a rank-step counts once, whichever launch it is of.

    Raises:
        InputError: a record cannot be read again.
    """
    ledger = Ledger()
    for dataset in launches:
        ledger.launches += 1
        for rank, found in _of_ranks(dataset, engine or Local()):
            ledger.add(rank, found)
        for entry in dataset.across.stragglers:
            if entry["rank"] is not None:
                late = Late(entry["group"], tuple(entry["group_ranks"]), entry["rank"])
                ledger.stragglers[late] += 1
                ledger.late_ms[late].append(entry["late_ms"])
        del dataset  # or the next one is made while this one is held
    return ledger


def _of_ranks(dataset: Dataset, engine: Engine) -> Iterator[tuple[int, OfRank]]:
    run = dataset.run
    sources = _Sources(run, dataset.across.waits, _sizes(run))
    if any(isinstance(record, TraceRecord) for record in run.records.values()):
        for place, (rank, record) in enumerate(run.records.items()):
            source = sources[place]
            yield rank, tally(looks_of_trace(cast("TraceRecord", record), source.steps, source.waits), source.sizes)
        return
    # The engines map over paths; a source has what they ask of a path.
    task = cast("Callable[[Path], OfRank]", tally_record)
    with progress(len(sources), f"attributing {run.path}") as tick:
        for rank, found in zip(run.records, engine.map(task, cast("Sequence[Path]", sources)), strict=True):
            tick()
            if isinstance(found, InputError):
                raise found
            yield rank, found


@dataclass(frozen=True)
class _Sources(Sequence[RankSource]):
    """Made when asked for, and not kept: a thousand of them would be the columns of the run."""

    run: Run
    waits: dict[int, int]
    sizes: dict[int, dict[str, int]]

    def __len__(self) -> int:
        return len(self.run.records)

    @overload
    def __getitem__(self, place: int) -> RankSource: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[RankSource]: ...
    def __getitem__(self, place: int | slice) -> RankSource | Sequence[RankSource]:
        ranks = list(self.run.records)[place]
        return self._of(ranks) if isinstance(ranks, int) else [self._of(rank) for rank in ranks]

    def _of(self, rank: int) -> RankSource:
        columns, stored = self.run.columns, self.run.columns.ranks[rank]
        return RankSource(
            self.run.records[rank].path,
            rank,
            _table(self.run, stored),
            columns.integers_of(stored, "line_offset"),
            columns.store.read(self.waits[rank], stored.scan.row_count, np.int64),
            self.sizes[rank],
        )


def _table(run: Run, stored: Stored) -> StepTable:
    columns = run.columns
    integers = ("global_step", "start_mono_ns", "end_mono_ns", "rows_end", "warmup")
    floats = ("comm_ms", "exposed_comm_ms", "compute_ms")
    return StepTable(
        *(columns.integers_of(stored, name) for name in integers),
        *(_nanoseconds(columns.floats_of(stored, name)) for name in floats),
    )


def _nanoseconds(values_ms: Floats) -> Ints:
    """A record's milliseconds are whole nanoseconds, divided once: rounding gives them back (below 2**52 of them)."""
    return np.where(np.isnan(values_ms), NOT_KNOWN, np.rint(np.nan_to_num(values_ms) * NS_PER_MS)).astype(np.int64)


def _sizes(run: Run) -> dict[int, dict[str, int]]:
    sizes: dict[int, dict[str, int]] = {rank: {} for rank in run.records}
    for (rank, group), members in group_members(run).items():
        sizes.setdefault(rank, {})[group] = len(members)
    return sizes
