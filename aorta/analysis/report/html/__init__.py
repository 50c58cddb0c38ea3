"""One HTML file that holds a whole report: verdict, timelines, curves, tables. It works from disk, without a network.

    from aorta.analysis.report.html import PAGE_FILE, write_page
    why_not = write_page(datasets, summary, output / PAGE_FILE)

Must not load bokeh or jinja2 before a page is written, compute a number that
`summary.json` has, or let a word from a file become markup.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from aorta.analysis.aggregate import LabelledRun
    from aorta.analysis.documents.summary import Summary

__all__ = ["PAGE_FILE", "write_page"]

PAGE_FILE: Final = "report.html"
_PACKAGES: Final = ("bokeh", "jinja2")


def write_page(
    datasets: Mapping[str, LabelledRun],
    summary: Summary,
    path: Path,
    named: Callable[[Any], Any] = lambda found: found,
) -> str | None:
    """Write the page of a report to `path`, replacing what is there.

    Args:
        datasets: label -> dataset, as `summary.datasets` has them; the reference and the candidate among them.
        summary: the content of `summary.json`.
        named: puts the name of an archive in place of the temporary folder that it was unpacked to.

    Returns:
        None, or why there is no page: what is missing, and the command that installs it.

    Raises:
        OSError: `path` cannot be written.
    """
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed: pip install {' '.join(missing)}"
    from aorta.analysis.report.html.page_content import page_html

    path.write_text(page_html(datasets, summary, named), encoding="utf-8", newline="\n")
    return None
