"""docs/dev/spec-rows.md is what `python -m tests.spec_rows` makes of the tests' markers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import spec_rows
from tests.docs.pages import ROOT


def test_the_table_is_current() -> None:
    written = (ROOT / "docs" / "dev" / "spec-rows.md").read_text()
    assert written == spec_rows.page(), "run: python -m tests.spec_rows > docs/dev/spec-rows.md"
    for row, seen in (("D40", "run"), ("D8", "run, simulated device"), ("E13", "call, stand-in (a server of S3)")):
        assert re.search(rf"^\| {row} \|[^|]*\| {re.escape(seen)} \|", written, re.MULTILINE)


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


STARTS = """
import subprocess
from tests.ranks import forked as ranks

def started():
    return subprocess.run(["true"])

def test_run(): started()
def test_of_ranks(): ranks()
def test_of_a_fixture(folder): ...
def test_call(): print(len("run"))
"""


@pytest.mark.parametrize(
    ("test", "words"),
    [
        ("run", "run"),
        ("of_ranks", "run"),
        ("of_a_fixture", "run"),
        ("call", "call"),
        ("of_a_fixture call", "run, call"),
    ],
)
def test_what_was_run_is_told_from_what_was_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, test: str, words: str
) -> None:
    (tmp_path / "tests" / "room").mkdir(parents=True)
    (tmp_path / "tests/room/test_some.py").write_text(STARTS)
    conftest = "from tests.room.test_some import started\n\n@pytest.fixture\ndef folder():\n    return started()\n"
    (tmp_path / "tests/room/conftest.py").write_text(conftest)
    monkeypatch.setattr(spec_rows, "TESTS", tmp_path / "tests")
    assert (
        spec_rows.seen("A2", [f"tests/room/test_some.py::test_{name}" for name in test.split()]) == f"{words}, by hand"
    )


@pytest.mark.thorough
def test_a_row_run_by_hand_that_a_test_runs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_rows, "BY_HAND", {"D": (40,)})
    with pytest.raises(ValueError, match="tests run what is said to have been run by hand: D40"):
        spec_rows.page()
