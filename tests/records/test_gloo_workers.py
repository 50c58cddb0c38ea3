"""When a collective that gloo had queued began, against a pool of threads that is simulated here."""

from __future__ import annotations

import heapq

from hypothesis import given
from hypothesis import strategies as st

from aorta.records.step_line import GlooWorkers


def simulate(count: int, jobs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """First in, first out on `count` threads: (issue, duration) -> (start, end)."""
    free = [0] * count
    heapq.heapify(free)
    spans = []
    for issue, duration in jobs:
        start = max(issue, heapq.heappop(free))
        heapq.heappush(free, start + duration)
        spans.append((start, start + duration))
    return spans


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 50)), max_size=30),
)
def test_starts_are_those_of_a_thread_pool(count: int, jobs: list[tuple[int, int]]) -> None:
    issue, ordered = 0, []
    for gap, duration in jobs:
        issue += gap
        ordered.append((issue, duration))
    lanes = GlooWorkers(count)
    expected = simulate(count, ordered)
    assert [lanes.start_ns(i, end) for (i, _), (_, end) in zip(ordered, expected, strict=True)] == [
        start for start, _ in expected
    ]


def test_an_end_before_its_issue_is_not_turned_round() -> None:
    assert GlooWorkers(2).start_ns(10, 8) == 8
