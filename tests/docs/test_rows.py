"""docs/dev/spec-rows.md follows the tests' markers, and a row that is wrong is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import spec_rows


def test_the_table_is_current() -> None:
    written = spec_rows.PAGE.read_text()
    assert written == spec_rows.updated(written), "run: python -m tests.spec_rows"
    for row, seen in (("D40", "run"), ("D8", "run, simulated device"), ("E13", "call, stand-in (a server of S3)")):
        assert re.search(rf"^\| {row} \|[^|]*\| {re.escape(seen)} \|", written, re.MULTILINE)


def test_rows_stand_once_and_in_order() -> None:
    written = spec_rows.PAGE.read_text()
    rows = [(line["row"][0], int(line["row"][1:])) for line in spec_rows.ROW.finditer(written)]
    assert rows == sorted(set(rows))
    in_tables = [line for line in written.partition("## A.")[2].splitlines() if line.startswith("| ")]
    assert len(rows) == len(in_tables) - in_tables.count("| row | behaviour | seen | tests |")


def test_the_last_two_columns_follow_the_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_rows, "TESTS", tmp_path / "tests")
    (tmp_path / "tests").mkdir()
    marked = "import pytest\n\n@pytest.mark.spec({})\ndef test_something(): ...\n"
    (tmp_path / "tests/test_some.py").write_text(marked.format("'A1', 'A2'"))
    assert spec_rows.tests_of() == {row: ["tests/test_some.py::test_something"] for row in ("A1", "A2")}
    page = "words\n\n| A1 | it does | |\n| A2 | so | run, by hand, read (a part) | `gone.py` |\n"
    columns = {"A1": "it does | call", "A2": "so | call, by hand, read (a part)"}
    lines = [f"| {row} | {told} | `test_some.py` |\n" for row, told in columns.items()]
    assert spec_rows.updated(page) == "words\n\n" + "".join(lines)
    with pytest.raises(ValueError, match=r"no such rows in docs/dev/spec-rows\.md: A2"):
        spec_rows.updated("| A1 | it does | |")
    with pytest.raises(ValueError, match="no test is marked with these rows: B7"):
        spec_rows.updated(page + "| B7 | more | |")


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
    tests = [f"tests/room/test_some.py::test_{name}" for name in test.split()]
    assert spec_rows.seen("run, by hand", tests) == f"{words}, by hand"


@pytest.mark.thorough
def test_a_row_run_by_hand_that_a_test_runs_is_an_error() -> None:
    page = re.sub(r"(\| D40 \|[^|]*\|) run \|", r"\1 run, by hand |", spec_rows.PAGE.read_text())
    with pytest.raises(ValueError, match="tests run what is said to have been run by hand: D40"):
        spec_rows.updated(page)
