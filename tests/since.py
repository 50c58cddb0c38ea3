"""The test files of `scripts/check --since REF`: `python -m tests.since REF` names those nearest to what changed.

Changed is what git says of the working tree since REF, new files too. How near a test is to a module is the fewest
imports of AORTA between them: its own and those of the tests' helpers count as one. At most `NEAREST` modules away, and
at most `MOST` files, `MOST_THAT_START` of which start processes; how many others reach the change is said on stderr. A
file that is no module is near to the tests that name it, a page to those of `tests/docs`. Must not: import what it
looks at.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import deque
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
NEAREST: Final = 2
MOST: Final = 40
MOST_THAT_START: Final = 4
"""A process that imports torch takes seconds, most tests milliseconds: together less than 90 s on two idle cores."""
_STARTING: Final = re.compile(
    r"^import subprocess$|^from tests\.runs import .*\b(train|attempt|job|program|finished)\b|webdriver", re.MULTILINE
)
_ELSEWHERE: Final = re.compile(r"^pytestmark = .*\b(simulated|gpu|alone|thorough|slow)\b", re.MULTILINE)
"""No test of such a file is run here."""


@cache
def imports(path: Path) -> frozenset[Path]:
    """The files of this repository that a file imports, wherever in it."""
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(filter(None, map(file_of, names)))


@cache
def file_of(name: str) -> Path | None:
    """The file of a module of this repository, by its name or by a name in it."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:end])
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                return path
    return None


@cache
def distances(test: Path) -> dict[Path, int]:
    """Every file that a test reaches -> how many imports outside of the tests lie between."""
    known, near = {test: 0}, deque([test])
    while near:
        path = near.popleft()
        for found in imports(path) - known.keys():
            helper = found.is_relative_to(ROOT / "tests")
            known[found] = known[path] + (not helper)
            (near.appendleft if helper else near.append)(found)  # a helper is as near as its test
    return known


def chosen(changed: set[Path]) -> tuple[list[Path], int]:
    """The test files nearest to these files, those of their names and folders first, and how many more reach them."""
    found: list[tuple[bool, bool, int, Path, bool]] = []
    folders = {path.parent.relative_to(ROOT / "aorta") for path in changed if path.is_relative_to(ROOT / "aorta")}
    names = {path.name for path in changed if path.suffix not in (".py", ".md")}
    pages = any(path.suffix == ".md" for path in changed)
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        text, known = test.read_text(), distances(test)
        far = [known[path] for path in changed & known.keys()]
        if any(name in text for name in names) or (pages and test.parent.name == "docs"):
            far.append(0)
        if far and not _ELSEWHERE.search(text):
            mirrored = any(test.stem == f"test_{path.stem}" for path in changed)
            beside = test.parent.relative_to(ROOT / "tests") in folders
            found.append((not mirrored, not beside, min(far), test, bool(_STARTING.search(text))))
    near, starting = list[Path](), 0
    for *_, far_away, test, slow in sorted(found):
        if far_away <= NEAREST and len(near) < MOST and starting + slow <= MOST_THAT_START:
            near.append(test)
            starting += slow
    return near, len(found) - len(near)


def changed_since(reference: str) -> set[Path]:
    """The files that differ from a commit, and those that git does not know yet."""
    words = (["diff", "--name-only", "-z", reference], ["ls-files", "--others", "--exclude-standard", "-z"])
    said = [
        subprocess.run(["git", *each], cwd=ROOT, check=True, capture_output=True, text=True).stdout for each in words
    ]
    return {ROOT / name for name in "".join(said).split("\0") if name}


if __name__ == "__main__":
    tests, others = chosen(changed_since(sys.argv[1]))
    sys.stderr.write(f"{len(tests)} test files are near to what changed, {others} more reach it\n")
    sys.stdout.write("".join(f"{path.relative_to(ROOT)}\n" for path in tests))
