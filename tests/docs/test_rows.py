"""docs/dev/spec-rows.md follows the tests' markers, and a row that is wrong is named."""

from __future__ import annotations

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
