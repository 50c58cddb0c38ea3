"""A run -> tables: one row a rank-step, and one row a collective on a rank.

Enters: a `Run`. Leaves: pandas frames; a null of the record is a missing value of the frame. Must not: measure a
window again (its metrics come from the record), or leave out warm-up rows (they are flagged; aggregates drop them).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pandas as pd

from aorta.analysis.metrics import in_order
from aorta.analysis.readers.run_folder import Run
from aorta.telemetry.schema import Collective, Step
from aorta.timeline.classes import KINDS
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
_FLOATS = ("loss", "lr", "grad_norm")
_KIND_METRICS = frozenset(name for kind in KINDS for name in (f"{kind}_ms", f"compute_{kind}_ms", f"exposed_{kind}_ms"))
_NO_REASON = "the record gives no reason"


def steps_frame(run: Run) -> pd.DataFrame:
    """One row per rank and step, by rank then global step: `STEP_COLUMNS`, `step_ms` (start to end, milliseconds) and
    one column per metric of the record. Times in nanoseconds are int64 (W14); null is NaN.
    """
    steps = _steps(run)
    columns: dict[str, list[object]] = {name: [getattr(step, name) for step in steps] for name in STEP_COLUMNS}
    columns["step_ms"] = [(step.end_mono_ns - step.start_mono_ns) / NS_PER_MS for step in steps]
    names = metric_names(run)
    columns |= {name: [_value(step, name) for step in steps] for name in names}
    frame = pd.DataFrame(columns)
    return frame.astype({**dict.fromkeys((*_FLOATS, "step_ms", *names), "float64"), "warmup": "bool"})


def metric_names(run: Run) -> list[str]:
    """Metrics that any step of the run carries, in the order of `metrics`."""
    return in_order({name for step in _steps(run) for name in step.overlap})


def null_reasons(run: Run) -> dict[str, Counter[str]]:
    """Metric -> why it is null and in how many of the steps that are not warm-up; metrics never null are left out."""
    reasons: dict[str, Counter[str]] = {}
    names = metric_names(run)
    for step in _steps(run):
        if step.warmup:
            continue
        for name in names:
            if _value(step, name) is None:
                why = step.reasons.get(name) or step.reasons.get("comm_ms") or _NO_REASON
                reasons.setdefault(name, Counter())[why] += 1
        if step.loss is None:
            reasons.setdefault("loss", Counter())[step.reasons.get("loss") or _NO_REASON] += 1
    return reasons


def collective_rows(run: Run) -> pd.DataFrame:
    """One row per collective and rank, in order of issue: the columns of `telemetry.schema.Collective` after `rank`,
    `global_step` and `warmup`, then `duration_ms` and `queued_ms` (NaN where an end was not seen). The `_ns` offsets
    count from the start of the rank's own step.
    """
    rows = [(step, row) for step in _steps(run) for row in step.collectives]
    columns: dict[str, object] = {
        "rank": pd.Series([step.rank for step, _ in rows], dtype="int64"),
        "global_step": pd.Series([step.global_step for step, _ in rows], dtype="int64"),
        "warmup": pd.Series([step.warmup for step, _ in rows], dtype="bool"),
    }
    integers = {"seq": "int64", "bytes": "int64", "issue_ns": "int64", "start_ns": "Int64", "end_ns": "Int64"}
    for name in Collective.__struct_fields__:
        columns[name] = pd.Series([getattr(row, name) for _, row in rows], dtype=integers.get(name, "object"))
    columns["duration_ms"] = _milliseconds((row.start_ns, row.end_ns) for _, row in rows)
    columns["queued_ms"] = _milliseconds((row.issue_ns, row.start_ns) for _, row in rows)
    return pd.DataFrame(columns)


def _steps(run: Run) -> list[Step]:
    return [step for record in run.records.values() for step in record.steps]


def _value(step: Step, name: str) -> float | None:
    """A kind that a step does not mention was not used in it: 0, unless communication was not seen (null)."""
    if name not in step.overlap and name in _KIND_METRICS and step.overlap.get("comm_ms") is not None:
        return 0.0
    return step.overlap.get(name)


def _milliseconds(spans: Iterable[tuple[int | None, int | None]]) -> pd.Series[float]:
    lengths = [None if start is None or end is None else (end - start) / NS_PER_MS for start, end in spans]
    return pd.Series(lengths, dtype="float64")
