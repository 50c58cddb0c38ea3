"""Where a report is put together: `summary.json` from labelled inputs, the comparison of two of them and what would
gain most in each, replayed from the last steps of its record (docs/what-if.md); then it, pictures and page are written.

The replay is bounded, so that the report of a large run stays quick. Must not: compute a value that `aggregate`,
`compare`, `attribution` or `whatif` defines; leave out why there is no prediction; or leave a picture of an earlier
report beside the numbers of this one. An earlier page stays where none is asked for: whoever asks for numbers alone has
not asked for anything to be deleted.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from aorta.analysis.account import account_of, as_document, rank_times
from aorta.analysis.aggregate import aggregate
from aorta.analysis.attribution import break_down
from aorta.analysis.cautions import notes_of
from aorta.analysis.compare.launch_comparison import add_account, compare_launches, refuse_mixed
from aorta.analysis.compare.launch_set import Subject, read_subjects, selection_metrics
from aorta.analysis.compare.run_comparison import compare, over_all
from aorta.analysis.compare.verdict import Rules, is_comparable
from aorta.analysis.findings import explain
from aorta.analysis.headline import headline, numbers, title
from aorta.autopsy.report import read_autopsy
from aorta.command_line import to_stderr
from aorta.documents import as_json, known
from aorta.documents.comparison import Comparison, MetricDefinition, Summary
from aorta.documents.dataset import MEANS, DatasetEntry
from aorta.documents.explanations import ExposedBreakdown, WhatIf
from aorta.documents.metrics import COLLECTIVE_METRIC_NAMES, metric_named
from aorta.errors import InputError
from aorta.read.engines import Engine
from aorta.read.locations import Location
from aorta.read.run import Run
from aorta.records.files import decode_json, json_text, read_small, whole_file
from aorta.records.run_files import REPORT_EVENTS, TENSORBOARD_DIR
from aorta.report.page.page_content import PAGE_FILE, write_page
from aorta.report.picture import draw_timeline
from aorta.report.run_tables import SHOWN_MARGINALS
from aorta.report.text import brief_text, full_text
from aorta.terminal_style import PLAIN, Style, wrapped
from aorta.version import __version__
from aorta.whatif.prediction import base_of, gains
from aorta.whatif.read_program import program_of

SUMMARY_VERSION: Final = 1
SUMMARY_FILE: Final = "summary.json"


def summarize(
    subjects: Mapping[str, Subject],
    reference: str | None = None,
    candidate: str | None = None,
    rules: Rules | None = None,
) -> Summary:
    """Return the content of `summary.json`; unknown is null with a reason. With both labels it has a comparison.

    Args:
        rules: how launch sets are judged.

    Raises:
        InputError: the launches to compare did different work, or a record cannot be read again.
    """
    rules = rules or Rules()
    entries = {}
    for label, subject in subjects.items():
        entry = entries[label] = aggregate(subject.dataset)
        explain(subject.dataset, entry, account_of(subject.dataset))
        if (autopsy := read_autopsy(Path(subject.dataset.run.location))) is not None:
            entry.autopsy = autopsy
        if subject.launches is not None:
            entry.launches = len(subject.launches.launches)
            accounts = subject.launches.accounts
            entry.account = as_document(accounts)
            entry.rank_times = [] if isinstance(accounts, str) else rank_times(accounts)
            entry.representative = subject.dataset.run.location
            entry.representative_rule = f"the launch nearest the medians of {' and '.join(selection_metrics(rules))}"
            entry.launch_set, entry.left_out = str(subject.launches.path), subject.launches.left_out
    names = [name for entry in entries.values() for name in entry.described]
    names += COLLECTIVE_METRIC_NAMES if any(entry.matched for entry in entries.values()) else ()
    metrics = {
        name: MetricDefinition(metric.unit, metric.better, metric.definition)
        for name, metric in ((name, metric_named(name)) for name in dict.fromkeys(names))
    }
    summary = Summary(summary_version=SUMMARY_VERSION, aorta_version=__version__, datasets=entries, metrics=metrics)
    differing: set[str] = set()
    if reference is not None and candidate is not None:
        sides = subjects[reference], subjects[candidate]
        compared = summary.comparison = _compared(sides, (entries[reference], entries[candidate]), rules)
        compared.attribution = ExposedBreakdown(reason=title(compared))
        if is_comparable(compared):
            compared.attribution = break_down(sides[1].exposed, sides[0].exposed)
        add_account(compared, sides, rules)
        differing = {difference.key for difference in compared.manifest_differences} - {"config.label"}
        differing = {key.removeprefix("config.") for key in differing if key.startswith("config.")}
        compared.headline, compared.numbers = headline(compared), numbers(compared)
    else:
        for label, subject in subjects.items():
            if subject.launches is not None:
                refuse_mixed(subject.launches, rules)
            entries[label].exposed = break_down(subject.exposed)
    for label, subject in subjects.items():
        stragglers = known(entries[label].stragglers)
        no_straggler = None if stragglers is None else stragglers.reason
        entries[label].what_if = most_to_gain(subject.dataset.run, differing, no_straggler)
    return summary


def _compared(sides: tuple[Subject, Subject], entries: tuple[DatasetEntry, DatasetEntry], rules: Rules) -> Comparison:
    before, after = (side.dataset for side in sides)
    if any(side.launches for side in sides):
        collectives = entries[0].matched, entries[1].matched
        return compare_launches((before, after), (sides[0].as_set(), sides[1].as_set()), collectives, rules)
    few_steps = any(entry.few_steps for entry in entries)
    values = entries[0].described, entries[1].described
    comparison = compare(
        (before, after),
        (over_all(values[0]), over_all(values[1])) if few_steps else values,
        (entries[0].matched, entries[1].matched),
        [[known(entry.pace)] for entry in entries],
        rules,
    )
    comparison.statistic = MEANS if few_steps else comparison.statistic
    return comparison


LAST_STEPS: Final = 50
RANK_STEPS: Final = 6400
"""Replayed for a report; of more ranks fewer steps, and none where not even `_LEAST_STEPS` of them fit."""
_LEAST_STEPS: Final = 8


def most_to_gain(run: Run, differing: Collection[str] = (), no_straggler: str | None = None) -> WhatIf:
    """Return `what_if` of a dataset in `summary.json`; with a `reason` there is nothing else in it.

    Args:
        differing: settings in which the run differs from the one that it is compared with.
        no_straggler: why no rank is named that holds the others up, if none is.
    """
    last = min(LAST_STEPS, RANK_STEPS // max(len(run.ranks), 1))
    ask = f"aorta whatif {shlex.quote(run.location)}"
    if last < _LEAST_STEPS:
        return WhatIf(reason=f"{len(run.ranks)} ranks are too many to be replayed for a report; ask {ask}")
    try:
        program = program_of(run, last)
        if len(program.steps) == last:
            ask += f" --last {last}"  # the same steps, so the same answer
        predicted = gains(base_of(program), differing, ask, no_straggler=no_straggler)
    except (InputError, OSError) as error:  # a record is read again
        words = str(error)
        for known_words in (f"{run.location}: ", "a replay is not possible: ", "no prediction: "):
            words = words.removeprefix(known_words)
        return WhatIf(reason=words)
    marginals = enumerate(predicted.marginals)
    predicted.marginals = [part for index, part in marginals if index < SHOWN_MARGINALS or part.what == "kind"]
    return predicted


@dataclass(frozen=True)
class Report:
    """`text` is for people, `content` is what `summary.json` holds, and `subjects` has what was read."""

    text: str
    content: Summary
    files: tuple[Path, ...]
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
        page = [f"page     {path}" for path in written if path.name == PAGE_FILE]
        pictures = [f"picture  {path}" for path in written if path.suffix == ".png"]
        missing = [wrapped([f"not drawn: {name}: {reason}"]) for name, reason in not_drawn.items()]
        text = full_text(datasets, summary, "\n".join([*page, f"summary  {written[0]}", *pictures, *missing]), style)
    return Report(text, summary, tuple(written), subjects)


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
