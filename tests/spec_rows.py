"""Which tests show the rows of `docs/dev/spec-rows.md`: `python -m tests.spec_rows` brings the page up to date.

A row says in one phrase what AORTA has to do, and how that was seen; `@pytest.mark.spec("A5", "A16")` on a test says
which rows it shows, and the files of these tests are the row's last column. Must not: import the tests.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).resolve().parent
PAGE: Final = TESTS.parent / "docs" / "dev" / "spec-rows.md"
ROW: Final = re.compile(r"^\| (?P<row>[A-Z]\d+) \| (?P<behaviour>[^|]+) \|(?P<seen>[^|]*)\|(?:[^|]*\|)?$", re.MULTILINE)
"""A line of the page's tables."""


def files_of_rows() -> dict[str, list[str]]:
    """Row -> the files of its tests, once each, in order."""
    files: dict[str, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        text, file = path.read_text(), str(path.relative_to(TESTS))
        for node in ast.walk(ast.parse(text)) if "mark.spec" in text else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for row in (row for decorator in node.decorator_list for row in _rows(decorator)):
                    if file not in files[row]:
                        files[row].append(file)
    return files


def _rows(decorator: ast.expr) -> list[str]:
    """The rows of `@pytest.mark.spec(...)`; none for any other decorator."""
    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.spec":
        return [ast.literal_eval(row) for row in decorator.args]
    return []


def updated(page: str) -> str:
    """The page with the column `tests` as it is now.

    Raises:
        ValueError: a marker names a row that there is not, or no test shows a row.
    """
    files = files_of_rows()
    known = {line["row"] for line in ROW.finditer(page)}
    if unknown := files.keys() - known:
        raise ValueError(f"no such rows in docs/dev/spec-rows.md: {', '.join(sorted(unknown))}")
    if unshown := known - files.keys():
        raise ValueError(f"no test is marked with these rows: {', '.join(sorted(unshown))}")

    def current(line: re.Match[str]) -> str:
        shown = ", ".join(f"`{file}`" for file in files[line["row"]])
        return f"| {line['row']} | {line['behaviour']} | {line['seen'].strip()} | {shown} |"

    return ROW.sub(current, page)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
