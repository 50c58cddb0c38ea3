"""rocprofv3's three outputs, of one hand-made process whose answer is known (rocprof_files)."""

from __future__ import annotations

import gzip
import io
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aorta.errors import InputError
from aorta.read.traces.files import find_units, read_unit
from aorta.read.traces.interval_table import NULL, IntervalClass, Trace
from aorta.read.traces.load import load_traces
from aorta.read.traces.reader import SERIALISED
from aorta.read.traces.rocprof import text_files
from aorta.read.traces.rocprof.rocpd import ROCPD
from aorta.read.traces.rocprof.text_files import ROCPROF_CSV, ROCPROF_JSON
from aorta.timeline.classes import KINDS
from tests.read.rocprof_files import BASE, FILL, GEMM, GENERIC, as_csv, as_json, unlinked, write_rocpd
from tests.read.tables import read_with, rows

SOURCES = ("json", "csv-direct", "csv-rocm-6.2", "csv-convert", "csv-quoted", "rocpd")
HEAD = b"Agent_Id,Queue_Id,Kernel_Name,Start_Timestamp,End_Timestamp\n"


def from_json(content: dict[str, Any]) -> Trace:
    (trace,) = read_with(ROCPROF_JSON, {"t.json": json.dumps(content).encode()})
    return trace


def read(source: str, tmp_path: Path) -> Trace:
    if source == "json":
        return from_json(as_json())
    if source == "rocpd":
        (trace,) = read_with(ROCPD, write_rocpd(tmp_path / "4242_results.db"))
    else:
        (trace,) = read_with(ROCPROF_CSV, as_csv(source.removeprefix("csv-")))
    return trace


def in_time(trace: Trace) -> list[list[Any]]:
    """The rows in order of time."""
    return sorted(rows(trace, ("name", "class", "kind", "start", "end", "step"), BASE), key=lambda row: row[3])


@pytest.mark.parametrize("source", SOURCES)
def test_every_output_gives_the_same_rows(source: str, tmp_path: Path) -> None:
    # In rocpd one RCCL kernel has no event, so nothing links it to a call; it stays a row, of unknown kind.
    second = None if source == "rocpd" else "reducescatter"
    trace = read(source, tmp_path)
    assert trace.counters["comm_unlinked"] == (source == "rocpd")
    assert in_time(trace) == [
        [GEMM, "compute", None, 1100, 1500, 10],
        [GENERIC, "comm", "allreduce", 1400, 1800, 10],
        ["MEMORY_COPY_HOST_TO_DEVICE", "copy", None, 1850, 1900, 10],
        [FILL, "copy", None, 1910, 1930, 10],
        [GEMM, "compute", None, 2100, 2300, 11],
        [GENERIC, "comm", second, 2200, 2500, 11],
    ]
    assert (trace.clock, trace.platform, trace.copies_observed) == ("BOOTTIME", "rocm", True)
    assert trace.windows.step.tolist() == [10, 11]  # of the ROCTx markers
    assert (trace.windows.start_ns - BASE).tolist() == [1000, 2000]
    assert (trace.windows.end_ns - BASE).tolist() == [2000, 3000]


@pytest.mark.parametrize(
    ("source", "device", "streams", "size"),
    [
        ("json", 1, [1, 2], 4096),
        ("rocpd", 1, [1, 2], 4096),
        ("csv-direct", 5, [1, 2], NULL),  # CSV has no column of bytes
        ("csv-rocm-6.2", 5, [11, 12], NULL),  # which has no streams: queues take their place
    ],
)
def test_streams_devices_and_bytes_are_those_of_the_source(
    source: str, device: int, streams: list[int], size: int, tmp_path: Path
) -> None:
    trace = read(source, tmp_path)
    table = trace.intervals
    copied = np.array(["COPY" in table.names[code] for code in table.name], bool)
    assert set(table.device[~copied].tolist()) == {device}
    assert sorted(set(table.stream[~copied].tolist())) == streams
    assert table.bytes[copied].tolist() == [size]
    assert set(table.bytes[table.cls == IntervalClass.COMM].tolist()) == {NULL}
    assert any("does not record the size" in note for note in trace.notes)


