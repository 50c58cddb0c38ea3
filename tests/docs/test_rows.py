"""docs/spec-rows.md names every row a test is named after, and for each row the files of its tests."""

from __future__ import annotations

import re
from collections import defaultdict

from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "spec-rows.md"
NAME = re.compile(r"^\s*def test_((?:[A-F]\d+_)+)", re.MULTILINE | re.IGNORECASE)
ROW = re.compile(r"^\| ([A-F]\d+) \| (.+) \| (.+) \|$", re.MULTILINE)


def test_the_table_and_the_tests_agree() -> None:
    tested: dict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "tests").rglob("test_*.py"):
        for numbers in NAME.findall(path.read_text()):
            for number in numbers.strip("_").split("_"):
                tested[number.upper()].add(str(path.relative_to(ROOT / "tests")))
    listed = {row: set(re.findall(r"`([^`]+)`", files)) for row, _, files in ROW.findall(PAGE.read_text())}
    assert listed == tested


def test_rows_stand_once_and_in_order() -> None:
    rows = [(row[0], int(row[1:])) for row, _, _ in ROW.findall(PAGE.read_text())]
    assert rows == sorted(set(rows))
