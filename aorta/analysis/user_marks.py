"""Frames of what the caller of `aorta.record` named: ranges and counters, over all ranks of a run.

Must not: compute a metric from them, or hold a run's lines.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from aorta.analysis.tables import Run
from aorta.timeline.overlap import NS_PER_MS

_RANGES = {
    "rank": "int64",
    "global_step": "int64",
    "name": "object",
    "thread": "int64",
    "depth": "int64",
    "start_mono_ns": "int64",
    "end_mono_ns": "int64",
    "error": "object",
}
_COUNTERS = {"rank": "int64", "global_step": "int64", "name": "object", "mono_ns": "int64", "value": "float64"}


def ranges_frame(run: Run) -> pd.DataFrame:
    """One row per range, by rank, step and start: `rank`, `global_step` (the step that ended first after it), `name`,
    `thread` (0: the one that records), `depth`, `start_mono_ns` and `end_mono_ns` (the rank's own clock), `error` (type
    of the exception that ended it, or None), `duration_ms`.
    """
    rows = [
        (
            rank,
            marks.global_step,
            row.name,
            row.thread,
            row.depth,
            origin + row.start_ns,
            origin + row.end_ns,
            row.error,
        )
        for rank, tables in run.ranks.items()
        for marks in tables.details.user_marks()
        for origin in (marks.start_mono_ns,)
        for row in marks.ranges
    ]
    frame = _frame(rows, _RANGES)
    frame["duration_ms"] = (frame["end_mono_ns"] - frame["start_mono_ns"]) / NS_PER_MS
    return frame.sort_values(["rank", "start_mono_ns"], kind="stable", ignore_index=True)


def counters_frame(run: Run) -> pd.DataFrame:
    """One row per value, by rank and time: `rank`, `global_step` (the step that ended first after it), `name`,
    `mono_ns` (the rank's own clock), `value` (NaN where it was not finite).
    """
    rows = [
        (rank, marks.global_step, row.name, marks.start_mono_ns + row.t_ns, np.nan if row.value is None else row.value)
        for rank, tables in run.ranks.items()
        for marks in tables.details.user_marks()
        for row in marks.counters
    ]
    return _frame(rows, _COUNTERS).sort_values(["rank", "mono_ns"], kind="stable", ignore_index=True)


def _frame(rows: list[tuple[Any, ...]], columns: dict[str, str]) -> pd.DataFrame:
    parts = list(zip(*rows, strict=True)) or [()] * len(columns)
    return pd.DataFrame(
        {name: pd.Series(part, dtype=dtype) for (name, dtype), part in zip(columns.items(), parts, strict=True)}
    )
