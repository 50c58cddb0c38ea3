"""Where a report is put together: runs are read and compared, then `summary.json`, pictures and the page are written.

Must not leave a picture of an earlier report beside the numbers of this one. An earlier page stays where none is asked
for: whoever asks for numbers alone has not asked for anything to be deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from aorta.analysis.cautions import notes_of
from aorta.analysis.compare.launch_set import Subject, read_subjects
from aorta.analysis.compare.verdict import Rules
from aorta.command_line import to_stderr
from aorta.documents import as_json, known
from aorta.documents.comparison import Summary
from aorta.errors import InputError
from aorta.read.engines import Engine
from aorta.read.locations import Location
from aorta.records.files import decode_json, json_text, read_small, whole_file
from aorta.records.run_files import REPORT_EVENTS, TENSORBOARD_DIR
from aorta.report.page.page_content import PAGE_FILE, write_page
from aorta.report.picture import draw_timeline
from aorta.report.summary import SUMMARY_FILE, summarize
from aorta.report.text import brief_text, full_text
from aorta.terminal_style import PLAIN, Style, wrapped


@dataclass(frozen=True)
class Report:
    """`text` is for people, `content` is what `summary.json` holds, `not_drawn` says why a picture is missing, and
    `subjects` has what was read.
    """

    text: str
    content: Summary
    files: tuple[Path, ...]
    not_drawn: Mapping[str, str]
    subjects: Mapping[str, Subject]

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
) -> Report:
    """Read, aggregate, compare (when both names are given), draw and write. Files of an earlier report are replaced.

    Args:
        sources: label -> run folder, launch set, or where traces are (`read.locations`); of a run on
            nodes without a shared disk, their folders.
        engine: where files are read.
        comm_patterns: more patterns of communication kernels' names.
        finish: called with the summary before anything is written, and may add to it.
        brief: `text` has the answer alone.

    Raises:
        InputError: a folder cannot be read or has no step, launches are not alike, or `output` cannot be written.
    """
    rules = rules or Rules()
    subjects = read_subjects(sources, rules, engine, comm_patterns)
    summary = summarize(subjects, reference, candidate, rules)
    for entry in summary.datasets.values():  # a run without a step is reported on where an autopsy says why
        if not entry.steps.rank_steps_read and known(entry.autopsy) is None:
            endings = [f"rank {rank}: {end}" for rank, end in entry.health.endings.items() if end != "completed"]
            raise InputError("; ".join([f"{entry.source.path}: {entry.reason}", *endings[:1]]))
    if finish is not None:
        finish(summary)
    datasets = {label: subject.dataset for label, subject in subjects.items()}
    written, not_drawn = [output / SUMMARY_FILE], dict[str, str]()
    content = json_text(as_json(summary))
    try:
        with ExitStack() as files:  # a disk that is full leaves the earlier report as it was
            output.mkdir(parents=True, exist_ok=True)
            if others := _reported_on(written[0]) - _runs(msgspec.json.decode(content)):
                to_stderr(f"{output}: replaces the report on {', '.join(sorted(others))}; --output DIR keeps both")
            files.enter_context(whole_file(written[0])).write_text(content, encoding="utf-8")
            for label, dataset in datasets.items():
                path = output / f"{label}_timeline.png"
                reason = draw_timeline(dataset, files.enter_context(whole_file(path)))
                if reason is None:
                    written.append(path)
                else:
                    not_drawn[path.name] = reason
            if html:
                written.append(output / PAGE_FILE)
                write_page(datasets, summary, files.enter_context(whole_file(written[-1])))
        earlier = [output / name for name in not_drawn]
        earlier += (output / TENSORBOARD_DIR).glob(f"*{REPORT_EVENTS}")
        for path in earlier:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            f"{error.filename or output}: cannot be written: {error.strerror or error}. Choose another folder with "
            "--output DIR"
        ) from error
    if brief:
        entries = summary.datasets
        notes = {label: notes_of(dataset, entries[label], all_of_record=False) for label, dataset in datasets.items()}
        text = brief_text(summary, written, notes, style)
    else:
        text = full_text(datasets, summary, _files_block(written, not_drawn), style)
    return Report(text, summary, tuple(written), not_drawn, subjects)


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
    kinds = {PAGE_FILE: "page", SUMMARY_FILE: "summary"}
    named = [(kinds.get(path.name, "picture"), path) for path in written]
    named.sort(key=lambda item: ("page", "summary", "picture").index(item[0]))
    missing = [wrapped([f"not drawn: {name}: {reason}"]) for name, reason in not_drawn.items()]
    return "\n".join([*(f"{kind:<9}{path}" for kind, path in named), *missing])
