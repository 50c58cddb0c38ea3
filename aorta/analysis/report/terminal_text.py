"""A report in a terminal: its answer in at most `MOST_LINES` lines (`brief_text`), or every table (`full_text`).

    ddp: 56 % hidden; 9.1 of 54.8 ms exposed
    medians of 7 steps on 2 ranks of artifacts/ddp

Lines have at most as many columns as the style has, paths and names of kernels aside. Must not compute a number, say a
gain without its interval, or state an undecided difference as a fact: every change stands beside its own verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.attribution.breakdown import sentence_rows
from aorta.analysis.cautions import autopsy_notes
from aorta.analysis.compare.headline import UNLIKE, evidence, headline, is_comparable, numbers
from aorta.analysis.documents import known
from aorta.analysis.documents.comparison import SIDES, Comparison, Summary
from aorta.analysis.documents.dataset import MEANS, DatasetEntry, WhatIf
from aorta.analysis.formatting import TEXT, json_text, rough_ms
from aorta.analysis.metrics import JOB_STEP
from aorta.analysis.report.html.page_content import PAGE_FILE
from aorta.analysis.report.html.verdict_cards import result_of
from aorta.analysis.report.kernels import kernel_block
from aorta.analysis.report.run_tables import (
    attribution_table,
    collectives_table,
    comparison_table,
    differences_table,
    exposed_rows,
    exposed_tables,
    gains_basis,
    gains_tables,
    metrics_table,
    named_ranks,
    pairs_table,
    rank_table,
)
from aorta.analysis.report.source_facts import facts_of, notes_of, of_launches
from aorta.analysis.report.tables import TERMINAL, Table, text_lines
from aorta.terminal_style import PLAIN, Style, mark_of, wrapped

MOST_LINES: Final = 20
"""Of an answer, with the lines that the command adds."""
_ADDED: Final = 3
"""Lines below the answer: where the page is, and two that the command adds."""
_COMPARED: Final = ("overlap_ratio", "exposed_comm_ms", JOB_STEP, "compute_stall_ms", "comm_ms", "compute_ms")
_SHOWN: Final = (JOB_STEP, "exposed_comm_ms", "overlap_ratio", "comm_ms", "compute_ms", "idle_ms")
_FEW: Final = 3
"""Gains, exposed parts and differences that the answer names."""
_RANKS: Final = 4
_ROWS: Final = 10
"""Of a table of all collectives or parts; the page and `summary.json` have more."""
_TESTED: Final = (
    "Medians over launches; interval of the change: {level} (wider where several metrics were tested together); "
    "p: exact Mann-Whitney test over launches, of the metric alone."
)
_NOT_TESTED: Final = (
    "{statistic} over steps of one launch per side. Better and worse name the direction of a difference, not tested "
    "for significance."
)


class _Block(NamedTuple):
    """Lines that belong together; without room those with the highest `rank` are left out, 0 never."""

    text: str
    rank: int = 0

    @property
    def height(self) -> int:
        return 1 + self.text.count("\n")


def brief_text(
    summary: Summary, files: Sequence[Path], notes: Mapping[str, Sequence[str]], style: Style = PLAIN
) -> str:
    """Return the answer of a summary.

    Args:
        files: what the report wrote.
        notes: label -> what a reader of its numbers has to know; said where nothing is compared.
    """
    comparison = known(summary.comparison)
    if comparison is None:
        room = (MOST_LINES - _ADDED) // max(1, len(summary.datasets))
        answers = [_fitted(_of_run(label, each, notes[label], style), room) for label, each in summary.datasets.items()]
    else:
        blocks = _of_comparison(comparison, summary.datasets[comparison.candidate], style)
        answers = [_fitted(blocks, MOST_LINES - _ADDED)]
    page = next((path for path in files if path.name == PAGE_FILE), None)
    where = led("Summary:", str(files[0]), style) if page is None else led("Page:", str(page), style)
    return "\n".join([*answers, where])


def _fitted(blocks: Iterable[_Block], room: int) -> str:
    """Return as many blocks as there is room for, and that there are more."""
    kept = [block for block in blocks if block.text]
    while sum(block.height for block in kept) > room and (least := max(block.rank for block in kept)):
        del kept[max(place for place, block in enumerate(kept) if block.rank == least)]
    return "\n".join(block.text for block in kept)


def _of_run(label: str, entry: DatasetEntry, notes: Sequence[str], style: Style) -> list[_Block]:
    """Return what one run measured, then what to bear in mind and what would gain most."""
    stuck = autopsy_notes(entry)
    told = stuck or [result_of(entry) if entry.count else f"nothing to measure: {entry.reason}"]
    notes = [note for note in notes if note not in told]
    blocks = [_Block(led(f"{label}:", told[0].replace("\u00a0", " "), style))]
    if entry.count:
        middle = "over_all" if entry.few_steps else "median"
        of = f"{MEANS if entry.few_steps else 'medians'} of {TEXT.steps_used(entry)} of {entry.source.path}"
        table = metrics_table(label, entry)
        rows = {row["metric"]: row for row in table.visible()}
        shown = replace(table, rows=[rows[name] for name in _SHOWN if name in rows], note=None)
        lines = text_lines(shown, style, only=("metric", middle, "p5", "p95"), titled=False)
        blocks += [_Block(of), _Block("\n".join(["", *lines, ""]))]
        unknown = [(name, each) for name in _SHOWN if (each := entry.described.get(name)) and name not in rows]
        blocks += [_Block(wrapped([f"{name}: unknown: {each.reason}"]), 2) for name, each in unknown if each.reason]
    blocks += _notes(notes, style)
    if named_ranks(entry):
        ranks = rank_table(label, entry)
        blocks.append(_Block("\n".join(text_lines(ranks, style, most=_RANKS)) if ranks else "", 1))
    if not entry.reason:
        blocks += [*_exposed(entry, style), _gains(entry.what_if, style)]
    return blocks


def _exposed(entry: DatasetEntry, style: Style) -> list[_Block]:
    """Return where the exposed communication is: the groups, and the regions of the step, that have most of it."""
    told = []
    for name, field in (("group", "group"), ("layer", "region")):
        rows = exposed_rows(entry, field)
        if field == "region" and entry.traces and len(rows) == 1:
            continue  # not in these traces
        parts = [f"{row.what} {rough_ms(row.exposed_ms)}" for row in rows[:_FEW]]
        more = f"; {len(rows) - _FEW} more" if len(rows) > _FEW else ""
        told.append(_Block(led(f"Exposed by {name} (mean):", "; ".join(parts) + more, style) if parts else "", 3))
    return told


def _gains(gains: WhatIf, style: Style, where: str = "") -> _Block:
    """Return the changes that would gain most, or why there is no prediction."""
    head = f"Most to gain{where}:"
    if gains.reason is not None:
        return _Block(led(head, f"no prediction: {gains.reason}", style), 4)
    first, *others = [gain.sentence for gain in gains.gains[:_FEW]] or ["no gain worth mentioning"]
    lines = [wrapped([f"    {sentence}"], style.width) for sentence in others]
    return _Block("\n".join([led(head, first, style), *lines]), 3)


def _notes(notes: Sequence[str], style: Style) -> list[_Block]:
    """Return the first note, and how many there are more."""
    more = f" ({TEXT.count(len(notes) - 1, 'more note')}: --all)" if len(notes) > 1 else ""
    return [_Block(led("Note:", notes[0] + more, style, style.warning), 1)] if notes else []


def _of_comparison(comparison: Comparison, candidate: DatasetEntry, style: Style) -> list[_Block]:
    """Return verdict, metrics, cause, the first note, what differs, and gains."""
    table = comparison_table(comparison)
    rows = {row["metric"]: row for row in table.visible()}
    names = [name for name in dict.fromkeys((comparison.deciding, *_COMPARED)) if name in rows][: len(_COMPARED)]
    shown = replace(table, rows=[rows[name] for name in names], note=None)
    lines = text_lines(shown, style, only=("metric", "reference", "candidate", "change", "told"), titled=False)
    cause = comparison.sentence
    changed = [
        f"{one.key.removeprefix('config.')}: {json_text(one.reference)} -> {json_text(one.candidate)}"
        for one in comparison.manifest_differences
    ]
    sides = [comparison.reference, comparison.candidate]
    titled = sides == [column.heading for column in table.columns if column.key in SIDES and TERMINAL in column.media]
    blocks = [
        _Block(verdict_lines(comparison, style)),
        _Block("\n".join(["", *lines, ""]) if lines else ""),
        _Block(led("Cause:", cause, style) if cause else "", 1),
        *_notes(notes_of_comparison(comparison), style),
        _Block(losses_line(comparison, style), 2),
        _Block("" if titled else led("Compared:", " with ".join(sides), style), 4),
    ]
    if changed and not any(one in (cause or "") for one in ("Configuration: ", changed[0].replace(": ", " ", 1))):
        more = [f"and {len(changed) - _FEW} more"] if len(changed) > _FEW else []
        blocks.append(_Block(led("Differs:", "; ".join([*changed[:_FEW], *more]), style), 2))
    return [*blocks, _gains(candidate.what_if, style, " in the candidate")]


def full_text(datasets: Mapping[str, LabelledRun], summary: Summary, files: str, style: Style = PLAIN) -> str:
    """Return every table of a report, `files` last."""
    comparison, entries = known(summary.comparison), summary.datasets
    blocks = [] if comparison is None else _comparison_blocks(comparison, style)
    blocks.append(wrapped([of_launches(entries)], style.width, indent=""))
    for label, dataset in datasets.items():
        entry = entries[label]
        blocks.append(run_block(dataset, entry, style))
        told = [metrics_table(label, entry), rank_table(label, entry)] if entry.count else []
        told += [collectives_table({label: entry}), *exposed_tables(label, entry)]
        blocks += [_lines(each, style) for each in told if each is not None]
        blocks.append(gain_block(label, entry.what_if, style))
        blocks += [kernel_block(label, entry.traces, style)] if entry.traces else []
    if comparison is not None and comparison.manifest_differences:
        blocks.append(_lines(differences_table(comparison), style))
    return "\n\n".join([*filter(None, blocks), files])


def _lines(told: Table, style: Style) -> str:
    most = None if told.key.startswith("metrics") else _ROWS
    return "\n".join(text_lines(told, style, most=most))


def run_block(dataset: LabelledRun, entry: DatasetEntry, style: Style = PLAIN) -> str:
    """Return where a dataset came from, what it rests on, and everything wrong with it."""
    facts = [f"  {name}: {json_text(fact)}" for name, fact in facts_of(dataset, entry).items()]
    notes = [f"  ! {note}" for note in notes_of(dataset, entry)]
    return "\n".join([style.bold(dataset.label), wrapped([*facts, *notes], style.width)])


def gain_block(label: str, gains: WhatIf, style: Style = PLAIN) -> str:
    """Return the changes that would gain most, what parts of the communication cost, and bounds."""
    if gains.reason is not None:
        return wrapped([f"{label}: what would gain most: no prediction: {gains.reason}"], style.width)
    blocks = ["\n".join(text_lines(told, style)) for told in gains_tables(label, gains)]
    notes = [*([] if gains.check is None else [f"check: {gains.check}"]), *gains.notes, *gains.flags]
    head = wrapped([f"{label}: what would gain most. {gains_basis(gains)}"], style.width)
    notes_text = wrapped([f"  ! {note}" for note in notes], style.width)
    return "\n".join(
        [head, *filter(None, [*blocks, notes_text]), f"more: {gains.command}"]
    )  # to be copied: in one line


def _comparison_blocks(comparison: Comparison, style: Style) -> list[str]:
    tested = evidence(comparison)
    lines = [verdict_lines(comparison, style), *([led("Test:", tested, style)] if tested else [])]
    lines += [led("Cause:", comparison.sentence, style)] if comparison.sentence else []
    lines += [told] if (told := losses_line(comparison, style)) else []
    lines += [led("Note:", warning, style, style.warning) for warning in notes_of_comparison(comparison)]
    level = TEXT.percent(known(comparison.interval_level), 0)
    statistic = MEANS.capitalize() if comparison.statistic == MEANS else "Medians"
    notes = [_TESTED.format(level=level) if comparison.tested else _NOT_TESTED.format(statistic=statistic)]
    if comparison.primary:
        notes.append(
            f"{JOB_STEP} decides, then {comparison.primary}; nothing counts as improved while steps are longer."
        )
    causes = sentence_rows(comparison.attribution)
    tables = [
        attribution_table("causes", "Where exposed communication differs: mean ms per step and rank", causes),
        pairs_table(comparison),
    ]
    metrics = "\n".join(text_lines(comparison_table(comparison), style))
    said = style.faint(wrapped([" ".join(notes)], style.width, indent=""))
    return ["\n".join(lines), f"{metrics}\n{said}", *(_lines(each, style) for each in tables if each is not None)]


def losses_line(comparison: Comparison, style: Style) -> str:
    """Return whether the losses of both sides are the same; empty where a side has none, or did other work."""
    found = known(comparison.losses)
    return "" if found is None or comparison.unlike else led("Losses:", found.sentence, style)


def notes_of_comparison(comparison: Comparison) -> list[str]:
    """Return the warnings of a comparison, but for what its headline says already."""
    said = [] if is_comparable(comparison) else [f"{UNLIKE.upper()}: {key} " for key in comparison.unlike]
    return [warning for warning in comparison.warnings if not warning.startswith(tuple(said))]


def verdict_lines(comparison: Comparison, style: Style = PLAIN) -> str:
    """Return the headline behind its mark, its first words in the colour of the verdict, and its line of numbers."""
    word, _, rest = f"[{mark_of(comparison.verdict)}] {headline(comparison)}".partition(":")
    first = led(word, f":{rest}", style, lambda text: style.verdict(comparison.verdict, text, bold=True))
    return f"{first}\n{wrapped([f'    {numbers(comparison)}'], style.width)}"


def led(first: str, sentence: str, style: Style, paint: Callable[[str], str] | None = None) -> str:
    """Return a sentence behind words that stand out, in bold unless `paint` shows them otherwise."""
    space = "" if sentence.startswith(":") else " "
    return (paint or style.bold)(first) + wrapped([f"{first}{space}{sentence}"], style.width).removeprefix(first)
