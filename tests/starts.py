"""Tells tests that start processes from those that only call, by reading them.

A test starts a process if it names something of `STARTS`, or a helper, fixture or class of the tests that does. Must
not import the tests.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Final

STARTS: Final = frozenset({"subprocess.run", "subprocess.Popen", "subprocess.check_output", "tests.ranks.forked"})


def starts_process(path: Path, test: str, tests: Path) -> bool:
    """Whether the test of this name in `path`, somewhere below the folder `tests`, starts a process."""
    reached = {_qualified(path, test, tests)}
    ahead = list(reached)
    while ahead:
        module, _, name = ahead.pop().rpartition(".")
        file = tests.parent / f"{module.replace('.', '/')}.py"
        if module.startswith(tests.name) and file.exists():
            new = _names(file, tests).get(name, set()) - reached
            reached |= new
            ahead += new
    return not STARTS.isdisjoint(reached)


@cache
def _names(path: Path, tests: Path) -> dict[str, set[str]]:
    """Definition of a file -> the qualified names in it; a parameter may be a fixture of the file or of conftest.py."""
    tree = ast.parse(path.read_text())
    known: dict[str, str] = {}
    definitions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            known |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
    known |= {node.name: _qualified(path, node.name, tests) for node in definitions}
    named: dict[str, set[str]] = {}
    for node in definitions:
        words = named[node.name] = set()
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and part.id in known:
                words.add(known[part.id])
            elif isinstance(part, ast.arg):
                words.add(known.get(part.arg, _qualified(path.with_name("conftest.py"), part.arg, tests)))
            elif isinstance(part, ast.Attribute):
                words.add(ast.unparse(part))
    return named


def _qualified(path: Path, name: str, tests: Path) -> str:
    return ".".join((*path.relative_to(tests.parent).with_suffix("").parts, name))
