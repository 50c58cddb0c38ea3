"""One HTML file that holds a whole report: verdict, timelines, curves, tables. It works from disk, without a network.

    from aorta.analysis.report.html import PAGE_FILE, why_no_page, write_page
    if (reason := why_no_page()) is None:
        write_page(datasets, summary, output / PAGE_FILE)

Must not load bokeh or jinja2 before a page is written, compute a number that
`summary.json` has, or let a word from a file become markup.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aorta.errors import ToolMissing

if TYPE_CHECKING:
    from aorta.analysis.aggregate import LabelledRun
    from aorta.analysis.documents.summary import Summary

__all__ = ["PAGE_FILE", "why_no_page", "write_page"]

PAGE_FILE: Final = "report.html"
_PACKAGES: Final = ("bokeh", "jinja2")


def why_no_page() -> str | None:
    """What is missing for a page and the command that installs it; None if nothing is."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if not missing:
        return None
    return f"{' and '.join(missing)} not installed: pip install {' '.join(missing)}"


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
        ToolMissing: bokeh or jinja2 is not installed; says how to install them.
        OSError: `path` cannot be written.
    """
    reason = why_no_page()
    if reason is not None:
        raise ToolMissing(f"{path.name} was not written: {reason}")
    from aorta.analysis.report.html.page_content import page_html

    path.write_text(page_html(datasets, summary, named), encoding="utf-8", newline="\n")
