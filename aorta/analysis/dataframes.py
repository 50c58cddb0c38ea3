"""Provides tables of a run as pandas frames: steps, collectives matched across ranks, and, over all ranks, the ranges
and counters that the caller of `aorta.record` named.

Must not: fill the memory without being asked to (`iter_collectives`), hold a run's lines, compute a metric or an
overlap again (metrics come from the tables), leave out warm-up rows (they are flagged; aggregates drop them), or load
pandas before a frame is asked for: a report needs none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aorta.documents.metrics import (
    BUSBW_FACTOR,
    GROUP_OF_ONE,
    HOST_BOUND,
    MADE_OF_OTHERS,
    NO_BYTES,
    NO_SIZE,
    TOO_SHORT,
    in_order,
)
from aorta.errors import InputError
from aorta.read.frames import KIND_METRICS, KINDS_KNOWN, LOSSES, NO_TIME, UNKNOWN, Bools, Ints
from aorta.read.matching import (
    OK,
    REASONS,
    CollectiveRows,
    MatchedCollectives,
    NumberedNames,
    matched_pieces,
)
from aorta.read.run import Run
from aorta.timeline.overlap import NOT_SAMPLED, NS_PER_MS

if TYPE_CHECKING:
    import pandas as pd

STEP_COLUMNS = (
    "rank",
    "epoch",
    "step",
    "global_step",
    "warmup",
    "by_kernels",
    "drawn",
    *LOSSES,
    "start_mono_ns",
    "end_mono_ns",
    "t_start_ns",
    "t_end_ns",
)
STEP_MS = "step_ms"
RATIO_BOUNDS = ("overlap_ratio_at_least", "overlap_ratio_at_most")
"""Of a step in which the host set the pace, so that its marks leave the ratio open (`aorta.analysis.pace`)."""
_NO_REASON = "the record gives no reason"


def steps_frame(run: Run, columns: Sequence[str] | None = None) -> pd.DataFrame:
    """Return one row per rank and step, by rank, then global step.

    Columns: `STEP_COLUMNS`, `step_ms` (start to end, milliseconds), `RATIO_BOUNDS` and one per metric of the record.
    Times in nanoseconds are int64 (W14); null is NaN. Steps with `by_kernels` are those of a calibration, measured by
    the profiler's kernels and slowed by it: not to be pooled with the others (W29). With `instrument.every` those to
    pool have the largest `drawn`; it is 0 in those that were not drawn.

    Args:
        columns: only these, for runs too large for all of them (8 bytes per column and rank-step).
    """
    import pandas as pd

    names = (*STEP_COLUMNS, STEP_MS, *RATIO_BOUNDS, *metric_names(run)) if columns is None else columns
    return pd.DataFrame({name: step_column(run, name) for name in names})


def step_column(run: Run, name: str) -> np.ndarray:
    """Return one column of `steps_frame`; all NaN where the source does not have it."""
    steps = run.steps
    if name == "rank":
        return run.rank_of_step.astype(np.int64)
    if name == STEP_MS:
        known = "window_ms" not in steps.metrics or ~np.isnan(steps.metrics["window_ms"])
        return np.where(known, steps.length_ns / NS_PER_MS, np.nan)  # a window that breaks an invariant is none
    if name in RATIO_BOUNDS:
        return steps.ends("overlap_ratio")[RATIO_BOUNDS.index(name)]
    if name in STEP_COLUMNS and name not in LOSSES:
        column = getattr(steps, name)
        return np.full(len(steps), np.nan) if column is None else column
    return steps.column(name)


def metric_names(run: Run) -> list[str]:
    """Return the metrics that any step of the run has, in the order of `documents.metrics`."""
    known = run.steps.metrics.keys()
    made = {name for name, metric in MADE_OF_OTHERS.items() if known >= set(metric.parts)}
    return in_order(known | made)


def null_reasons(run: Run, name: str, chosen: Bools | None = None) -> Counter[str]:
    """Return why a metric (or `loss`) is null, in how many of the `chosen` rank-steps; None: those after warm-up."""
    steps, reasons = run.steps, Counter[str]()
    made = MADE_OF_OTHERS.get(name)
    others: tuple[str, ...] = KINDS_KNOWN if name in KIND_METRICS else KINDS_KNOWN[:1] if name != "loss" else ()
    others = others if made is None else made.parts
    null = np.isnan(steps.column(name)) & (steps.used if chosen is None else chosen)
    if steps.coverages:  # the lines of steps that were passed over name no metric
        passed_over = np.array([coverage.reason == NOT_SAMPLED for coverage in steps.coverages] + [False])[
            steps.coverage
        ]
        if count := int((null & passed_over).sum()):
            reasons[NOT_SAMPLED] = count
        null &= ~passed_over
    indices, first, counts = np.unique(steps.reason[null], return_index=True, return_counts=True)
    for index in np.argsort(first):
        of_step = steps.reasons[indices[index]]
        of_others = [of_step[key] for key in others if key in of_step and (made or of_step[key] != HOST_BOUND)]
        reasons[of_step.get(name) or next(iter(of_others), _NO_REASON)] += int(counts[index])
    return reasons


ROW_LIMIT = 2_000_000
"""Most rows of one frame, about 1 GB; a thousand ranks with a thousand steps of ten collectives have ten million."""
FRAME_ROWS = 1 << 17
"""Rows of one frame of `iter_collectives`: about 60 MB."""


def iter_collectives(run: Run, steps: tuple[int, int] | None = None, rows: int = FRAME_ROWS) -> Iterator[pd.DataFrame]:
    """Yield the collectives of a run in frames, in order of global step, each by rank, then order of issue.

    Columns: `rank`, `global_step`, `warmup` (no aggregate has its step); those of `records.schema.Collective`, of which
    the `_ns` offsets count from the start of the rank's own step; `duration_ms` and `queued_ms` (NaN where an end was
    not seen); and what is known only across ranks: `members` (the group's ranks, None when unknown) and `group_size`,
    `instance` (rows of one instance are the same collective on different ranks; numbering continues from frame to
    frame), `transfer_ms`, `wait_ms`, `arrival_skew_ms`, `arrival_skew_bound_ms`, `algbw_gb_per_s`, `busbw_gb_per_s`,
    and the reasons for nulls.

    Args:
        steps: a half-open range of global steps; None: all.
        rows: approximate size of a frame, which has at least one step of all ranks.
    """
    names, shift = NumberedNames(run), 0
    for piece, matched in matched_pieces(run, names, steps, rows):
        yield _frame(run, names, piece, matched, shift)
        shift += len(matched.by)


def collectives_frame(
    run: Run,
    ranks: Collection[int] | None = None,
    steps: tuple[int, int] | None = None,
    kinds: Collection[str] | None = None,
) -> pd.DataFrame:
    """Return the collectives that pass the filters, by rank, then order of issue; matched across all ranks first.

    Raises:
        InputError: more than `ROW_LIMIT` rows are left.
    """
    import pandas as pd

    names, nothing = NumberedNames(run), np.empty(0, np.int32)
    none = CollectiveRows(
        slice(0), run.collectives.take(slice(0)), nothing, nothing.astype(np.int64), nothing > 0, nothing > 0
    )
    parts, total = [_frame(run, names, none, MatchedCollectives(none, names), 0)], 0
    for frame in iter_collectives(run, steps):
        keep = pd.Series(data=True, index=frame.index)
        if ranks is not None:
            keep &= frame["rank"].isin(list(ranks))
        if kinds is not None:
            keep &= frame["kind"].isin(list(kinds))
        parts.append(frame[keep])
        total += len(parts[-1])
        if total > ROW_LIMIT:
            raise InputError(
                f"{run.location}: more than {ROW_LIMIT} collectives are left, of {len(run.collectives)} in the run: "
                "choose with ranks=, steps=, kinds=, or go through aorta.analysis.iter_collectives(...)"
            )
    whole = pd.concat([part for part in parts if len(part)]) if total else parts[0]
    return whole.sort_values("rank", kind="stable", ignore_index=True)


def _frame(
    run: Run, names: NumberedNames, piece: CollectiveRows, matched: MatchedCollectives, shift: int
) -> pd.DataFrame:
    import pandas as pd

    rows, every, of_row = piece.frame, run.collectives.names, matched.by.of_row

    def as_objects(words: Sequence[Any], codes: np.ndarray = rows.name) -> pd.Series[Any]:
        return pd.Series(words, dtype="object").iloc[codes].reset_index(drop=True)

    kind = as_objects([name.kind for name in every])
    size_bytes = as_objects([name.bytes for name in every]).astype("int64")
    group_size = _nullable(names.size[rows.name], UNKNOWN)
    clear, duration_ms = matched.reason[of_row] == OK, _milliseconds(rows.start_ns, rows.end_ns)
    transfer_ms = pd.Series(np.where(clear, matched.transfer_ns[of_row] / NS_PER_MS, np.nan))
    # In a lockstep kind no rank ends before the last arrives: each duration is at least its rank's lead on the last.
    skew_bound_ms = np.where(clear, matched.longest_ns[of_row] / NS_PER_MS, np.nan)
    unmatched = as_objects([reason or None for reason in REASONS], matched.reason[of_row])
    ranks, no_bandwidth = group_size.astype("float64"), unmatched
    for applies, why in (
        (size_bytes < 0, NO_SIZE),
        (size_bytes == 0, NO_BYTES),
        (ranks == 1, GROUP_OF_ONE),
        (transfer_ms == 0, TOO_SHORT),
    ):
        no_bandwidth = no_bandwidth.mask(no_bandwidth.isna() & applies, why)
    algbw = size_bytes / 1e9 / (transfer_ms / 1e3).where(no_bandwidth.isna())  # GB/s of 1e9 bytes
    return pd.DataFrame(
        {
            "rank": piece.rank.astype(np.int64),
            "global_step": piece.global_step,
            "warmup": ~piece.used,
            "kind": kind,
            "group": as_objects([name.group for name in every]),
            "seq": rows.seq,
            "bytes": size_bytes,
            "dtype": as_objects([name.dtype for name in every]),
            "issue_ns": _nullable(rows.issue_ns),
            "start_ns": _nullable(rows.start_ns),
            "end_ns": _nullable(rows.end_ns),
            "end_source": as_objects([name.end_source for name in every]),
            "duration_ms": duration_ms,
            "queued_ms": _milliseconds(rows.issue_ns, rows.start_ns),
            "members": as_objects([members or None for members in run.members]),
            "group_size": group_size,
            "instance": of_row + shift,
            "transfer_reason": unmatched,
            "transfer_ms": transfer_ms,
            "wait_ms": duration_ms - transfer_ms,
            "arrival_skew_bound_ms": skew_bound_ms,
            "arrival_skew_ms": skew_bound_ms - transfer_ms,
            "bandwidth_reason": no_bandwidth,
            "algbw_gb_per_s": algbw,
            "busbw_gb_per_s": algbw * kind.map(BUSBW_FACTOR) * (ranks - 1) / ranks,
        }
    )


def _nullable(values: Ints, null: int = NO_TIME) -> pd.Series[int]:
    import pandas as pd

    return pd.Series(pd.arrays.IntegerArray(values, values == null))


def _milliseconds(start: Ints, end: Ints) -> np.ndarray:
    return np.where((start == NO_TIME) | (end == NO_TIME), np.nan, (end - start) / NS_PER_MS)


_RANGES = {
    "rank": "int64",
    "global_step": "int64",
    "name": "object",
    "thread": "int64",
    "depth": "int64",
    "start_mono_ns": "int64",
    "end_mono_ns": "int64",
    "error": "object",
    "duration_ms": "float64",
}


def ranges_frame(run: Run) -> pd.DataFrame:
    """Return one row per range, by rank, step and start: `rank`, `global_step` (the step that ended first after it),
    `name`, `thread` (0: the one that records), `depth`, `start_mono_ns` and `end_mono_ns` (the rank's own clock),
    `error` (type of the exception that ended it, or None), `duration_ms`.
    """
    import pandas as pd

    rows = []
    for rank, tables in run.ranks.items():
        for step, origin, ranges in tables.details.user_ranges():
            for row in ranges:
                times = origin + row.start_ns, origin + row.end_ns
                length_ms = (row.end_ns - row.start_ns) / NS_PER_MS
                rows.append((rank, step, row.name, row.thread, row.depth, *times, row.error, length_ms))
    frame = pd.DataFrame(rows, columns=list(_RANGES)).astype(_RANGES)
    return frame.sort_values(["rank", "start_mono_ns"], kind="stable", ignore_index=True)
