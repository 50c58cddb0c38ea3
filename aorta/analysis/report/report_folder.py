"""Where a report is put together: runs are read and compared, then `summary.json`, pictures and the page are written.

    report = write_report({"base": "artifacts/base", "new": "artifacts/new"}, Path("out"), "base", "new")
    print(report.text)

Must not leave a picture or a table of an earlier report beside the numbers of this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from aorta.analysis.compare.launch_set import Subject, read_subjects
from aorta.analysis.compare.verdict import Rules
from aorta.analysis.documents import as_json, known
from aorta.analysis.documents.comparison import Summary
from aorta.analysis.load.engines import Engine
from aorta.analysis.load.locations import Archives, Location
from aorta.analysis.report.html.page_content import PAGE_FILE, write_page
from aorta.analysis.report.pictures import pictures
from aorta.analysis.report.report_tables import remove_tables, write_tables
from aorta.analysis.report.source_facts import notes_of
from aorta.analysis.report.terminal_text import brief_text, full_text
from aorta.analysis.summary import SUMMARY_FILE, summarize
from aorta.analysis.table_files import FORMATS
from aorta.command_line import to_stderr
from aorta.errors import InputError
from aorta.records.files import decode_json, json_text, read_small, whole_file
from aorta.records.run_files import REPORT_EVENTS, TENSORBOARD_DIR
from aorta.terminal_style import PLAIN, Style, wrapped

TABLES_DIR: Final = "tables"
_SUMMARY: Final = msgspec.json.Decoder(dict[str, Any])


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
        found: dict[str, Any] = as_json(self.content)
        return found


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
        sources: label -> run folder, launch set, archive of one, or where traces are (`load.locations`); of a run on
            nodes without a shared disk, their folders.
        reference, candidate: labels among them.
        engine: where files are read.
        comm_patterns: more patterns of communication kernels' names.
        rules: how launch sets are judged.
        finish: called with the summary before anything is written, and may add to it.
        html: write the page too.
        brief: `text` has the answer alone.
        style: of `text`.
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
        named = archives.as_given if html else None
        with _writable(output):
            folder = output / TABLES_DIR
            with ExitStack() as files:  # a disk that is full leaves the earlier report as it was
                written, not_drawn = _files(subjects, summary, output, (reference, candidate), named, files)
                data = [] if tables is None else write_tables(subjects, summary, folder, tables, engine, files)
            for name in not_drawn:
                (output / name).unlink(missing_ok=True)
            remove_tables(folder, but=data)
            for path in (output / TENSORBOARD_DIR).glob(f"*{REPORT_EVENTS}"):
                path.unlink()
        written += data
        if brief:
            notes = {label: notes_of(each.dataset, summary.datasets[label]) for label, each in subjects.items()}
            text = brief_text(summary, written, notes, style)
        else:
            datasets = {label: subject.dataset for label, subject in subjects.items()}
            text = full_text(datasets, summary, _files_block(written, not_drawn), style)
        text = archives.as_given(text)
    return Report(text, summary, tuple(written), not_drawn)


def _files(
    subjects: Mapping[str, Subject],
    summary: Summary,
    output: Path,
    compared: tuple[str | None, str | None],
    named: Callable[[Any], Any] | None,
    files: ExitStack,
) -> tuple[list[Path], dict[str, str]]:
    """Write every file of a report, under their names once `files` closes; returns those written, and why others were
    not. `named`: puts what was given in place of a temporary folder; None: no page.
    """
    not_drawn: dict[str, str] = {}
    output.mkdir(parents=True, exist_ok=True)
    written = [output / SUMMARY_FILE]
    if others := _reported_on(written[0]) - _runs(as_json(summary)):
        to_stderr(f"{output}: replaces the report on {', '.join(sorted(others))}; --output DIR keeps both")
    files.enter_context(whole_file(written[0])).write_text(json_text(as_json(summary)), encoding="utf-8")
    datasets = {label: subject.dataset for label, subject in subjects.items()}

    def page(path: Path) -> str | None:
        if named is None:
            return "not asked for"
        write_page(datasets, summary, path, named)
        return None

    reference, candidate = compared
    sides = None if reference is None or candidate is None else (datasets[reference], datasets[candidate])
    for name, draw in (*pictures([*datasets.values()], sides), (PAGE_FILE, page)):
        reason = draw(files.enter_context(whole_file(output / name)))
        if reason is None:
            written.append(output / name)
        else:
            not_drawn[name] = reason
    return written, not_drawn


def _reported_on(path: Path) -> set[str]:
    """Return the runs of an earlier report; none where there is none, or it cannot be read."""
    try:
        earlier = decode_json(read_small(path), _SUMMARY)
        return _runs(earlier)
    except (OSError, ValueError, AttributeError, LookupError, TypeError):
        return set()


def _runs(summary: Mapping[str, Any]) -> set[str]:
    """Return the runs of a `summary.json` by their ids; traces of other tools, which have none, by where they are."""
    sources = [entry["source"] for entry in summary["datasets"].values()]
    return {str(source.get("run_id") or source["path"]) for source in sources}


@contextmanager
def _writable(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{error.filename or output}: cannot be written: {error.strerror or error}. Choose another folder with "
            "--output DIR"
        ) from error


def _files_block(written: Sequence[Path], not_drawn: Mapping[str, str]) -> str:
    """Return where each file is, the page first, and which pictures there are none of."""
    kinds = {PAGE_FILE: "page", SUMMARY_FILE: "summary"}
    ordered = sorted(written, key=lambda path: [*kinds].index(path.name) if path.name in kinds else len(kinds))
    others = {True: "table", False: "picture"}
    lines = [f"{kinds.get(path.name) or others[path.name.endswith(FORMATS)]:<9}{path}" for path in ordered]
    return "\n".join([*lines, *(wrapped([f"not drawn: {name}: {reason}"]) for name, reason in not_drawn.items())])
