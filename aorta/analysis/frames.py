"""A run -> tables: one row a rank-step, and one row a collective on a rank.

Enters: a `Run`. Leaves: pandas frames; a null of the record is a missing value of the frame. Must not: measure a
window again (its metrics come from the record), or leave out warm-up rows (they are flagged; aggregates drop them).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pandas as pd

from aorta.analysis.metrics import in_order
from aorta.analysis.readers.run_folder import Run
from aorta.analysis.readers.scan import KIND_METRICS, KINDS_KNOWN, LOSSES, NULL, ROW, Ints
from aorta.timeline.overlap import NS_PER_MS

STEP_COLUMNS = (
    "rank",
    "epoch",
    "step",
    "global_step",
    "warmup",
    "loss",
    "lr",
    "grad_norm",
    "start_mono_ns",
    "end_mono_ns",
    "t_start_ns",
    "t_end_ns",
)
STEP_MS = "step_ms"
_NO_REASON = "the record gives no reason"


def steps_frame(run: Run, columns: Sequence[str] | None = None) -> pd.DataFrame:
    """One row per rank and step, by rank then global step: `STEP_COLUMNS`, `step_ms` (start to end, milliseconds) and
    one column per metric of the record; or those of `columns` alone, which is what fits into memory for a large run
    (8 bytes a column and rank-step). Times in nanoseconds are int64 (W14); null is NaN.
    """
    names = (*STEP_COLUMNS, STEP_MS, *metric_names(run)) if columns is None else columns
    return pd.DataFrame({name: step_column(run, name) for name in names})


def step_column(run: Run, name: str) -> np.ndarray:
    """One column of `steps_frame`."""
    columns = run.columns
    if name == "rank":
        return columns.rank
    if name == "warmup":
        return np.asarray(columns.integers(name) != 0)
    if name == STEP_MS:
        return np.asarray((columns.integers("end_mono_ns") - columns.integers("start_mono_ns")) / NS_PER_MS)
    return columns.integers(name) if name in STEP_COLUMNS and name not in LOSSES else columns.floats(name)


def metric_names(run: Run) -> list[str]:
    """Metrics that any step of the run carries, in the order of `metrics`."""
    return in_order({name for stored in run.columns.ranks.values() for name in stored.scan.metrics})


def null_reasons(run: Run, name: str) -> Counter[str]:
    """Why a metric (or `loss`) is null, and in how many of the steps that are not warm-up."""
    reasons: Counter[str] = Counter()
    null = np.isnan(step_column(run, name)) & ~step_column(run, "warmup")
    start = 0
    for stored in run.columns.ranks.values():
        mine = null[start : start + stored.scan.step_count]
        start += len(mine)
        if mine.any():
            codes = run.columns.integers_of(stored, "reasons")[mine]
            found, first, counts = np.unique(codes, return_index=True, return_counts=True)
            for place in np.argsort(first):
                said = stored.scan.reasons[found[place]]
                others = KINDS_KNOWN if name in KIND_METRICS else KINDS_KNOWN[:1] if name != "loss" else ()
                why = next((said[key] for key in (name, *others) if said.get(key)), _NO_REASON)
                reasons[why] += int(counts[place])
    return reasons


def collective_rows(
    run: Run, ranks: Collection[int] | None = None, steps: tuple[int, int] | None = None
) -> pd.DataFrame:
    """One row per collective and rank, in order of issue: the columns of `telemetry.schema.Collective` after `rank`,
    `global_step` and `warmup`, then `duration_ms` and `queued_ms` (NaN where an end was not seen). The `_ns` offsets
    count from the start of the rank's own step. `ranks` and `steps` (global steps, half-open) choose; 200 bytes a row.
    """
    parts = [_rows_of(run, rank, steps) for rank in run.records if ranks is None or rank in ranks]
    full = [part for part in parts if len(part)]
    return pd.concat(full, ignore_index=True) if full else _rows_of(run, next(iter(run.records)), (0, 0))


def _rows_of(run: Run, rank: int, steps: tuple[int, int] | None) -> pd.DataFrame:
    stored = run.columns.ranks[rank]
    number = run.columns.integers_of(stored, "global_step")
    ends = run.columns.integers_of(stored, "rows_end")
    first, last = (0, len(number)) if steps is None else np.searchsorted(number, steps)
    starts = np.concatenate([[0], ends])
    rows = run.columns.rows(stored, int(starts[first]), int(starts[last]))
    counts = np.diff(starts)[first:last]
    code, seq, issue, start, end = (rows[:, place].copy() for place in range(len(ROW)))

    def told(place: int) -> pd.Series[Any]:
        table = np.empty(len(stored.scan.whats), dtype=object)
        table[:] = [what[place] for what in stored.scan.whats]
        return pd.Series(table[code], dtype="object")

    return pd.DataFrame(
        {
            "rank": np.full(len(rows), rank, np.int64),
            "global_step": np.repeat(number[first:last], counts),
            "warmup": np.repeat(run.columns.integers_of(stored, "warmup")[first:last] != 0, counts),
            "kind": told(0),
            "group": told(1),
            "seq": seq,
            "bytes": told(2).astype("int64"),
            "dtype": told(3),
            "issue_ns": issue,
            "start_ns": _nullable(start),
            "end_ns": _nullable(end),
            "end_source": told(4),
            "duration_ms": _milliseconds(start, end),
            "queued_ms": _milliseconds(issue, start),
        }
    )


def _nullable(times: Ints) -> pd.Series[int]:
    return pd.Series(pd.arrays.IntegerArray(times, times == NULL))


def _milliseconds(start: Ints, end: Ints) -> np.ndarray:
    return np.where((start == NULL) | (end == NULL), np.nan, (end - start) / NS_PER_MS)
