"""docs/spec-rows.md is what `python -m tests.spec_rows` makes of the tests' markers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import spec_rows
from tests.docs.pages import ROOT


def test_the_table_is_current() -> None:
    written = (ROOT / "docs" / "spec-rows.md").read_text()
    assert written == spec_rows.page(), "run: python -m tests.spec_rows > docs/spec-rows.md"


def test_rows_stand_once_and_in_order() -> None:
    rows = [(row[0], int(row[1:])) for of_section in spec_rows.ROWS.values() for row in of_section]
    assert rows == sorted(set(rows))


def test_a_row_that_nobody_knows_and_a_row_that_nobody_shows_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec_rows, "TESTS", tmp_path / "tests")
    (tmp_path / "tests").mkdir()
    marked = "import pytest\n\n@pytest.mark.spec({})\ndef test_something(): ...\n"
    rows = [row for of_section in spec_rows.ROWS.values() for row in of_section]
    (tmp_path / "tests/test_some.py").write_text(marked.format(", ".join(map(repr, rows))))
    assert spec_rows.tests_of() == {row: ["tests/test_some.py::test_something"] for row in rows}
    (tmp_path / "tests/test_more.py").write_text(marked.format("'Z9'"))
    with pytest.raises(ValueError, match="no such rows in tests/spec_rows\\.py: Z9"):
        spec_rows.page()
    (tmp_path / "tests/test_more.py").unlink()
    (tmp_path / "tests/test_some.py").write_text(marked.format(", ".join(map(repr, rows[1:]))))
    with pytest.raises(ValueError, match=f"no test is marked with these rows: {rows[0]}"):
        spec_rows.page()
