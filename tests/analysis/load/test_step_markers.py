"""Which ranges of a trace are steps, and which of several that claim the same one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from aorta.analysis.load.trace_source import step_windows
from tests.analysis.load.kineto_files import BASE_NS, GEMM, event, kernel, read


def windows_of(*ranges: tuple[str, int, int]) -> tuple[list[tuple[int, int, int]], tuple[str, ...]]:
    """(step, start, end) of each window, and the notes."""
    texts, start, end = zip(*ranges, strict=True)
    found, notes = step_windows(texts, np.array(start, np.int64), np.array(end, np.int64))
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


def test_in_a_trace_of_the_profiler_too_the_earliest_mark_of_a_step_and_the_best_kind_count() -> None:
    trace = read(
        [
            kernel(GEMM, 0, 100),
            mark("ProfilerStep#9", 0, 90),
            mark("iteration#4", 50, 10),
            mark("iteration#4", 10, 20),
            mark("iteration#3", 0, 5),
        ]
    )
    assert trace.windows.step.tolist() == [3, 4]
    assert ((trace.windows.start_ns - BASE_NS) // 1000).tolist() == [0, 10]
    assert "1 marker(s) iteration#N repeat a step; the first of each is used" in trace.notes
