"""How sizes and numbers are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from aorta.analysis.amounts import number, size_name
from aorta.analysis.report import write_report
from tests.analysis.attribution.test_attribute import two_ranks


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "unknown size"),
        (-1, "unknown size"),
        (0, "0 B"),
        (999, "999 B"),
        (8_000, "8 kB"),
        (1_048_576, "1.05 MB"),
        (25_000_000, "25 MB"),
        (26_214_400, "26.2 MB"),
        (100_000_000, "100 MB"),
        (999_999, "1000 kB"),
        (3_840_000_000, "3.84 GB"),
    ],
)
def test_bytes_have_three_digits(count: int | None, text: str) -> None:
    assert size_name(count) == text


def test_numbers_have_the_digits_of_their_unit() -> None:
    assert [number(1.23456, unit) for unit in ("ms", "ratio", "GB/s")] == ["1.235", "1.2346", "1.235"]
    assert number(None, "ms") == "null"


def test_a_cell_of_a_picture_has_room_for_fewer_digits() -> None:
    assert [number(1.23456, unit, fewer=1) for unit in ("ms", "ratio", "GB/s")] == ["1.23", "1.235", "1.23"]


def test_one_report_writes_a_size_in_one_way(tmp_path: Path) -> None:
    runs = {name: tmp_path / name for name in ("base", "new")}
    for name, slow in (("base", 1.0), ("new", 3.0)):
        two_ranks(runs[name], name, slow)
    text = write_report(runs, tmp_path / "out", "base", "new", html=False).text
    assert "reducescatter 25 MB n=2" in text
    assert "reducescatter of 25 MB on group" in " ".join(text.split())
    assert "25.0 MB" not in text
