"""The tables of a report as files: steps, collectives and metrics of every dataset, and the kernels of traces, for
spreadsheets and data frames.

    write_tables(subjects, summary, Path("reports/a/tables"), "csv")

One row a step, a rank and a launch; one row a collective and a rank; one row a metric of a dataset, and of the
comparison; of traces one row a kernel, a GEMM, a stream or a counter on a device. Every file always has the
same columns (artifacts/README.md); what a source does not have is missing. Must not: compute a value that `frames` or
the summary does not have, or hold more than one launch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pandas as pd

from aorta.analysis import steps as steps_of
from aorta.analysis.compare.launch_set import Subject
from aorta.analysis.devices import STEP_COLUMNS as DEVICE_COLUMNS
from aorta.analysis.documents import as_json, known
from aorta.analysis.documents.comparison import Comparison
from aorta.analysis.documents.summary import Summary
from aorta.analysis.frames import FRAME_ROWS, RATIO_BOUNDS, STEP_COLUMNS, STEP_MS, iter_collectives
from aorta.analysis.load.engines import Engine
from aorta.analysis.metrics import METRICS_OF_STEPS
from aorta.analysis.report.kernels import KERNEL_TABLES, kernel_frames
from aorta.analysis.table_files import FORMATS, write_table
from aorta.analysis.tables import Run
from aorta.records.files import whole_file

TABLES: Final = ("steps", "collectives", "metrics", "comparison", *KERNEL_TABLES)
STEPS: Final = ("label", "launch", *STEP_COLUMNS, STEP_MS, *RATIO_BOUNDS, *METRICS_OF_STEPS, *DEVICE_COLUMNS)
COLLECTIVES: Final = (
    *("label", "launch", "rank", "global_step", "warmup", "kind", "group", "group_size", "seq", "instance"),
    *("bytes", "dtype", "issue_ns", "start_ns", "end_ns", "end_source", "duration_ms", "queued_ms", "transfer_ms"),
    *("wait_ms", "arrival_skew_ms", "arrival_skew_bound_ms", "algbw_gb_per_s", "busbw_gb_per_s"),
    *("transfer_reason", "bandwidth_reason"),
)
_DESCRIBED: Final = ("count", "nulls", "median", "p5", "p95", "mean", "min", "max", "rank_spread", "ratio_of_sums")
METRICS: Final = ("label", "metric", "unit", "better", *_DESCRIBED, "source", "at_least", "at_most", "reason")
COMPARISON: Final = (
    *("reference_label", "candidate_label", "metric", "unit", "better", "role", "reference", "candidate"),
    *("difference", "difference_low", "difference_high", "quotient", "p", "p_corrected", "margin"),
    *("reference_launches", "candidate_launches", "verdict", "reason"),
)
_WHOLE: Final = frozenset(
    {"rank", "epoch", "step", "global_step", "group_size", "seq", "instance", "bytes", "count", "nulls"}
    | {"reference_launches", "candidate_launches"}
)
_WORDS: Final = frozenset(
    {"label", "launch", "kind", "group", "dtype", "end_source", "transfer_reason", "bandwidth_reason", "metric", "unit"}
    | {"better", "reason", "source", "reference_label", "candidate_label", "role", "verdict"}
)
_UNKNOWN_IS_NEGATIVE: Final = ("rank", "seq", "bytes")
"""Columns in which a source that does not say has a code below 0."""


def write_tables(
    subjects: Mapping[str, Subject],
    summary: Summary,
    folder: Path,
    form: str,
    engine: Engine | None,
    files: ExitStack,
) -> list[Path]:
    """Write `steps`, `collectives`, `metrics`, where two were compared `comparison`, and where there are traces those
    of `KERNEL_TABLES`, with a column `label` before the others; under their names once `files` closes.

    Args:
        form: of `table_files.FORMATS`.
        engine: where launches of a set are read again, one at a time.

    Raises:
        InputError: a launch can no longer be read. OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tables = {
        "steps": _steps(subjects, engine),
        "collectives": _collectives(subjects, engine),
        "metrics": iter([_typed(pd.DataFrame(_metric_rows(summary), columns=list(METRICS)))]),
    }
    compared = known(summary.comparison)
    if compared is not None:
        rows = _comparison_rows(compared)
        tables["comparison"] = iter([_typed(pd.DataFrame(rows, columns=list(COMPARISON)))])
    tables |= _kernels(summary)
    written: list[Path] = []
    for name, frames in tables.items():
        path = folder / f"{name}.{form}"
        write_table(frames, files.enter_context(whole_file(path)))
        written.append(path)
    return written