def without_a_call(content: dict[str, Any]) -> dict[str, Any]:
    unlinked(content)["rocprofiler-sdk-tool"][0]["buffer_records"]["rccl_api"].pop(0)
    return content


def named(content: dict[str, Any]) -> dict[str, Any]:
    """As on an MI300, whose kernels' names tell their kind."""
    process = content["rocprofiler-sdk-tool"][0]
    process["buffer_records"]["rccl_api"] = []
    for symbol in process["kernel_symbols"]:
        symbol["formatted_kernel_name"] = symbol["formatted_kernel_name"].replace("Generic_4", "AllGather_RING_LL")
    return content


@pytest.mark.parametrize(
    ("change", "kinds", "note"),
    [
        (unlinked, {"allreduce", "reducescatter"}, ""),  # by the order of calls
        (without_a_call, set(), "2 RCCL kernels for 1 launching RCCL calls: which is which is ambiguous"),
        (named, {"allgather"}, ""),
    ],
)
def test_kinds_come_from_names_calls_or_their_order_and_are_not_guessed(
    change: Callable[[dict[str, Any]], dict[str, Any]], kinds: set[str], note: str
) -> None:
    trace = from_json(change(as_json()))
    table = trace.intervals
    found = table.kind[table.cls == IntervalClass.COMM].tolist()
    assert {KINDS[kind] for kind in found if kind != NULL} == kinds
    assert trace.counters["comm_unlinked"] == found.count(NULL) == (0 if kinds else 2)
    assert any(note in said for said in trace.notes)


def test_nanoseconds_that_a_float_would_round_are_kept_w14() -> None:
    start = 2**60 + 1  # between 2**60 and 2**61 a float64 holds multiples of 256 only
    content = as_json()
    kernel = content["rocprofiler-sdk-tool"][0]["buffer_records"]["kernel_dispatch"][0]
    kernel |= {"start_timestamp": start, "end_timestamp": start + 1}
    table = from_json(content).intervals
    assert (start, start + 1) in zip(table.start_ns.tolist(), table.end_ns.tolist(), strict=True)
    # In CSV beside empty cells, for which pandas would take floats.
    (trace,) = read_with(ROCPROF_CSV, {"t.csv": HEAD + b"1,2,k,%d,%d\n1,,k,7,9\n" % (2**53 + 1, 2**53 + 4)})
    assert trace.intervals.start_ns.tolist() == [2**53 + 1, 7]
    assert trace.intervals.end_ns.tolist() == [2**53 + 4, 9]
    assert trace.intervals.stream.tolist() == [2, NULL]


