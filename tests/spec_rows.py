"""Which tests show the rows of `docs/dev/spec-rows.md`: `python -m tests.spec_rows` brings the page up to date.

A row says in one phrase what AORTA has to do, and how that was seen; `@pytest.mark.spec("A5", "A16")` on a test says
which rows it shows, and the files of these tests are the row's last column. With rows as words
(`python -m tests.spec_rows A5 D42`) the command names their tests, as pytest takes them. Must not: import the tests.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).resolve().parent
PAGE: Final = TESTS.parent / "docs" / "dev" / "spec-rows.md"
ROW: Final = re.compile(r"^\| (?P<row>[A-Z]\d+) \| (?P<behaviour>[^|]+) \|(?P<seen>[^|]*)\|(?:[^|]*\|)?$", re.MULTILINE)
"""A line of the page's tables."""


def marked() -> Iterator[tuple[str, str]]:
    """Row and test (`tests/room/test_file.py::test_name`), for each row of each marker."""
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "mark.spec" in text else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                test = f"{path.relative_to(TESTS.parent)}::{node.name}"
                yield from ((row, test) for decorator in node.decorator_list for row in _rows(decorator))


def _rows(decorator: ast.expr) -> list[str]:
    """The rows of `@pytest.mark.spec(...)`; none for any other decorator."""
    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.spec":
        return [ast.literal_eval(row) for row in decorator.args]
    return []


def tests_of() -> dict[str, list[str]]:
    """Row -> its tests, in the order of their files."""
    found: dict[str, list[str]] = defaultdict(list)
    for row, test in marked():
        found[row].append(test)
    return dict(found)


def updated(page: str) -> str:
    """The page with the column `tests` as it is now.

    Raises:
        ValueError: a marker names a row that there is not, or no test shows a row.
    """
    found = tests_of()
    known = {line["row"] for line in ROW.finditer(page)}
    if unknown := found.keys() - known:
        raise ValueError(f"no such rows in docs/dev/spec-rows.md: {', '.join(sorted(unknown))}")
    if unshown := known - found.keys():
        raise ValueError(f"no test is marked with these rows: {', '.join(sorted(unshown))}")

    def current(line: re.Match[str]) -> str:
        files = dict.fromkeys(test.partition("::")[0].removeprefix("tests/") for test in found[line["row"]])
        shown = ", ".join(f"`{file}`" for file in files)
        return f"| {line['row']} | {line['behaviour']} | {line['seen'].strip()} | {shown} |"

    return ROW.sub(current, page)


if __name__ == "__main__":
    if asked := sys.argv[1:]:
        sys.stdout.write("".join(f"{test}\n" for row in asked for test in tests_of()[row]))
    else:
        PAGE.write_text(updated(PAGE.read_text()))
