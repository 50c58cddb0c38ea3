"""Numbers from the times of kernels, and the table of a run of streams."""

from __future__ import annotations

import pytest

from aorta.records.run_files import StreamsPattern, StreamsPoint, StreamsRank
from aorta.streams.patterns import concurrency, elapsed_ns, knee, most_at_once, ran_together
from aorta.streams.streams_run import report_text
from aorta.terminal_style import Style

US = 1_000


def test_concurrency_is_the_area_over_the_union_and_idle_time_does_not_count() -> None:
    kernels = [(0, 10 * US), (0, 10 * US), (30 * US, 40 * US)]
    assert concurrency(kernels) == pytest.approx(1.5)
    assert most_at_once(kernels) == 2
    assert elapsed_ns(kernels) == 40 * US


@pytest.mark.parametrize(("end_ns", "at_once"), [(10 * US + 8, 1), (13 * US, 2)])
def test_kernels_that_abut_within_the_events_resolution_did_not_run_at_once(end_ns: int, at_once: int) -> None:
    kernels = (0, end_ns), (10 * US, 20 * US)
    assert most_at_once(kernels) == at_once
    assert ran_together(*kernels) == (at_once > 1)


@pytest.mark.parametrize(
    ("gains", "found"),
    [
        ({1: 1.0, 2: 2.0, 4: 4.0, 8: 4.1}, 4),  # 2.5 % more is noise
        ({1: 1.0, 4: 4.0, 5: 2.5, 6: 3.0, 8: 4.0}, 4),  # a dip between multiples of four queues
        ({1: 1.0, 2: 1.9, 3: 1.5, 4: 3.0}, 4),  # a dip is no knee where more streams gain later
        ({1: 1.0, 2: 0.9}, 1),
        ({1: 1.0}, 1),
    ],
)
def test_the_knee_is_the_smallest_number_that_no_larger_one_beats(gains: dict[int, float], found: int) -> None:
    assert knee(gains, 0.05) == found


POINT = StreamsPoint(1, 8, 1.0, 1, 800, 800, 1.0, True, [])
TWO = StreamsPoint(2, 16, 1.9, 2, 1600, 842, 1.9, True, [])
LATE = StreamsPoint(4, 32, 2.0, 2, 3200, 1600, 2.0, False, [[0, 2], [1, 3]])


def lines(*patterns: StreamsPattern, queues: list[list[int]]) -> list[str]:
    """Rank 1 on a device with GPU_MAX_HW_QUEUES=2."""
    rank = StreamsRank(1, "some device", {"GPU_MAX_HW_QUEUES": "2"}, queues, list(patterns))
    return report_text(rank, 0.05, Style()).splitlines()


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
