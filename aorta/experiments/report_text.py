"""CSV and paragraphs of what sweeps, studies and tunings say at their ends.

Must not write a number where there is none.
"""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Iterable, Sequence

from aorta.terminal_style import LEAST_WIDTH


def csv_text(rows: Iterable[Sequence[str | float | None]]) -> str:
    """Rows as CSV: floats with all their digits, an empty cell for None."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in rows:
        writer.writerow("" if cell is None else repr(cell) if isinstance(cell, float) else cell for cell in row)
    return out.getvalue()


def filled(lines: Iterable[str]) -> str:
    """Lines no wider than a terminal; a table, whose rows are indented, stays as it is."""
    return "\n".join(line if line.startswith("  ") else paragraph(line) for line in lines)


def paragraph(line: str) -> str:
    """One line no wider than a terminal, what follows its first break indented."""
    return textwrap.fill(line, LEAST_WIDTH, subsequent_indent="  ")
