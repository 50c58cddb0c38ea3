"""The table of `workload=streams`, from results made by hand."""

from __future__ import annotations

from aorta.records.streams_file import StreamsPattern, StreamsPoint, StreamsRank
from aorta.streams.streams_run import table
from aorta.terminal_style import Style

POINT = StreamsPoint(
    streams=1,
    kernels=8,
    concurrency=1.0,
    most_at_once=1,
    serial_ns=800,
    elapsed_ns=800,
    gain=1.0,
    issued_in_time=True,
    shared_queues=[],
)
TWO = StreamsPoint(2, 16, 1.9, 2, 1600, 842, 1.9, True, [])
LATE = StreamsPoint(4, 32, 2.0, 2, 3200, 1600, 2.0, False, [[0, 2], [1, 3]])


def lines(*patterns: StreamsPattern, queues: list[list[int]]) -> list[str]:
    """Rank 1 on a device with GPU_MAX_HW_QUEUES=2."""
    rank = StreamsRank(1, "some device", {"GPU_MAX_HW_QUEUES": "2"}, queues, list(patterns))
    return table(rank, 0.05, Style()).splitlines()


def test_the_knees_row_has_a_star_there_and_what_ran_at_once_there() -> None:
    said = lines(StreamsPattern("independent", "", [POINT, TWO], knee_streams=2), queues=[[0], [1]])
    assert said[0] == "rank 1, some device; GPU_MAX_HW_QUEUES 2, CUDA_DEVICE_MAX_CONNECTIONS not set"
    assert said[3].split() == ["independent", "1.00", "1.90*", "2", "1.90", "2"]
    assert said[4:] == ["* the knee: more streams gain at most 5%", "hardware queues: none of 2 streams shared one"]


def test_a_point_that_was_issued_too_late_is_marked_and_explained() -> None:
    said = lines(StreamsPattern("independent", "", [POINT, TWO, LATE], knee_streams=2), queues=[[0, 2], [1, 3]])
    assert said[3].split() == ["independent", "1.00", "1.90*", "2.00!", "2", "1.90", "2"]
    assert "! the host issued too late, the device can do more" in said
    assert said[-3:] == ["hardware queues: 2 for 4 streams; these streams share one:", "  0, 2", "  1, 3"]


def test_a_pattern_that_was_left_out_says_why() -> None:
    said = lines(StreamsPattern("allreduce_beside_gemm", "", [], skipped="needs 2 ranks"), queues=[[0]])
    assert said[3] == "allreduce_beside_gemm skipped: needs 2 ranks"
