"""Where a report is put together: runs are read and compared, then `summary.json`, pictures, the page and tables for
spreadsheets are written.

Must not leave a file of an earlier report beside the numbers of this one, or hold more than one launch for a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import pandas as pd

from aorta.analysis import steps as steps_of
from aorta.analysis.compare.launch_set import Subject, read_subjects
from aorta.analysis.compare.verdict import Rules
from aorta.analysis.dataframes import FRAME_ROWS, RATIO_BOUNDS, STEP_COLUMNS, STEP_MS, iter_collectives
from aorta.analysis.devices import STEP_COLUMNS as DEVICE_COLUMNS
from aorta.command_line import to_stderr
from aorta.documents import as_json, known
from aorta.documents.comparison import Summary
from aorta.documents.metrics import METRICS_OF_STEPS
from aorta.errors import InputError
from aorta.read.engines import Engine
from aorta.read.locations import Archives, Location
from aorta.read.run import Run
from aorta.records.files import decode_json, json_text, read_small, whole_file
from aorta.records.run_files import REPORT_EVENTS, TENSORBOARD_DIR
from aorta.report.kernel_tables import kernel_files
from aorta.report.page.page_content import PAGE_FILE, write_page
from aorta.report.picture import pictures
from aorta.report.run_tables import METRICS, comparison_table, metric_row, notes_of, pair_row
from aorta.report.summary import SUMMARY_FILE, summarize
from aorta.report.table_files import FORMATS, write_table
from aorta.report.tables import Column, Table, file_columns, frame, typed
from aorta.report.text import brief_text, full_text
from aorta.terminal_style import PLAIN, Style, wrapped

TABLES_DIR: Final = "tables"
TABLES: Final = ("steps", "collectives", "metrics", "comparison", "kernels", "gemms", "gaps", "counters")
STEPS: Final = file_columns(
    *("label", "launch", *STEP_COLUMNS, STEP_MS, *RATIO_BOUNDS, *METRICS_OF_STEPS, *DEVICE_COLUMNS)
)
COLLECTIVES: Final = file_columns(
    *("label", "launch", "rank", "global_step", "warmup", "kind", "group", "group_size", "seq", "instance"),
    *("bytes", "dtype", "issue_ns", "start_ns", "end_ns", "end_source", "duration_ms", "queued_ms", "transfer_ms"),
    *("wait_ms", "arrival_skew_ms", "arrival_skew_bound_ms", "algbw_gb_per_s", "busbw_gb_per_s"),
    *("transfer_reason", "bandwidth_reason"),
)
_UNKNOWN_IS_NEGATIVE: Final = ("rank", "seq", "bytes")
"""Columns in which a source that does not say has a code below 0."""


@dataclass(frozen=True)
class Report:
    """`text` is for people, `content` is what `summary.json` holds, `not_drawn` says why a picture is missing."""

    text: str
    content: Summary
    files: tuple[Path, ...]
    not_drawn: Mapping[str, str]

    @property
    def summary(self) -> dict[str, Any]:
        """`summary.json` as plain JSON values."""
        content: dict[str, Any] = as_json(self.content)
        return content


def write_report(
    sources: Mapping[str, Location],
    output: Path,
    reference: str | None = None,
    candidate: str | None = None,
    *,
    engine: Engine | None = None,
    comm_patterns: Sequence[str] = (),
    rules: Rules | None = None,
    finish: Callable[[Summary], object] | None = None,
    html: bool = True,
    brief: bool = False,
    style: Style = PLAIN,
    tables: str | None = None,
) -> Report:
    """Read, aggregate, compare (when both names are given), draw and write. Files of an earlier report are replaced.

    Args:
        sources: label -> run folder, launch set, archive of one, or where traces are (`read.locations`); of a run on
            nodes without a shared disk, their folders.
        engine: where files are read.
        comm_patterns: more patterns of communication kernels' names.
        finish: called with the summary before anything is written, and may add to it.
        brief: `text` has the answer alone.
        tables: write the tables too, in this format of `table_files.FORMATS`.

    Raises:
        InputError: a folder cannot be read or has no step, launches are not alike, or `output` cannot be written.
    """
    rules = rules or Rules()
    with Archives() as archives, archives.named():
        folders = {
            label: where if isinstance(where, tuple) else archives.folder_of(where) for label, where in sources.items()
        }
        subjects = read_subjects(folders, rules, engine, comm_patterns)
        summary = archives.as_given(summarize(subjects, reference, candidate, rules, engine))
        for entry in summary.datasets.values():  # a run without a step is reported on where an autopsy says why
            if not entry.steps.rank_steps_read and known(entry.autopsy) is None:
                endings = [f"rank {rank}: {end}" for rank, end in entry.health.endings.items() if end != "completed"]
                raise InputError("; ".join([f"{entry.source.path}: {entry.reason}", *endings[:1]]))
        if finish is not None:
            finish(summary)
        datasets = {label: subject.dataset for label, subject in subjects.items()}
        compared = None if reference is None or candidate is None else (datasets[reference], datasets[candidate])

        def page(path: Path) -> str | None:
            if not html:
                return "not asked for"
            write_page(datasets, summary, path, archives.as_given)
            return None

        written, not_drawn = [output / SUMMARY_FILE], dict[str, str]()
        try:
            with ExitStack() as files:  # a disk that is full leaves the earlier report as it was
                output.mkdir(parents=True, exist_ok=True)
                if others := _reported_on(written[0]) - _runs(as_json(summary)):
                    to_stderr(f"{output}: replaces the report on {', '.join(sorted(others))}; --output DIR keeps both")
                files.enter_context(whole_file(written[0])).write_text(json_text(as_json(summary)), encoding="utf-8")
                for name, draw in (*pictures([*datasets.values()], compared), (PAGE_FILE, page)):
                    reason = draw(files.enter_context(whole_file(output / name)))
                    if reason is None:
                        written.append(output / name)
                    else:
                        not_drawn[name] = reason
                if tables is not None:
                    (output / TABLES_DIR).mkdir(exist_ok=True)
                    for name, frames in _frames(subjects, summary, engine).items():
                        written.append(output / TABLES_DIR / f"{name}.{tables}")
                        write_table(frames, files.enter_context(whole_file(written[-1])))
            earlier = [output / TABLES_DIR / f"{name}.{form}" for name in TABLES for form in FORMATS]
            earlier += [output / name for name in not_drawn]
            earlier += (output / TENSORBOARD_DIR).glob(f"*{REPORT_EVENTS}")
            for path in set(earlier).difference(written):
                path.unlink(missing_ok=True)
            with suppress(OSError):  # not there, or something of the user's is in it
                (output / TABLES_DIR).rmdir()
        except OSError as error:
            raise InputError(
                f"{error.filename or output}: cannot be written: {error.strerror or error}. Choose another folder with "
                "--output DIR"
            ) from error
        if brief:
            notes = {label: notes_of(dataset, summary.datasets[label]) for label, dataset in datasets.items()}
            text = brief_text(summary, written, notes, style)
        else:
            text = full_text(datasets, summary, _files_block(written, not_drawn), style)
        text = archives.as_given(text)
    return Report(text, summary, tuple(written), not_drawn)


def _reported_on(path: Path) -> set[str]:
    """Return the runs of an earlier report; none where there is none, or it cannot be read."""
    try:
        return _runs(decode_json(read_small(path), msgspec.json.Decoder(dict[str, Any])))
    except (OSError, ValueError, AttributeError, LookupError, TypeError):
        return set()


def _runs(summary: Mapping[str, Any]) -> set[str]:
    """Return the runs of a `summary.json` by their ids; traces of other tools, which have none, by where they are."""
    sources = [entry["source"] for entry in summary["datasets"].values()]
    return {str(source.get("run_id") or source["path"]) for source in sources}


def _files_block(written: Sequence[Path], not_drawn: Mapping[str, str]) -> str:
    """Return where each file is, the page first, and which pictures there are none of."""
    kinds = {PAGE_FILE: "page", SUMMARY_FILE: "summary"}
    named = [(kinds.get(path.name, "table" if path.name.endswith(FORMATS) else "picture"), path) for path in written]
    named.sort(key=lambda each: ("page", "summary", "picture", "table").index(each[0]))
    missing = [wrapped([f"not drawn: {name}: {reason}"]) for name, reason in not_drawn.items()]
    return "\n".join([*(f"{kind:<9}{path}" for kind, path in named), *missing])


def _frames(
    subjects: Mapping[str, Subject], summary: Summary, engine: Engine | None
) -> dict[str, Iterator[pd.DataFrame]]:
    """Return every table of a report by its name, its rows frame by frame: `steps`, `collectives`, `metrics`, where two
    were compared `comparison`, and where there are traces those of kernels. Launches of a set are read again, one at a
    time, as the frames are asked for. Every table always has the same columns (artifacts/README.md).
    """
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
    return tables | {name: _kernels(traces, name) for name in next(iter(traces.values()), {})}


def _kernels(traces: Mapping[str, Mapping[str, Table]], name: str) -> Iterator[pd.DataFrame]:
    for label, found in traces.items():
        rows = frame(found[name])
        rows.insert(0, "label", pd.Series(label, index=rows.index, dtype="string"))
        yield rows


def _launches(subjects: Mapping[str, Subject], engine: Engine | None) -> Iterator[tuple[Run, dict[str, str | None]]]:
    """Yield each run with its label and the name of the launch in its set (None for a single run)."""
    for label, subject in subjects.items():
        for dataset in subject.datasets(engine):
            launch = None if subject.launches is None else Path(dataset.run.location).name
            yield dataset.run, {"label": label, "launch": launch}


def _steps(subjects: Mapping[str, Subject], engine: Engine | None) -> Iterator[pd.DataFrame]:
    yield _file_rows(pd.DataFrame(), STEPS)  # a file has its columns even where nobody made a step
    for run, names in _launches(subjects, engine):
        longest = max((len(tables.steps) for tables in run.ranks.values()), default=0)
        together = max(1, FRAME_ROWS // max(1, longest))
        for first in range(0, len(run.ranks), together):
            yield _file_rows(steps_of(run.of_ranks(first, first + together)).assign(**names), STEPS)


def _collectives(subjects: Mapping[str, Subject], engine: Engine | None) -> Iterator[pd.DataFrame]:
    yield _file_rows(pd.DataFrame(), COLLECTIVES)  # a file has its columns even where nothing communicated
    for run, names in _launches(subjects, engine):
        for rows in iter_collectives(run, rows=FRAME_ROWS):
            yield _file_rows(rows.assign(**names), COLLECTIVES)


def _file_rows(rows: pd.DataFrame, columns: Sequence[Column]) -> pd.DataFrame:
    """Return the columns of a file with their types; a code below 0 of a source that does not say is missing."""
    rows = rows.reindex(columns=[column.key for column in columns])
    for name in _UNKNOWN_IS_NEGATIVE:
        if name in rows:
            rows[name] = rows[name].astype("Int64").mask(rows[name].lt(0).fillna(value=False))
    return typed(rows, columns)