def test_a_kernel_without_a_symbol_is_of_unknown_class_and_not_dropped() -> None:
    content = as_json()
    content["rocprofiler-sdk-tool"][0]["buffer_records"]["kernel_dispatch"][1]["dispatch_info"]["kernel_id"] = 999
    trace = from_json(content)
    assert trace.intervals.cls.tolist().count(IntervalClass.UNKNOWN) == 1
    assert len(trace.intervals) == 6


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (b"4,2,gemm,9,5\n", r"t\.csv: no classified kernel with a duration"),
        (
            b"".join(b"%d,2,gemm,%d,%d\n" % (device, device, device + 9000) for device in range(1025)),
            r"t\.csv: names 1025 devices; a trace of one host has at most 1024",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(rows: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(HEAD + rows)
    with pytest.raises(InputError, match=said):
        load_traces(str(tmp_path / "t.csv"))


@pytest.mark.parametrize(
    ("source", "ranks"),
    [
        ("json", [NULL, NULL]),
        ("convert", [NULL, NULL]),
        ("direct", [NULL]),  # CSV without Guid, whose rows nothing tells apart
        ("rocpd", [NULL, 5]),  # the environment of the second one says it
    ],
)
def test_of_several_processes_in_one_file_none_takes_its_rank_from_the_path(
    source: str, ranks: list[int], tmp_path: Path
) -> None:
    if source == "json":
        content = as_json()
        content["rocprofiler-sdk-tool"] += as_json(4243)["rocprofiler-sdk-tool"]
        traces = read_with(ROCPROF_JSON, {"rank3/t.json": json.dumps(content).encode()})
    elif source == "rocpd":
        path = write_rocpd(tmp_path / "rank3.db")
        traces = read_with(ROCPD, write_rocpd(path, {"RANK": "5"}, pid=4243))
    else:
        joined = {}
        for name, data in as_csv(source).items():
            other = data.replace(b"0000ddb5", b"0000ddb6").replace(b",4242,", b",4243,").splitlines(True)[1:]
            joined[f"rank3/{name}"] = data + b"".join(other)
        traces = read_with(ROCPROF_CSV, joined)
    assert [trace.rank for trace in traces] == ranks
    assert len({trace.path for trace in traces}) == len(traces)
    if len(traces) == 2:
        assert in_time(traces[0]) == in_time(traces[1])
    assert "no RANK in its environment, a path that several processes share, no record" in traces[0].notes[0]


@pytest.mark.parametrize("kept", [(".csv", ".csv.gz"), (".csv.gz",)])
def test_rows_are_read_once_where_the_files_stand_beside_their_compressed_copies(
    tmp_path: Path, kept: tuple[str, ...]
) -> None:
    for name, data in as_csv("direct").items():
        for suffix in kept:
            path = tmp_path / f"{name.removesuffix('.csv')}{suffix}"
            path.write_bytes(gzip.compress(data) if suffix.endswith(".gz") else data)
    (unit,), _ = find_units(str(tmp_path))
    (trace,) = read_unit(unit)
    assert in_time(trace) == in_time(read("csv-direct", tmp_path))
    assert len(unit.files) == len(as_csv("direct"))


def test_json_beyond_the_stated_size_is_refused_and_rocpd_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.BytesIO(b" " * (3 << 20))
    monkeypatch.setattr(text_files, "LARGEST_BYTES", 1000)
    with pytest.raises(InputError, match=r"out\.json: more than .* --output-format rocpd"):
        read_with(ROCPROF_JSON, {"out.json": stream})
    assert stream.tell() <= 1 << 20


def test_rocpd_takes_the_rank_from_the_environment_of_its_process(tmp_path: Path) -> None:
    environment = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}
    path = write_rocpd(tmp_path / "out.db", environment)
    before = path.read_bytes()
    (trace,) = read_with(ROCPD, path)
    assert (trace.rank, trace.world_size, trace.host) == (3, 8, "node7")
    # Reading a database leaves nothing beside it.
    assert [(item.name, item.read_bytes()) for item in tmp_path.iterdir()] == [("out.db", before)]


def test_where_counters_were_collected_nothing_is_known_of_overlap_and_their_file_is_no_trace(tmp_path: Path) -> None:
    counters = "4242_counter_collection.csv"
    head = b"Dispatch_Id,Kernel_Name,Counter_Name,Counter_Value,Start_Timestamp,End_Timestamp\n"
    (made,) = read_with(ROCPROF_CSV, as_csv("direct") | {counters: head + b"1,gemm,SQ_WAVES,much,1,2\n"})
    expected = read("csv-direct", tmp_path)
    assert in_time(made) == in_time(expected)
    assert {*made.gaps} - {*expected.gaps} == {*SERIALISED}
    (tmp_path / counters).write_bytes(head)
    with pytest.raises(InputError, match="nothing that can be read as a trace"):
        find_units(str(tmp_path))


@pytest.mark.parametrize(("event", "counted"), [(2, True), (77, False)])
def test_in_rocpd_counters_are_those_of_dispatches(event: int, counted: bool, tmp_path: Path) -> None:
    """Others are samples, as rocprof-sys takes them."""
    path = write_rocpd(tmp_path / "out.db")
    table = "rocpd_pmc_event_00004242_8903_7903_b269_cd8d3745bb8a"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(
            f'CREATE TABLE "{table}" (id INTEGER PRIMARY KEY, event_id INTEGER, pmc_id INTEGER, value REAL)'
        )
        database.execute(f'INSERT INTO "{table}" VALUES (1, {event}, 1, 64.0)')
    (trace,) = read_with(ROCPD, path)
    assert ({*SERIALISED} <= {*trace.gaps}) is counted
