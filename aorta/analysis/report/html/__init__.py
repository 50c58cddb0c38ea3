"""One HTML file that holds a whole report: verdict, timelines, curves, tables. It works from disk, without a network.

    from aorta.analysis.report.html import PAGE_FILE, write_page
    write_page(datasets, summary, output / PAGE_FILE)

Must not load bokeh or jinja2 before a page is written, compute a number that
`summary.json` has, or let a word from a file become markup.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from aorta.analysis.aggregate import LabelledRun
    from aorta.analysis.documents.summary import Summary

__all__ = ["PAGE_FILE", "write_page"]

PAGE_FILE: Final = "report.html"


def write_page(
    datasets: Mapping[str, LabelledRun],
    summary: Summary,
    path: Path,
    named: Callable[[Any], Any] = lambda found: found,
) -> None:
    """Write the page of a report to `path`, replacing what is there.

    Args:
        datasets: label -> dataset, as `summary.datasets` has them; the reference and the candidate among them.
        summary: the content of `summary.json`.
        named: puts the name of an archive in place of the temporary folder that it was unpacked to.

    Raises:
        OSError: `path` cannot be written.
    """
    from aorta.analysis.report.html.page_content import page_html
    from aorta.records.files import NOT_UTF8

    path.write_text(page_html(datasets, summary, named), encoding="utf-8", errors=NOT_UTF8, newline="\n")
