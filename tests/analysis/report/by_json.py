"""What a report shows of a summary, with JSON in place of structs (`tests.analysis.by_json`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aorta.analysis.documents.summary import Summary
from aorta.analysis.report import brief_text as _brief
from aorta.analysis.report import html, kernels, terminal_text
from aorta.analysis.report.html import page_tables, summary_charts, verdict_cards
from tests.analysis.by_json import built, by_json

brief_text = by_json(_brief.brief_text)
comparison_table = by_json(terminal_text.comparison_table)
dataset_table = by_json(terminal_text.dataset_table)
effect_charts = by_json(summary_charts.effect_charts)
health_block = by_json(terminal_text.health_block)
kernel_block = by_json(kernels.kernel_block)
metrics_table = by_json(page_tables.metrics_table)
verdict_block = by_json(terminal_text.verdict_block)
verdict_of = by_json(verdict_cards.verdict_of)


def write_page(datasets: Any, summary: Any, path: Path) -> None:
    """Write the page of a summary."""
    html.write_page(datasets, built(Summary, summary), path)
