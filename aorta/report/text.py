"""A report as text: in a terminal its answer in at most `MOST_LINES` lines (`brief_text`), or every table
(`full_text`); and GitHub-flavoured Markdown for the page of a CI job, $GITHUB_STEP_SUMMARY (`append_markdown`).

Lines of a terminal have at most as many columns as the style has, paths and names of kernels aside. Must not compute a
number, say a gain without its interval, state an undecided difference as a fact (every change stands beside its own
verdict), let text of a file or a label become markup, or write more than GitHub accepts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeAlias

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.cautions import alerts, autopsy_notes, notes_of
from aorta.analysis.gate import OUTCOMES, difference_text, interval_text, outcome_text
from aorta.analysis.headline import evidence, headline, numbers, title
from aorta.documents import known
from aorta.documents.comparison import SIDES, Comparison, Summary
from aorta.documents.dataset import MEANS, DatasetEntry
from aorta.documents.explanations import WhatIf
from aorta.documents.formatting import TEXT, value_text
from aorta.documents.kernels import TraceEntries
from aorta.documents.metrics import JOB_STEP, SHOWN_FIRST
from aorta.errors import InputError
from aorta.redaction import redact
from aorta.report import account_tables, run_tables
from aorta.report.page.elements import measured_over, result_of
from aorta.report.page.page_content import PAGE_FILE
from aorta.report.tables import TERMINAL, Column, Table, text_column, text_lines
from aorta.terminal_style import PLAIN, Style, mark_of, wrapped

MOST_LINES: Final = 22
"""Of an answer, with the lines that the command adds."""
_ADDED: Final = 3
"""Lines below the answer: where the page is, and two that the command adds."""
_PARTS: Final = 5
"""Of the mean step in the answer; the others are one."""
_FEW: Final = 3
"""Gains, exposed parts and differences that the answer names."""
_RANKS: Final = 4
_ROWS: Final = 10
"""Of a table of all collectives or parts; the page and `summary.json` have more."""
_Block: TypeAlias = tuple[int, str]
"""Lines that belong together, behind a rank: without room those with the highest are left out, 0 never."""


def brief_text(
    summary: Summary, files: Sequence[Path], notes: Mapping[str, Sequence[str]], style: Style = PLAIN
) -> str:
    """Return the answer of a summary, and where its page is among `files`. `notes`: label -> what a reader of its
    numbers has to know; said where nothing is compared.
    """
    comparison, wrong, room = known(summary.comparison), alert_lines(summary, style), MOST_LINES - _ADDED
    alerted = set(alerts(summary.datasets, comparison))
    if comparison is not None:
        runs = [_of_comparison(comparison, summary.datasets[comparison.candidate], style)]
    else:
        runs = [
            _of_run(label, entry, [note for note in notes[label] if note not in alerted], style)
            for label, entry in summary.datasets.items()
        ]
    if len(runs) > 1:
        answers = [*filter(None, [wrong]), *(_fitted(blocks, room // len(runs)) for blocks in runs)]
    else:
        ((first, *others),) = runs
        answers = [_fitted([first, (0, wrong), *others], room)]
    page = next((path for path in files if path.name == PAGE_FILE), None)
    where = led("Summary:", str(files[0]), style) if page is None else led("Page:", str(page), style)
    return "\n".join([*answers, where])


def _fitted(blocks: Iterable[_Block], room: int) -> str:
    """Return as many blocks as there is room for, those with text, and how many lines of others there are."""
    kept, left_out = [(rank, text) for rank, text in blocks if text], 0
    while sum(1 + text.count("\n") for _, text in kept) + bool(left_out) > room and (least := max(kept)[0]):
        _, text = kept.pop(max(index for index, (rank, _) in enumerate(kept) if rank == least))
        left_out += 1 + text.count("\n")
    more = [f"{TEXT.count(left_out, 'more line')}: --all"] if left_out else []
    return "\n".join([*(text for _, text in kept), *more])


def _of_run(label: str, entry: DatasetEntry, notes: Sequence[str], style: Style) -> list[_Block]:
    stuck = autopsy_notes(entry)
    answers = stuck or [result_of(entry, TEXT) if entry.count else f"nothing to measure: {entry.reason}"]
    blocks = [(0, led(f"{label}:", answers[0], style))]
    if entry.count:
        middle = "over_all" if entry.shows_means else "median"
        blocks.append((0, measured_over(entry, TEXT) + ("" if entry.launches else f" of {entry.source.path}")))
        metrics = run_tables.metrics_table(label, entry)
        rows = {row["metric"]: row for row in metrics.rows}
        shown = replace(metrics, rows=[rows[name] for name in SHOWN_FIRST if name in rows], note=None)
        lines = text_lines(shown, style, only=("metric", middle, "interval", "p5", "p95"), titled=False)
        blocks.append((0, "\n".join(["", *lines, ""])))
        for name in SHOWN_FIRST:
            reason = entry.described[name].reason if name in entry.described else None
            if name not in rows and reason:
                blocks.append((2, wrapped([f"{name}: unknown: {reason}"])))
    if account := account_tables.account_table(label, entry, _PARTS):
        blocks.append((1, "\n".join(text_lines(account, style, titled=False))))
    if others := [note for note in notes if note not in answers]:
        more = f" ({TEXT.count(len(others) - 1, 'more note')}: --all)" if len(others) > 1 else ""
        blocks.append((0, led("Note:", others[0] + more, style, style.warning)))
    if account_tables.named_ranks(entry) and (ranks := account_tables.rank_table(label, entry)):
        blocks.append((1, "\n".join(text_lines(ranks, style, most=_RANKS))))
    if entry.reason:
        return blocks
    return [*blocks, *_gains(entry.what_if, style)]


def _gains(gains: WhatIf, style: Style, where: str = "") -> list[_Block]:
    head = f"Most to gain{where}:"
    if gains.reason is not None:
        return [(5, led(head, f"no prediction: {gains.reason}", style))]
    first, *others = [gain.sentence for gain in gains.gains[:_FEW]] or ["nothing that is predicted is worth mentioning"]
    return [(3, led(head, first, style)), *((4, wrapped([f"    {other}"], style.width)) for other in others)]


def _of_comparison(comparison: Comparison, candidate: DatasetEntry, style: Style) -> list[_Block]:
    metrics = run_tables.comparison_table(comparison)
    rows = {row["metric"]: row for row in metrics.rows}
    names = [name for name in dict.fromkeys((comparison.deciding, *SHOWN_FIRST)) if name in rows][: len(SHOWN_FIRST)]
    shown = replace(metrics, rows=[rows[name] for name in names], note=None)
    lines = text_lines(shown, style, only=("metric", "reference", "candidate", "change", "told"), titled=False)
    cause, account = comparison.sentence or "", account_tables.change_table(comparison)
    changed = [
        f"{other.key.removeprefix('config.')}: {value_text(other.reference)} -> {value_text(other.candidate)}"
        for other in comparison.manifest_differences
    ]
    sides = [comparison.reference, comparison.candidate]
    titled = [column.heading for column in metrics.columns if column.key in SIDES and TERMINAL in column.media]
    blocks = [
        (0, verdict_lines(comparison, style)),
        (0, "\n".join(["", *lines, ""]) if lines else ""),
        (2, "\n".join(text_lines(account, style, titled=False)) if account else ""),
        (1, led("Cause:", cause, style) if cause else ""),
        (3, losses_line(comparison, style)),
        (5, "" if titled == sides else led("Compared:", " with ".join(sides), style)),
    ]
    if changed and "Configuration: " not in cause and changed[0].replace(": ", " ", 1) not in cause:
        more = [f"and {len(changed) - _FEW} more"] if len(changed) > _FEW else []
        blocks.append((1, led("Differs:", "; ".join([*changed[:_FEW], *more]), style)))
    launch = "" if candidate.shown_launch is None else f", launch {candidate.shown_launch}"
    return [*blocks, *_gains(candidate.what_if, style, f" in the candidate{launch}")]


def full_text(datasets: Mapping[str, LabelledRun], summary: Summary, files: str, style: Style = PLAIN) -> str:
    """Return every table of a report, `files` last."""
    comparison, blocks = known(summary.comparison), list[str]()
    wrong = alert_lines(summary, style)

    def add(*tables: Table | None) -> None:
        for shown in tables:
            if shown is not None:
                most = None if shown.key.startswith("metrics") else _ROWS
                blocks.append("\n".join(text_lines(shown, style, most=most)))

    if comparison is not None:
        test = evidence(comparison)
        lines = [
            verdict_lines(comparison, style),
            wrong,
            led("Test:", test, style) if test else "",
            led("Cause:", comparison.sentence, style) if comparison.sentence else "",
            losses_line(comparison, style),
        ]
        blocks.append("\n".join(filter(None, lines)))
        statistic = MEANS.capitalize() if comparison.statistic == MEANS else "Medians"
        basis = (
            f"{statistic} over steps of one launch per side. Better and worse name the direction of a difference, not "
            "tested for significance."
        )
        if comparison.tested:
            level = TEXT.percent(known(comparison.interval_level), 0)
            basis = (
                f"Medians over launches; interval of the change: {level} (wider where several metrics were tested "
                "together); p: exact Mann-Whitney test over launches, of the metric alone."
            )
        if comparison.primary:
            basis += (
                f" {JOB_STEP} decides, then {comparison.primary}; nothing counts as improved while steps are longer."
            )
        add(run_tables.comparison_table(comparison))
        blocks[-1] += "\n" + style.faint(wrapped([basis], style.width, indent=""))
        add(account_tables.change_table(comparison), run_tables.pairs_table(comparison))
        add(*account_tables.exposed_tables("difference", known(comparison.attribution)))
    elif wrong:
        blocks.append(wrong)
    for label, dataset in datasets.items():
        entry = summary.datasets[label]
        blocks.append(run_block(dataset, entry, style))
        if entry.count:
            add(account_tables.account_table(label, entry))
            add(run_tables.metrics_table(label, entry), account_tables.rank_table(label, entry))
        add(run_tables.collectives_table({label: entry}), *account_tables.exposed_tables(label, known(entry.exposed)))
        blocks.append(gain_block(label, entry.what_if, style))
        blocks += [kernel_block(label, entry.traces, style)] if entry.traces else []
    if comparison is not None and comparison.manifest_differences:
        add(run_tables.differences_table(comparison))
    return "\n\n".join([*filter(None, blocks), files])


def run_block(dataset: LabelledRun, entry: DatasetEntry, style: Style = PLAIN) -> str:
    """Return where a dataset came from, what it rests on, and everything wrong with it."""
    facts = [f"  {name}: {value_text(fact)}" for name, fact in run_tables.facts_of(dataset, entry).items()]
    notes = [f"  ! {note}" for note in notes_of(dataset, entry)]
    return "\n".join([style.bold(dataset.label), wrapped([*facts, *notes], style.width)])


def gain_block(label: str, gains: WhatIf, style: Style = PLAIN) -> str:
    """Return the changes that would gain most, what parts of the communication cost, and bounds."""
    if gains.reason is not None:
        return wrapped([f"{label}: what would gain most: no prediction: {gains.reason}"], style.width)
    notes = [*([] if gains.check is None else [f"check: {gains.check}"]), *gains.notes]
    blocks = [
        wrapped([f"{label}: what would gain most. {run_tables.gains_basis(gains)}"], style.width),
        *("\n".join(text_lines(gains_table, style)) for gains_table in run_tables.gains_tables(label, gains)),
        wrapped([f"  ! {note}" for note in notes], style.width),
        f"more: {gains.command}",  # to be copied: in one line
    ]
    return "\n".join(filter(None, blocks))


def kernel_block(label: str, traces: TraceEntries, style: Style = PLAIN, shown: int = _ROWS) -> str:
    """Return the first rows of every table of kernels as lines of a terminal, and what the traces do not hold."""
    if not traces.kernels.by_name:
        return wrapped(
            [f"{label}: no kernels: {'; '.join(traces.kernels.reasons.get('totals', ['the traces are empty']))}"]
        )
    blocks = ["\n".join(text_lines(part, style, most=shown)) for part in account_tables.kernel_tables(label, traces)]
    return "\n\n".join([*blocks, wrapped(account_tables.kernel_notes(traces), style.width)])


def losses_line(comparison: Comparison, style: Style) -> str:
    """Return whether the losses of both sides are the same; empty where a side has none, or did other work."""
    losses = known(comparison.losses)
    return "" if losses is None or comparison.unlike else led("Losses:", losses.sentence, style)


def alert_lines(summary: Summary, style: Style) -> str:
    """Return what is wrong, a sentence a line; empty where nothing is."""
    warnings = alerts(summary.datasets, known(summary.comparison))
    return "\n".join(led("Warning:", alert, style, style.warning) for alert in warnings)


def verdict_lines(comparison: Comparison, style: Style = PLAIN) -> str:
    """Return the headline behind its mark, its first words in the colour of the verdict, and its line of numbers."""
    word, _, rest = f"[{mark_of(comparison.verdict)}] {headline(comparison)}".partition(":")
    first = led(word, f":{rest}", style, lambda text: style.verdict(comparison.verdict, text, bold=True))
    return f"{first}\n{wrapped([f'    {numbers(comparison)}'], style.width)}"


def led(first: str, sentence: str, style: Style, paint: Callable[[str], str] | None = None) -> str:
    """Return a sentence behind words that stand out, in bold unless `paint` shows them otherwise."""
    space = "" if sentence.startswith(":") else " "
    return (paint or style.bold)(first) + wrapped([f"{first}{space}{sentence}"], style.width).removeprefix(first)


# --- Markdown

_MARKS: Final = {"fail": "❌", "inconclusive": "❔", "pass": "✅"}
_ACTIVE: Final = re.compile(r"([\\`*_{}\[\]()#+\-.!|~:@/])")
"""Characters that GitHub reads as markup, links, mentions or references unless a backslash stands before them."""
LIMIT_BYTES: Final = 1_000_000
"""GitHub accepts a summary of up to 1 MiB per step (GitHub Docs, "Adding a job summary")."""
_CONDITIONS: Final = (
    text_column("outcome", of=lambda judged: f"{_MARKS[judged.outcome]} {OUTCOMES[judged.outcome]}"),
    text_column("condition"),
    Column("difference", unit="", of=lambda judged: difference_text(judged, judged.value)),
    Column("interval", unit="", of=interval_text),
    Column("p", unit="p"),
    text_column("reason"),
)


def append_markdown(path: Path, summary: Summary) -> None:
    """Append a report to a file, which is made where there is none.

    Raises:
        InputError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(redact(markdown_summary(summary)))
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written: {error.strerror or error}. Give another file to --markdown"
        ) from error


