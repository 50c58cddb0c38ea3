"""docs/dev/spec-rows.md follows the tests' markers, and a row that is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import spec_rows


def test_the_table_is_current() -> None:
    written = spec_rows.PAGE.read_text()
    assert written == spec_rows.updated(written), "run: python -m tests.spec_rows"


def test_rows_stand_once_and_in_order() -> None:
    written = spec_rows.PAGE.read_text()
    rows = [(line["row"][0], int(line["row"][1:])) for line in spec_rows.ROW.finditer(written)]
    assert rows == sorted(set(rows))
    in_tables = [line for line in written.partition("## A.")[2].splitlines() if line.startswith("| ")]
    assert len(rows) == len(in_tables) - in_tables.count("| row | behaviour | seen | tests |")


def test_the_last_column_follows_the_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_rows, "TESTS", tmp_path / "tests")
    (tmp_path / "tests").mkdir()
    marked = "import pytest\n\n@pytest.mark.spec({})\ndef test_something(): ...\n"
    (tmp_path / "tests/test_some.py").write_text(marked.format("'A1', 'A2'"))
    assert spec_rows.tests_of() == {row: ["tests/test_some.py::test_something"] for row in ("A1", "A2")}
    page = "words\n\n| A1 | it does | call | |\n| A2 | so | run, by hand | `gone.py` |\n"
    assert spec_rows.updated(page) == page.replace("| |", "| `test_some.py` |").replace("gone.py", "test_some.py")
    with pytest.raises(ValueError, match=r"no such rows in docs/dev/spec-rows\.md: A2"):
        spec_rows.updated("| A1 | it does | |")
    with pytest.raises(ValueError, match="no test is marked with these rows: B7"):
        spec_rows.updated(page + "| B7 | more | |")
