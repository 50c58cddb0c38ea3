"""A report as GitHub-flavoured Markdown, for the page of a CI job ($GITHUB_STEP_SUMMARY): the gate's outcome, where the
difference lies, and the tables of terminal and page.

Must not let text of a file or a label become markup, or write more than GitHub accepts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from aorta.analysis.cautions import alerts
from aorta.analysis.compare.headline import headline, numbers, title
from aorta.analysis.gate import OUTCOMES, difference_text, interval_text, outcome_text
from aorta.documents import known
from aorta.documents.comparison import Summary
from aorta.documents.formatting import TEXT
from aorta.errors import InputError
from aorta.redaction import redact
from aorta.report.account_tables import change_table
from aorta.report.run_tables import comparison_table, differences_table
from aorta.report.tables import TERMINAL, Column, Table, text_column

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
        for shown in (comparison_table(comparison), change_table(comparison), differences_table(comparison)):
            lines += _folded(shown)
    text = "\n".join(lines) + "\n"
    if len(text.encode()) > LIMIT_BYTES:  # labels may have any length: the outcome must not be lost to GitHub's limit
        return short[:10_000] + "\n\nThe rest is in summary.json: it is too long.\n"
    return text


def _table(shown: Table) -> list[str]:
    rows = shown.visible()
    columns = [column for column in shown.columns if TERMINAL in column.media]
    columns = [column for column in columns if any(column.value(row) not in (None, "") for row in rows)]

    def cell(column: Column, text: str) -> str:
        return escaped(text) if column.kind == "text" else text

    lines = [[escaped(column.heading) for column in columns], ["---"] * len(columns)]
    lines += [[cell(column, column.cell(row, TEXT)[0]) for column in columns] for row in rows]
    return [f"| {' | '.join(line)} |" for line in lines] if rows else []


def _folded(shown: Table | None) -> Iterator[str]:
    if shown is not None and (lines := _table(shown)):
        note = ["", escaped(shown.note)] if shown.note else []
        yield from ("", "<details>", f"<summary>{escaped(shown.caption)}</summary>", "", *lines, *note)
        yield from ("", "</details>")