def _kernels(summary: Summary) -> dict[str, Iterator[pd.DataFrame]]:
    """Return the kernel tables of all datasets that are traces; none where no dataset is."""
    found = {label: each.traces for label, each in summary.datasets.items() if each.traces}
    made = {label: kernel_frames(traces) for label, traces in found.items()}
    for label, frames in made.items():
        for frame in frames.values():
            frame.insert(0, "label", pd.Series(label, index=frame.index, dtype="string"))
    return {name: iter([frames[name] for frames in made.values()]) for name in KERNEL_TABLES} if made else {}


def remove_tables(folder: Path, but: Collection[Path] = ()) -> None:
    """Remove the tables of an earlier report, in all formats, except those just written."""
    for path in (folder / f"{name}.{form}" for name in TABLES for form in FORMATS):
        if path not in but:
            path.unlink(missing_ok=True)
    with suppress(OSError):  # not there, or something of the user's is in it
        folder.rmdir()


def _launches(subjects: Mapping[str, Subject], engine: Engine | None) -> Iterator[tuple[str, str | None, Run]]:
    """Yield the label, name of the launch in its set (None for a single run), and the run."""
    for label, subject in subjects.items():
        for dataset in subject.datasets(engine):
            yield label, None if subject.launches is None else Path(dataset.run.location).name, dataset.run


def _steps(subjects: Mapping[str, Subject], engine: Engine | None) -> Iterator[pd.DataFrame]:
    yield _typed(pd.DataFrame(columns=list(STEPS)))  # a file has its columns even where nobody made a step
    for label, launch, run in _launches(subjects, engine):
        longest = max((len(tables.steps) for tables in run.ranks.values()), default=0)
        together, ranks = max(1, FRAME_ROWS // max(1, longest)), list(run.ranks)
        for first in range(0, len(ranks), together):
            part = {rank: run.ranks[rank] for rank in ranks[first : first + together]}
            yield _named(steps_of(replace(run, ranks=part)), STEPS, label, launch)


def _collectives(subjects: Mapping[str, Subject], engine: Engine | None) -> Iterator[pd.DataFrame]:
    yield _typed(pd.DataFrame(columns=list(COLLECTIVES)))  # a file has its columns even where nothing communicated
    for label, launch, run in _launches(subjects, engine):
        for frame in iter_collectives(run, rows=FRAME_ROWS):
            yield _named(frame, COLLECTIVES, label, launch)


def _named(frame: pd.DataFrame, columns: tuple[str, ...], label: str, launch: str | None) -> pd.DataFrame:
    return _typed(frame.assign(label=label, launch=launch).reindex(columns=list(columns)))


def _typed(frame: pd.DataFrame) -> pd.DataFrame:
    """Give columns the same types whatever a frame holds: integers and text that may be missing, else floats."""
    for name in _UNKNOWN_IS_NEGATIVE:
        if name in frame:
            frame[name] = frame[name].astype("Int64").mask(frame[name].lt(0).fillna(value=False))
    return frame.astype({name: _kind(name) for name in frame.columns})


def _kind(name: str) -> str:
    """Return the type of a column."""
    if name in _WORDS:
        return "string"
    if name in {"warmup", "by_kernels"}:
        return "bool"
    return "Int64" if name in _WHOLE or name.endswith("_ns") else "float64"


def _metric_rows(summary: Summary) -> list[dict[str, Any]]:
    return [
        {
            "label": label,
            "metric": name,
            **as_json(summary.metrics[name]),
            **as_json(entry),
            **as_json(entry.bounds or {}),
        }
        for label, dataset in summary.datasets.items()
        for name, entry in dataset.described.items()
    ]


def _comparison_rows(compared: Comparison) -> list[dict[str, Any]]:
    rows = []
    for name, entry in compared.metrics.items():
        interval, launches = entry.difference_interval, entry.launches or {}
        rows.append(
            {
                **{key: value for key, value in as_json(entry).items() if key in COMPARISON},
                "reference_label": compared.reference,
                "candidate_label": compared.candidate,
                "metric": name,
                "difference_low": interval.low if interval else None,
                "difference_high": interval.high if interval else None,
                "reference_launches": launches.get("reference"),
                "candidate_launches": launches.get("candidate"),
                "reason": entry.verdict_reason or entry.judgement_reason,
            }
        )
    return rows
