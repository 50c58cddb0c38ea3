"""The table model: what a terminal and the page show of the same rows."""

from __future__ import annotations

from aorta.report.tables import ON_PAGE, Column, Table, page_table, text_lines
from aorta.terminal_style import Style

ROWS = [
    {"name": "first", "part": {"time_ms": 164.918}, "bytes": 26_214_400, "share": 0.561, "count": 3, "empty": None},
    {"name": "second", "part": None, "bytes": None, "share": 0.0, "count": 12, "empty": None},
]
TOLD = Table(
    "told",
    "Caption",
    (
        Column("name"),
        Column("time_ms", of="part.time_ms", why=lambda row: None if row["part"] else "not seen"),
        Column("bytes", unit="bytes", drop=1),
        Column("share", unit="ratio", drop=1),
        Column("count", unit="count", media=(ON_PAGE,)),
        Column("empty", unit=""),
    ),
    ROWS,
    note="A note.",
)


def test_a_terminal_has_units_in_the_heads_and_no_column_that_says_nothing() -> None:
    assert text_lines(TOLD) == [
        "Caption",
        "name    time, ms    bytes   share",
        "first        165  26.2 MB  56.1 %",
        "second         -        -     0 %",
        "A note.",
    ]


def test_rows_that_are_left_out_are_counted_and_columns_without_room_go_together() -> None:
    assert text_lines(TOLD, Style(terminal_width=20), most=1) == [
        "Caption",
        "name   time, ms",
        "first       165",
        "and 1 more",
        "A note.",
    ]


def test_a_page_says_why_and_sorts_by_what_is_measured() -> None:
    page = page_table(TOLD)
    cells = page.rows[1]
    assert [cell.text for cell in cells[:4]] == ["second", "\u2013", "\u2013", "0\u00a0%"]
    assert [cell.tip for cell in cells[:2]] == [None, "not seen"]
    assert page.rows[0][1].sort == 164.918
    assert [column.numeric for column in page.columns[:2]] == [False, True]
