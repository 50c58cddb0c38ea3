"""nsys exports of two hand-made ranks (nsys_files), whole and with what older versions leave out."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from aorta.read.traces.interval_table import NULL, IntervalClass, Trace
from aorta.read.traces.load import load_traces
from aorta.read.traces.nsys import NSYS
from aorta.read.traces.tables import by_launch
from aorta.records.schema import Header
from tests.analysis import builders
from tests.read.nsys_files import EPOCH_NS, GEMM, LATER_NS, NCCL, PIDS, global_pid, write_nsys
from tests.read.tables import read_with, rows


def header(rank: int, pid: int, host: str = "dgx1", local_rank: int = 0) -> Header:
    return builders.header(rank, 16, pid=pid, host=host, local_rank=local_rank)


def read(folder: Path, *changes: str, **left_out: tuple[str, ...]) -> list[Trace]:
    """What is read of an export that lacks some, changed by statements of SQL."""
    folder.mkdir(exist_ok=True)
    path = write_nsys(folder / "node.sqlite", **left_out)
    with closing(sqlite3.connect(path)) as database:
        database.executescript(";\n".join(changes))
    return read_with(NSYS, path)


def test_ranks_of_one_file_stay_apart_with_their_rows_and_the_realtime_of_the_session(tmp_path: Path) -> None:
    first, second = read(tmp_path)
    names = [f"node.sqlite (process {pid})" for pid in PIDS]
    assert [Path(trace.path).name for trace in (first, second)] == names
    assert (second.intervals.start_ns - first.intervals.start_ns).tolist() == [LATER_NS] * 4
    assert (set(first.intervals.device.tolist()), set(second.intervals.device.tolist())) == ({0}, {1})
    assert (first.clock, first.host, first.platform) == ("REALTIME", "dgx1", "cuda")
    assert rows(first, ("name", "class", "kind", "start", "end", "stream", "bytes", "step"), EPOCH_NS) == [
        [GEMM, "compute", None, 1100, 1500, 7, None, 3],
        [NCCL, "comm", "allreduce", 1400, 1800, 20, None, 3],
        [GEMM, "compute", None, 2100, 2300, 7, None, 4],
        ["Host-to-Device", "copy", None, 1850, 1900, 7, 4096, 3],
    ]
    # Steps are NVTX ranges, by their text or its id; the mark step=99 and step=5, still open at the end, are none.
    assert first.windows.step.tolist() == [3, 4]
    assert (first.windows.start_ns - EPOCH_NS).tolist() == [1000, 2000]
    assert any("1 of 3 kernels ran outside of the step that launched them" in note for note in by_launch(first).notes)
    for trace in (first, second):  # no record tells the ranks, which are not guessed from the order of processes
        assert trace.rank == NULL
        assert any("rank not known" in note for note in trace.notes)


def test_a_kernel_without_a_launch_is_counted(tmp_path: Path) -> None:
    traces = read(tmp_path, "DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME WHERE correlationId = 12")
    assert [trace.counters["kernels_unlinked"] for trace in traces] == [1, 1]


def test_ranks_come_from_the_records_by_process_id_and_host(tmp_path: Path) -> None:
    path = write_nsys(tmp_path / "node.sqlite")
    headers = (header(9, 5001), header(8, 5002), header(1, 5001, host="dgx0"))
    traces = read_with(NSYS, path, headers)
    assert [trace.rank for trace in traces] == [9, 8]
    assert {trace.world_size for trace in traces} == {16}


def test_one_process_takes_its_rank_from_the_path(tmp_path: Path) -> None:
    (tmp_path / "rank3").mkdir()
    path = write_nsys(tmp_path / "rank3" / "out.sqlite", pids=(5001,))
    (trace,) = read_with(NSYS, path)
    assert trace.rank == 3
    # Two processes cannot both be the rank in the path.
    path.unlink()
    write_nsys(path)
    assert [each.rank for each in read_with(NSYS, path)] == [NULL, NULL]


@pytest.mark.parametrize(
    "table",
    [
        *("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"),
        *("TARGET_INFO_SESSION_START_TIME", "TARGET_INFO_SYSTEM_ENV", "ENUM_CUDA_MEMCPY_OPER"),
    ],
)
def test_tables_that_were_never_created_only_take_their_own_facts_away(tmp_path: Path, table: str) -> None:
    whole, _ = read(tmp_path / "whole")
    less, _ = read(tmp_path / "less", without=(table,))
    assert whole.copies_observed
    kernels = slice(0, 3)
    base = EPOCH_NS if less.clock == "unknown" else 0
    assert (less.intervals.start_ns[kernels] + base).tolist() == whole.intervals.start_ns[kernels].tolist()
    assert less.copies_observed == (table != "CUPTI_ACTIVITY_KIND_MEMCPY")
    assert less.clock == ("unknown" if table == "TARGET_INFO_SESSION_START_TIME" else "REALTIME")
    assert len(less.windows) == (0 if table == "NVTX_EVENTS" else 2)
    if table == "CUPTI_ACTIVITY_KIND_RUNTIME":
        assert any("which kernels lack a launch is not known" in note for note in less.notes)


@pytest.mark.parametrize("column", ["demangledName", "mangledName", "correlationId", "textId", "text"])
def test_columns_that_a_version_lacks_only_take_their_own_facts_away(tmp_path: Path, column: str) -> None:
    trace, _ = read(tmp_path, columns_without=(column,))
    table = trace.intervals
    assert table.cls.tolist() == [IntervalClass.COMPUTE, IntervalClass.COMM, IntervalClass.COMPUTE, IntervalClass.COPY]
    assert len(trace.windows) == (1 if column in ("text", "textId") else 2)


def test_an_export_without_process_ids_is_one_trace(tmp_path: Path) -> None:
    (trace,) = read(tmp_path, columns_without=("globalPid",))
    assert sorted(set(trace.intervals.device.tolist())) == [0, 1]


def test_copies_of_no_process_with_kernels_are_said_and_not_silently_dropped(tmp_path: Path) -> None:
    first, second = read(tmp_path, "UPDATE CUPTI_ACTIVITY_KIND_MEMCPY SET globalPid = NULL WHERE deviceId = 1")
    assert [len(trace.intervals) for trace in (first, second)] == [4, 3]
    assert any("1 row(s) of CUPTI_ACTIVITY_KIND_MEMCPY belong to no process" in note for note in first.notes)


def test_cuda_graphs_traced_as_a_whole_leave_null_what_rests_on_their_kernels(tmp_path: Path) -> None:
    process = global_pid(PIDS[0])
    read(
        tmp_path,
        "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INT, end INT, deviceId INT, globalPid INT)",
        f"INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (1200, 1300, 0, {process}), (2200, 2300, 0, {process})",
    )
    run = load_traces(str(tmp_path / "node.sqlite"))
    assert any("2 CUDA graph launches" in note and "--cuda-graph-trace=node" in note for note in run.health.notes)
    first, second = (run.traces.whole[number] for number in ("-1", "-2"))
    assert (first["metrics"]["compute_ms"], first["metrics"]["overlap_ratio"]) == (None, None)
    assert "2 CUDA graph launches" in first["null_reasons"]["compute_ms"]
    # gemm [1100, 1500) and [2100, 2300) ns on the other process, which launched none
    assert second["metrics"]["compute_ms"] == pytest.approx(600e-6)
