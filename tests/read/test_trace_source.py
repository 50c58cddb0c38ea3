"""Which rank a process was, which ranges of its code are steps, and what a kernel is by its name alone (W12)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from aorta.read.traces.interval_table import KIND_CODE, NULL, IntervalClass, NameClassifier, kind_of
from aorta.read.traces.reader import (
    Process,
    headers_in,
    headers_near,
    kernels,
    place,
    ranks_in_path,
    step_windows,
)
from aorta.records.schema import Header
from tests.analysis.builders import line_of
from tests.read.kineto_files import ALLREDUCE, GEMM, event
from tests.read.test_nsys import header


@pytest.mark.parametrize(
    ("process", "headers", "placed", "note"),
    [
        (
            Process("run/rank2/1_results.db", environment_rank=3, environment_world=8),
            [],
            (3, 8),
            "run/rank2/1_results.db: taken as rank 3 (its environment says RANK 3), although its path says rank 2",
        ),
        (
            Process("run/rank2/7_results.json", pid=7),
            [header(5, 7)],
            (2, 16),
            "run/rank2/7_results.json: taken as rank 2 (its path says rank 2), although the record with process id 7 "
            "says rank 5",
        ),
        (
            Process("x.json", pid=7, host="a"),
            [header(5, 7, host="b.cluster"), header(6, 7, host="a.cluster")],
            (6, 16),
            None,
        ),
        (
            Process("x.json", pid=7),
            [header(5, 7, host="b"), header(6, 7, host="a")],
            (NULL, 16),
            "x.json: rank not known: the record with process id 7 says rank 5, 6: ambiguous",
        ),
        (
            Process("x.json", host="n", gpus=(0, 1), all_gpus_visible=True),
            [header(4, 70, host="n", local_rank=1)],
            (NULL, None),
            "x.json: rank not known (no process id, GPU 0, 1): no RANK in its environment, no rank<k> in its path, no "
            "record with its process id. Give the folder of the records, or put rank<k> into the path",
        ),
    ],
)
def test_the_best_evidence_gives_the_rank_and_what_contradicts_it_is_said(
    process: Process, headers: list[Header], placed: tuple[int, int | None], note: str | None
) -> None:
    assert place(process, headers) == (*placed, () if note is None else (note,))


@pytest.mark.parametrize(("visible", "rank"), [(True, 4), (False, NULL), (None, NULL)])
def test_the_gpu_used_tells_the_rank_only_where_nothing_renumbered_gpus(visible: bool | None, rank: int) -> None:
    headers = [header(4, 70, host="n", local_rank=1), header(3, 71, host="n", local_rank=0)]
    process = Process("x.json", pid=99, host="n", gpus=(1,), all_gpus_visible=visible)
    assert place(process, headers)[0] == rank


@pytest.mark.parametrize(
    ("path", "ranks"),
    [
        ("run/rank3/5_results.json", {3}),
        ("run/rank_03/5.json", {3}),
        ("run/rank-3.sqlite", {3}),
        ("run/rank1/rank2.json", {2}),
        ("run/rank1_rank2.json", {1, 2}),
        ("run/frank3/x.json", set()),
        ("run/ranking/x.json", set()),
        ("run/rank99999999999/x.json", set()),
    ],
)
def test_ranks_stated_by_a_path(path: str, ranks: set[int]) -> None:
    assert ranks_in_path(path) == ranks


def test_headers_are_read_and_broken_records_are_no_evidence(tmp_path: Path) -> None:
    (tmp_path / "rank_0_metrics.jsonl").write_text(line_of(header(0, 7)))
    (tmp_path / "rank_1_metrics.jsonl").write_bytes(b"\xff\xfe broken")
    (tmp_path / "rank_2_metrics.jsonl").write_text("")
    assert [found.pid for found in headers_in([tmp_path, tmp_path / "nowhere"])] == [7]


def test_records_are_looked_for_beside_a_trace_and_two_folders_above(tmp_path: Path) -> None:
    trace = tmp_path / "run" / "traces" / "rank" / "7_results.json"
    trace.parent.mkdir(parents=True)
    trace.touch()
    (tmp_path / "run" / "rank_4_metrics.jsonl").write_text(line_of(header(4, 7)))
    (tmp_path / "rank_5_metrics.jsonl").write_text(line_of(header(5, 8)))
    assert [found.rank for found in headers_near(str(trace))] == [4]
    assert headers_near("s3://bucket/run") == headers_near(str(tmp_path / "nowhere")) == ()


def windows_of(*ranges: tuple[str, int, int]) -> tuple[list[tuple[int, int, int]], tuple[str, ...]]:
    """(step, start, end) of each window, and the notes."""
    texts, start, end = zip(*ranges, strict=True)
    found, notes, _ = step_windows(texts, np.array(start, np.int64), np.array(end, np.int64))
    return list(zip(found.step.tolist(), found.start_ns.tolist(), found.end_ns.tolist(), strict=True)), notes


def test_late_and_early_markers_of_one_step_give_the_earliest_in_whatever_order_they_stand() -> None:
    late, early, other = ("ProfilerStep#4", 90, 99), ("ProfilerStep#4", 10, 20), ("ProfilerStep#5", 20, 30)
    for ranges in ((late, early, other), (early, other, late)):
        found, notes = windows_of(*ranges)
        assert found == [(4, 10, 20), (5, 20, 30)]
        assert notes == ("1 marker(s) ProfilerStep#N repeat a step; the first of each is used",)


def test_a_marker_of_no_length_is_no_window() -> None:
    assert windows_of(("step 1", 5, 5), ("step 1", 7, 9), ("step 2", 9, 9))[0] == [(1, 7, 9)]
    assert windows_of(("step 1", 5, 5)) == ([], ("no step markers: one window from the first to the last record",))


@pytest.mark.parametrize(
    ("texts", "steps"),
    [
        (("step 7", "ProfilerStep#1", "iteration#2", "aorta.step=3"), [3]),
        (("step 7", "ProfilerStep#1", "iteration#2"), [2]),
        (("step 7", "ProfilerStep#1"), [1]),
        (("step 7", "Train step: 8", "iter_9"), [7, 8, 9]),
        (("my ProfilerStep#1", "ProfilerStep#1a", "ProfilerStep#", "stepping 3"), []),
    ],
)
def test_one_family_of_markers_counts_and_only_whole_texts(texts: Sequence[str], steps: list[int]) -> None:
    found, _ = windows_of(*((text, 10 * place, 10 * place + 5) for place, text in enumerate(texts)))
    assert [step for step, _, _ in found] == steps


def mark(name: str, start: float, length: float) -> dict[str, object]:
    return event("user_annotation", name, start, length, 4242, 4242)


COMPUTE, COMM, COPY, UNKNOWN = (
    IntervalClass.COMPUTE,
    IntervalClass.COMM,
    IntervalClass.COPY,
    IntervalClass.UNKNOWN,
)


@pytest.mark.parametrize(
    ("name", "cls", "kind"),
    [
        (ALLREDUCE, COMM, "allreduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", COMM, "reducescatter"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", COMM, "allgather"),
        ("ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_f32", COMM, "allreduce"),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", COMM, None),
        ("void vllm::cross_device_reduce_2stage<half, 8>(RankData*)", COMM, "allreduce"),
        ("one_shot_all_reduce_kernel", COMM, "allreduce"),
        ("multimem_all_gather_kernel", COMM, "allgather"),
        ("void quickreduce::twoshot", COMM, "allreduce"),
        ("__amd_rocclr_copyBuffer.kd", COPY, None),
        ("__amd_rocclr_fillBufferAligned.kd", COPY, None),
        ("[CUDA memcpy Device-to-Host]", COPY, None),
        ("Memset (Device)", COPY, None),
        (GEMM, COMPUTE, None),
        ("memcpy_like_gemm", COMPUTE, None),
        ("Memcpyish", COMPUTE, None),
        ("", UNKNOWN, None),
        ("   ", UNKNOWN, None),
    ],
)
def test_the_class_and_kind_of_a_kernel_w12(name: str, cls: IntervalClass, kind: str | None) -> None:
    rows = kernels("made by hand", NameClassifier(), [name], start_ns=np.array([0]), end_ns=np.array([1]))
    assert rows.cls.tolist() == [cls]
    assert rows.kind.tolist() == [KIND_CODE[kind] if kind else NULL]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("c10d::_reduce_scatter_base_", "reducescatter"),
        ("c10d::scatter_", "scatter"),
        ("c10d::_allgather_base_", "allgather"),
        ("c10d::gather_", "gather"),
        ("c10d::reduce_", "reduce"),
        ("c10d::alltoall_base_", "alltoall"),
        ("all_to_allv", "alltoall"),
        ("ncclBcast", "broadcast"),
        ("ncclSend", "send"),
        ("gloo:irecv", "recv"),
        ("ncclDevKernel_SendRecv", None),
    ],
)
def test_the_kind_that_a_name_tells(name: str, kind: str | None) -> None:
    assert kind_of(name) == (KIND_CODE[kind] if kind else NULL)