def escaped(text: object) -> str:
    """Escape text so that GitHub shows it literally, on one line."""
    line = " ".join(str(text).split())
    line = "".join(char if char.isprintable() else "\ufffd" for char in line)
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _ACTIVE.sub(lambda match: "\\" + match[1], line)


def markdown_summary(summary: Summary) -> str:
    """Return the page: outcome, conditions, where the difference lies, and warnings; metrics and manifest differences
    are collapsed.
    """
    comparison, result = known(summary.comparison), known(summary.gate)
    lines = []
    if result is not None:
        lines.append(f"### {_MARKS[result.outcome]} AORTA {escaped(outcome_text(result))}")
    elif comparison is not None:
        lines.append(f"### AORTA: {escaped(title(comparison))}")
    else:
        lines.append("### AORTA report")
    sentence = "No comparison was asked for."
    if comparison is not None:
        sides = f"{escaped(comparison.candidate)} against {escaped(comparison.reference)}"
        sentence = f"{sides}: **{escaped(headline(comparison))}** {escaped(numbers(comparison))}"
    lines += ["", sentence]
    short = "\n".join(lines)
    if result is not None:
        lines += ["", *_table(Table("conditions", "", _CONDITIONS, result.conditions))]
    if comparison is not None:
        if comparison.sentence:
            lines += ["", f"**Cause:** {escaped(comparison.sentence)}"]
        for alert in alerts(summary.datasets, comparison):
            lines += ["", f"> ⚠️ {escaped(alert)}"]
        for shown in (
            run_tables.comparison_table(comparison),
            account_tables.change_table(comparison),
            run_tables.differences_table(comparison),
        ):
            if shown is not None and (table := _table(shown)):
                note = ["", escaped(shown.note)] if shown.note else []
                lines += ["", "<details>", f"<summary>{escaped(shown.caption)}</summary>", "", *table, *note]
                lines += ["", "</details>"]
    text = "\n".join(lines) + "\n"
    if len(text.encode()) > LIMIT_BYTES:  # labels may have any length: the outcome must not be lost to GitHub's limit
        return short[:10_000] + "\n\nThe rest is in summary.json: it is too long.\n"
    return text


def _table(shown: Table) -> list[str]:
    columns = shown.printed_columns(shown.rows)
    lines = [[escaped(column.heading) for column in columns], ["---"] * len(columns)]
    for row in shown.rows:
        texts = [(column.cell(row, TEXT)[0], column.kind) for column in columns]
        lines.append([escaped(text) if kind == "text" else text for text, kind in texts])
    return [f"| {' | '.join(line)} |" for line in lines] if shown.rows else []
