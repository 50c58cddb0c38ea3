"""The test files of `scripts/check --fast`: `python -m tests.pure` names them.

They are chosen by what they are, not by a list. A file is pure if nothing reaches beyond the test's own process:
neither the file, nor a helper of the tests or a `conftest.py` that it uses, nor a module of AORTA that it names imports
torch, processes, threads, clocks, sockets or Hydra, and nothing of AORTA that it uses, at any distance, draws pictures
or pages. Must not: import what it looks at.
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
BEYOND: Final = frozenset(
    {"torch", "subprocess", "multiprocessing", "threading", "concurrent", "time", "socket", "http"}
    | {"hydra", "fsspec", "moto", "selenium", "benchmarks"}
)
"""Packages that reach beyond the test's own process, or take their time."""
PICTURES: Final = frozenset({"PIL", "matplotlib", "bokeh"})
WITHOUT_TORCH: Final = frozenset(
    {"timeline", "records", "documents", "read", "analysis", "whatif", "merge", "report", "autopsy", "config"}
    | {"experiments", "command_line", "errors", "loggers", "terminal_style"}
)
"""AORTA's packages that never load torch (import-linter holds them to it)."""


@cache
def imports(path: Path) -> frozenset[str]:
    """Dotted names of all that a file imports, wherever in it."""
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def _packages(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(path)}


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


def _reached(path: Path, package: str, seen: set[Path]) -> set[Path]:
    """The files of one of our packages that a file imports, at any distance; `seen` grows by them."""
    for name in imports(path):
        found = file_of(name) if name.partition(".")[0] == package else None
        if found is not None and found not in seen:
            seen.add(found)
            _reached(found, package, seen)
    return seen


def is_pure(path: Path) -> bool:
    """Whether a file of the tests is pure."""
    above = path.relative_to(ROOT / "tests").parents
    conftests = [ROOT / "tests" / folder / "conftest.py" for folder in above if folder.parts]
    own = {path, *(one for one in conftests if one.is_file())}
    for one in tuple(own):
        _reached(one, "tests", own)
    named = {name for one in own for name in imports(one) if name.startswith("aorta.")}
    direct = {found for name in named if (found := file_of(name)) is not None}
    everything = set(direct)
    for one in direct:
        _reached(one, "aorta", everything)
    return (
        all(BEYOND.isdisjoint(_packages(one)) for one in own | direct)
        and all(PICTURES.isdisjoint(_packages(one)) for one in own | everything)
        and all(name.split(".")[1] in WITHOUT_TORCH for name in named)
    )


def files() -> list[Path]:
    """Every pure file of tests, in order."""
    return [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if is_pure(path)]


if __name__ == "__main__":
    sys.stdout.write("".join(f"{path.relative_to(ROOT)}\n" for path in files()))
