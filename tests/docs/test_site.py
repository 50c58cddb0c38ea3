"""The site of the pages: what the gate's stage refuses, and that links lead to the same files as in the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

OTHERS = ("artifacts/README.md", "LICENSE", "mkdocs.yml", "scripts/lib/site.py")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """All that the site is made of."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    scripts = (str(script.relative_to(ROOT)) for script in ROOT.glob("benchmarks/frameworks/scripts/*.py"))
    for name in (*(page.name for page in ROOT.glob("*.md")), *OTHERS, *scripts):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    return tmp_path


def build(tree: Path) -> subprocess.CompletedProcess[str]:
    """The command of scripts/check."""
    (line,) = re.findall(r"stage site (env .*)", (ROOT / "scripts" / "check").read_text())
    return subprocess.run(line.split(), cwd=tree, env=os.environ, capture_output=True, text=True, check=False)


def test_links_lead_to_the_same_files_as_in_the_repository(tree: Path) -> None:
    (tree / "code.py").write_text("# a file that no page is made of\n")
    with (tree / "docs" / "compare.md").open("a") as page:
        page.write("\n[out](../code.py), [anchor](../artifacts/README.md#device-row)\n")
    done = build(tree)
    assert done.returncode == 0, done.stderr
    text = (tree / "site" / "docs" / "compare" / "index.html").read_text()
    assert 'href="../../code.py"' in text
    assert 'href="../../artifacts/#device-row"' in text
    for path in ("index.html", "artifacts/index.html", "code.py", "LICENSE", "docs/images/report_page.png"):
        assert (tree / "site" / path).is_file(), path


def test_a_page_link_or_heading_that_is_not_there_ends_the_stage(tree: Path) -> None:
    (tree / "docs" / "orphan.md").write_text("# In no navigation\n")
    with (tree / "docs" / "compare.md").open("a") as page:
        page.write("\n[file](../nothing.py), [heading](metrics.md#nowhere)\n")
    done = build(tree)
    assert done.returncode == 1
    for named in ("docs/orphan.md", "'../nothing.py'", "'#nowhere'"):
        assert named in done.stderr
