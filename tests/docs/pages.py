"""The documentation as data: pages, tables, fenced commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), ROOT / "artifacts" / "README.md", *(ROOT / "docs").rglob("*.md")])
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name(page: Path) -> str:
    """A page as a test id."""
    return str(page.relative_to(ROOT))


def fenced(page: Path, language: str) -> Iterator[str]:
    """Bodies of the fenced blocks of one language."""
    return (body for found, body in _FENCE.findall(page.read_text()) if found == language)


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def section(page: Path, heading: str) -> str:
    """What stands between a heading (any level, as it is written after the marks) and the next one."""
    parts = re.split(r"^#{1,6} ", prose(page), flags=re.MULTILINE)
    (found,) = (part for part in parts if part.splitlines() and part.splitlines()[0] == heading)
    return found


def first_column(text: str) -> list[str]:
    """First cells of the rows of all tables in `text`, heads left out."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    heads = {index - 1 for index, line in enumerate(rows) if set(line) <= set("|- :")}
    return [
        line.split("|")[1].strip() for index, line in enumerate(rows) if index not in heads and index - 1 not in heads
    ]


def code(cell: str) -> list[str]:
    """The words in backticks of one cell."""
    return re.findall(r"`([^`]+)`", cell)
