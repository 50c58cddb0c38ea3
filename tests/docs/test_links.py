"""Every relative link and picture of every page leads somewhere, headings included."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import PAGES, ROOT, name, prose

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
LARGEST_PICTURE = 150_000


def anchors(page: Path) -> set[str]:
    """What a heading is called in a link: lower case, blanks as hyphens, other marks dropped."""
    headings = re.findall(r"^#{1,6} (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path) -> Iterator[str]:
    """Targets of a page's relative links that lead nowhere."""
    for target in LINK.findall(prose(page)):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            if not there.exists() or (anchor and anchor not in anchors(there)):
                yield target


def test_links_resolve() -> None:
    assert any(LINK.search(prose(page)) for page in PAGES)
    assert [f"{name(page)}: {target}" for page in PAGES for target in broken(page)] == []


def test_every_page_is_listed() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / target).resolve() for target in LINK.findall(index.read_text())}
    assert set(PAGES) - {index} <= linked


def test_pictures_are_small_and_used() -> None:
    used = {(page.parent / target).resolve() for page in PAGES for target in LINK.findall(prose(page))}
    pictures = [path for path in (ROOT / "docs" / "images").iterdir() if path.is_file()]
    assert pictures
    for picture in pictures:
        assert picture.stat().st_size < LARGEST_PICTURE, picture.name
        assert picture in used, picture.name
