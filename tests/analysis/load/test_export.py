"""Interval tables as files, and the lanes for Perfetto, read back by other means."""

from __future__ import annotations

import csv
import gzip
import json
import sys
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

import aorta.analysis
from aorta.analysis.load.interval_export import interval_frame, main, write_lanes
from aorta.analysis.load.interval_table import Trace
from aorta.analysis.table_files import check_format, write_table
from aorta.errors import InputError
from tests.analysis.load.kineto_files import document, kernel
from tests.analysis.load.nsys_files import EPOCH_NS, LATER_NS, write_nsys
from tests.analysis.load.tables import COMM, COMPUTE, row, trace

LATE = 1_790_000_000_000_000_001
"""Beyond 2^53: as a float it would lose its last digit."""


def example() -> list[Trace]:
    first = trace(
        [
            row(COMPUTE, LATE, LATE + 1_500, name="gemm, wide"),
            row(COMPUTE, LATE + 1_000, LATE + 2_001, stream=1),
            row(COMM, LATE + 1_800, LATE + 3_000, kind="allreduce", group="dp", seq=4, size=64, name="nccl"),
        ],
        steps=[(7, LATE, LATE + 4_000)],
        groups={"dp": (0, 1)},
    )
    return [first, trace([row(COMPUTE, 5, 6, rank=-1, device=-1)], clock="unknown", path="other")]


def test_csv_holds_every_row_to_the_last_nanosecond_and_nothing_for_what_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    assert write_table(map(interval_frame, example()), path) == 4
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(each["start_ns"]) for each in rows] == [LATE, LATE + 1_000, LATE + 1_800, 5]
    assert [each["class"] for each in rows] == ["compute", "compute", "comm", "compute"]
    comm = rows[2]
    assert (comm["kind"], comm["group"], comm["seq"], comm["bytes"], comm["step"]) == (
        "allreduce",
        "dp",
        "4",
        "64",
        "7",
    )
    assert (rows[0]["name"], rows[0]["kind"], rows[0]["seq"]) == ("gemm, wide", "", "")
    assert (rows[3]["rank"], rows[3]["device"], rows[3]["step"], rows[3]["source"]) == ("", "", "", "other")


def test_compressed_csv_is_the_same_text_and_the_same_bytes_under_any_name(tmp_path: Path) -> None:
    for name in ("a.csv", "a.csv.gz", "b.csv.gz"):
        write_table(map(interval_frame, example()), tmp_path / name)
    plain, compressed, renamed = ((tmp_path / name).read_bytes() for name in ("a.csv", "a.csv.gz", "b.csv.gz"))
    assert gzip.decompress(compressed) == plain
    assert compressed == renamed


def test_the_same_rows_by_the_public_function(tmp_path: Path) -> None:
    write_nsys(tmp_path / "node.sqlite")
    frames = list(aorta.analysis.iter_intervals(tmp_path / "node.sqlite"))
    assert main([str(tmp_path / "node.sqlite"), "--output", str(tmp_path / "out")]) == 0
    with (tmp_path / "out" / "intervals.csv").open() as file:
        written = list(csv.DictReader(file))
    assert sum(map(len, frames)) == len(written) > 0
    assert list(frames[0].columns) == list(written[0])
    assert [str(start) for frame in frames for start in frame["start_ns"]] == [each["start_ns"] for each in written]


def test_parquet_gives_the_rows_back(tmp_path: Path) -> None:
    assert write_table(map(interval_frame, example()), tmp_path / "rows.parquet") == 4
    back = parquet.read_table(tmp_path / "rows.parquet").to_pydict()
    assert back["start_ns"] == [LATE, LATE + 1_000, LATE + 1_800, 5]
    assert back["kind"] == [None, None, "allreduce", None]
    assert back["rank"] == [0, 0, 0, None]


def test_without_pyarrow_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r'pip install "PATH/TO/CHECKOUT\[parquet\]"'):
        check_format("parquet")
    check_format("csv")


def test_lanes_are_merged_named_and_exact(tmp_path: Path) -> None:
    path = tmp_path / "lanes.json.gz"
    count = write_lanes(example(), path)
    content = json.loads(gzip.decompress(path.read_bytes()), parse_float=str)
    events = content["traceEvents"]
    assert len(events) == count
    names = {
        (each["pid"], each["tid"] if each["name"] == "thread_name" else None): each["args"]["name"]
        for each in events
        if each["ph"] == "M"
    }
    lanes = [
        (names[each["pid"], None], names[each["pid"], each["tid"]], each["name"], each["ts"], each["dur"])
        for each in events
        if each["ph"] == "X"
    ]
    assert lanes == [
        ("rank 0, device 0", "steps", "step 7", "0.000", "4.000"),
        ("rank 0, device 0", "compute", "compute", "0.000", "2.001"),
        ("rank 0, device 0", "allreduce", "allreduce", "1.800", "1.200"),
        ("unknown rank (other)", "compute", "compute", "0.000", "0.001"),
    ]
    assert content["otherData"]["zero_ns_REALTIME"] == str(LATE)


def test_the_command_writes_both_files_for_any_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_nsys(tmp_path / "node.sqlite")
    assert main([str(tmp_path / "node.sqlite"), "--output", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert f"{tmp_path / 'out' / 'intervals.csv'}: 8 rows" in said
    with (tmp_path / "out" / "intervals.csv").open(newline="") as file:
        starts = [int(each["start_ns"]) for each in csv.DictReader(file)]
    assert min(starts) == EPOCH_NS + 1100
    assert max(starts) == EPOCH_NS + 2100 + LATER_NS
    assert json.loads(gzip.decompress((tmp_path / "out" / "lanes.json.gz").read_bytes()))["traceEvents"]


def test_bad_input_ends_with_2_and_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text("{}")
    assert main([str(tmp_path / "x.json"), "--output", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'x.json'}: nothing that can be read as a trace")
    assert not (tmp_path / "out").exists()


def test_a_damaged_file_of_a_folder_is_left_out_and_nothing_half_written_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    write_nsys(folder / "a.sqlite")
    whole = json.dumps(document([kernel("gemm", at, 5) for at in range(40)]))
    (folder / "b.json").write_text(whole[:-300])
    write_nsys(folder / "c.sqlite")
    assert main([str(folder), "--output", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"note: left out: {folder / 'b.json'}: ends in the middle of an event" in said
    assert said.count("left out") == 1
    assert f"{out / 'intervals.csv'}: 16 rows" in said
    assert sorted(path.name for path in out.iterdir()) == ["intervals.csv", "lanes.json.gz"]
    before = (out / "intervals.csv").read_bytes()
    assert before.count(b"start_ns") == 1
    assert main([str(folder / "b.json"), "--output", str(out)]) == 2
    assert (out / "intervals.csv").read_bytes() == before
    for name in ("a.sqlite", "c.sqlite"):
        (folder / name).unlink()
    (folder / "d.json").write_text(whole[:-301])
    assert main([str(folder), "--output", str(out)]) == 2
    assert "none of its 2 trace(s) can be read" in capsys.readouterr().err
    assert sorted(path.name for path in out.iterdir()) == ["intervals.csv", "lanes.json.gz"]
