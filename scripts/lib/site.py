"""Hooks of MkDocs (`mkdocs.yml`): the site has the layout of the repository, so links are written once.

A page of `docs/` stands under `docs/` of the site as well, beside `README.md`, `CONTRIBUTING.md` and the others of
`PAGES`; `../artifacts/README.md` then leads to the same page on GitHub and in the site. A file of the repository that
is no page and that a page links to (a script, the licence) is in the site as it is. Must not: change a page's text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PAGES: Final = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "artifacts/README.md")
LINK: Final = re.compile(r"\]\(([^)#\s]+)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """The pages under the names they have in the repository, and what they link to."""
    docs = Path(config.docs_dir)
    root = docs.parent

    def entry(name: str) -> File:
        return File(name, str(root), config.site_dir, config.use_directory_urls)

    own = [f"{docs.name}/{file.src_uri}" for file in files.documentation_pages()]
    media = [file for file in files if not file.is_documentation_page() and not file.abs_src_path.startswith(str(docs))]
    moved = {name: entry(name) for name in (*PAGES, *own)}
    for name in list(moved):
        page = root / name
        for target in LINK.findall(page.read_text()):
            there = page.parent / target
            if "://" not in target and there.is_file():
                linked = there.resolve().relative_to(root).as_posix()
                moved.setdefault(linked, entry(linked))
    return Files([*media, *moved.values()])
