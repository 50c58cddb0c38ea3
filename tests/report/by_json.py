"""What a report shows of a summary, with JSON in place of structs (`tests.analysis.by_json`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aorta.analysis import cautions
from aorta.documents.comparison import Summary
from aorta.report import kernel_tables as kernels
from aorta.report import run_tables, tables
from aorta.report import text as terminal_text
from aorta.report.page import page_content, verdict_cards
from aorta.terminal_style import PLAIN, Style
from tests.analysis.by_json import built, by_json

_alerts = by_json(cautions.alerts)
brief_text = by_json(terminal_text.brief_text)
kernel_block = by_json(kernels.kernel_block)
run_block = by_json(terminal_text.run_block)
verdict_of = by_json(verdict_cards.verdict_of)
_comparison_table = by_json(run_tables.comparison_table)
_collectives_table = by_json(run_tables.collectives_table)
_metrics_table = by_json(run_tables.metrics_table)


def alerts(summary: Any) -> list[str]:
    """Return what is wrong with a report."""
    return _alerts(summary["datasets"], summary["comparison"])


def comparison_text(comparison: Any, style: Style = PLAIN) -> str:
    """Return the table of a comparison as a terminal shows it."""
    return "\n".join(tables.text_lines(_comparison_table(comparison), style))


def page_comparison(comparison: Any) -> tables.Table:
    """Return the table of a comparison as the page shows it."""
    return tables.page_table(_comparison_table(comparison))


def metrics_text(label: str, entry: Any) -> str:
    """Return the metrics of a dataset as a terminal shows them."""
    return "\n".join(tables.text_lines(_metrics_table(label, entry)))


def collectives_text(label: str, entry: Any) -> str:
    """Return the collectives of a dataset as a terminal shows them."""
    return "\n".join(tables.text_lines(_collectives_table({label: entry})))


def write_page(datasets: Any, summary: Any, path: Path) -> None:
    """Write the page of a summary."""
    page_content.write_page(datasets, built(Summary, summary), path)
