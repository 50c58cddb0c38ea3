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
from typing import Final

import pandas as pd

from aorta.analysis import steps as steps_of
from aorta.analysis.compare.launch_set import Subject
from aorta.analysis.dataframes import FRAME_ROWS, RATIO_BOUNDS, STEP_COLUMNS, STEP_MS, iter_collectives
from aorta.analysis.devices import STEP_COLUMNS as DEVICE_COLUMNS
from aorta.analysis.documents import known
from aorta.analysis.documents.comparison import Summary
from aorta.analysis.load.engines import Engine
from aorta.analysis.metrics import METRICS_OF_STEPS
from aorta.analysis.report.kernels import kernel_files
from aorta.analysis.report.run_tables import METRICS, comparison_table, metric_row, pair_row
from aorta.analysis.report.tables import Column, Table, frame, typed
from aorta.analysis.run import Run
from aorta.analysis.table_files import FORMATS, write_table
from aorta.records.files import whole_file

TABLES: Final = ("steps", "collectives", "metrics", "comparison", "kernels", "gemms", "gaps", "counters")
_COUNTS: Final = frozenset({"rank", "epoch", "step", "global_step", "group_size", "seq", "instance", "bytes"})
_TEXTS: Final = frozenset({"label", "launch", "kind", "group", "dtype", "end_source"})


def _columns(*keys: str) -> tuple[Column, ...]:
    return tuple(Column(key, unit=_unit(key)) for key in keys)


def _unit(key: str) -> str:
    if key in _TEXTS or key.endswith("_reason"):
        return "text"
    if key in {"warmup", "by_kernels"}:
        return "flag"
    return "count" if key in _COUNTS or key.endswith("_ns") else ""


STEPS: Final = _columns("label", "launch", *STEP_COLUMNS, STEP_MS, *RATIO_BOUNDS, *METRICS_OF_STEPS, *DEVICE_COLUMNS)
COLLECTIVES: Final = _columns(
    *("label", "launch", "rank", "global_step", "warmup", "kind", "group", "group_size", "seq", "instance"),
    *("bytes", "dtype", "issue_ns", "start_ns", "end_ns", "end_source", "duration_ms", "queued_ms", "transfer_ms"),
    *("wait_ms", "arrival_skew_ms", "arrival_skew_bound_ms", "algbw_gb_per_s", "busbw_gb_per_s"),
    *("transfer_reason", "bandwidth_reason"),
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
    of kernels, with a column `label` before the others; under their names once `files` closes.

    Args:
        form: of `table_files.FORMATS`.
        engine: where launches of a set are read again, one at a time.

    Raises:
        InputError: a launch can no longer be read. OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    described = [
        metric_row(label, name, entry)
        for label, dataset in summary.datasets.items()
        for name, entry in dataset.described.items()
    ]
    tables = {
        "steps": _steps(subjects, engine),
        "collectives": _collectives(subjects, engine),
        "metrics": iter([frame(Table("metrics", "", METRICS, described))]),
    }
    compared = known(summary.comparison)
    if compared is not None:
        pairs = [pair_row(name, pair, compared) for name, pair in compared.metrics.items()]
        tables["comparison"] = iter([frame(replace(comparison_table(compared), rows=pairs))])
    traces = {label: kernel_files(each.traces) for label, each in summary.datasets.items() if each.traces}
    for name in next(iter(traces.values()), {}):
        tables[name] = (_labelled(frame(found[name]), label) for label, found in traces.items())
    written: list[Path] = []
    for name, frames in tables.items():
        path = folder / f"{name}.{form}"
        write_table(frames, files.enter_context(whole_file(path)))
        written.append(path)
    return written


def _labelled(rows: pd.DataFrame, label: str) -> pd.DataFrame:
    rows.insert(0, "label", pd.Series(label, index=rows.index, dtype="string"))
    return rows


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
    yield _file_rows(pd.DataFrame(), STEPS)  # a file has its columns even where nobody made a step
    for label, launch, run in _launches(subjects, engine):
        longest = max((len(tables.steps) for tables in run.ranks.values()), default=0)
        together = max(1, FRAME_ROWS // max(1, longest))
        for first in range(0, len(run.ranks), together):
            part = steps_of(run.of_ranks(first, first + together))
            yield _file_rows(part.assign(label=label, launch=launch), STEPS)


def _collectives(subjects: Mapping[str, Subject], engine: Engine | None) -> Iterator[pd.DataFrame]:
    yield _file_rows(pd.DataFrame(), COLLECTIVES)  # a file has its columns even where nothing communicated
    for label, launch, run in _launches(subjects, engine):
        for rows in iter_collectives(run, rows=FRAME_ROWS):
            yield _file_rows(rows.assign(label=label, launch=launch), COLLECTIVES)


def _file_rows(rows: pd.DataFrame, columns: tuple[Column, ...]) -> pd.DataFrame:
    """Return the columns of a file with their types; a code below 0 of a source that does not say is missing."""
    rows = rows.reindex(columns=[column.key for column in columns])
    for name in _UNKNOWN_IS_NEGATIVE:
        if name in rows:
            rows[name] = rows[name].astype("Int64").mask(rows[name].lt(0).fillna(value=False))
    return typed(rows, columns)
