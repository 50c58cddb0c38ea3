"""Frames as files: CSV, the same compressed, Parquet."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import pandas as pd
import pyarrow.parquet as parquet
import pytest

from aorta.errors import InputError
from aorta.report.table_files import check_format, write_table

LATE = 1_790_000_000_000_000_001
"""Beyond 2^53: as a float it would lose its last digit."""


def frames() -> list[pd.DataFrame]:
    """Two frames whose categories differ; an unknown rank is missing."""
    return [
        pd.DataFrame({"start_ns": [LATE, LATE + 1], "kind": pd.Categorical([None, "allreduce"]), "rank": [0, 1]}),
        pd.DataFrame({"start_ns": [5], "kind": pd.Categorical(["a, b"]), "rank": [pd.NA]}),
    ]


def write(path: Path) -> int:
    return write_table([frame.astype({"rank": "Int64"}) for frame in frames()], path)


def test_csv_holds_every_row_to_the_last_nanosecond_and_nothing_for_what_is_not_known(tmp_path: Path) -> None:
    assert write(tmp_path / "rows.csv") == 3
    assert (tmp_path / "rows.csv").read_text().splitlines() == [
        "start_ns,kind,rank",
        f"{LATE},,0",
        f"{LATE + 1},allreduce,1",
        '5,"a, b",',
    ]


@pytest.mark.parametrize("kind", ["object", "category", "string"])
def test_no_cell_is_a_formula(kind: str, tmp_path: Path) -> None:
    names = ["=1+1", "+1", "-1", "@SUM(1)", "\t=1", "\r=1", "a=1", None]
    write_table([pd.DataFrame({"name": pd.Series(names, dtype=kind), "ns": [-1] * 8})], tmp_path / "rows.csv")
    rows = pd.read_csv(tmp_path / "rows.csv", keep_default_na=False)
    assert rows["name"].tolist() == [*(f"'{name}" for name in names[:5]), "'\\r=1", "a=1", ""]
    assert rows["ns"].tolist() == [-1] * 8


def test_compressed_csv_is_the_same_text_and_the_same_bytes_under_any_name(tmp_path: Path) -> None:
    plain, compressed, renamed = (tmp_path / name for name in ("a.csv", "a.csv.gz", "b.csv.gz"))
    for path in (plain, compressed, renamed):
        write(path)
    assert gzip.decompress(compressed.read_bytes()) == plain.read_bytes()
    assert compressed.read_bytes() == renamed.read_bytes()


def test_parquet_gives_the_rows_back(tmp_path: Path) -> None:
    assert write(tmp_path / "rows.parquet") == 3
    back = parquet.read_table(tmp_path / "rows.parquet").to_pydict()
    assert back == {"start_ns": [LATE, LATE + 1, 5], "kind": [None, "allreduce", "a, b"], "rank": [0, 1, None]}


def test_without_pyarrow_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r'pip install "PATH/TO/CHECKOUT\[parquet\]"'):
        check_format("parquet")
    check_format("csv")
