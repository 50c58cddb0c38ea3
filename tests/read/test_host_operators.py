"""What counts as computation in the trace of a CPU: the self time of operators, without waiting for collectives."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aorta.timeline.arrays import IntervalArray, self_times

times = st.integers(0, 30)
flat = st.lists(st.tuples(times, times, st.integers(1, 2)).map(lambda row: (*sorted(row[:2]), row[2])), max_size=9)


@st.composite
def nested_rows(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Rows of two threads that nest, as brackets do."""
    rows: list[tuple[int, int, int]] = []
    for thread in (1, 2):
        begun: list[int] = []
        for place, begins in enumerate(draw(st.lists(st.booleans(), max_size=24))):
            if begins:
                begun.append(place // 3)
            elif begun:
                rows.append((begun.pop(), place // 3, thread))
    return rows


def by_moment(rows: list[tuple[int, int, int]]) -> dict[tuple[int, int], list[int]]:
    """For each thread and moment the rows that run then, the innermost last."""
    order = sorted(range(len(rows)), key=lambda at: (rows[at][0], -rows[at][1], at))
    found: dict[tuple[int, int], list[int]] = {}
    for at in order:
        for moment in range(rows[at][0], rows[at][1]):
            found.setdefault((rows[at][2], moment), []).append(at)
    return found


def owners(rows: list[tuple[int, int, int]]) -> dict[tuple[int, int], int]:
    start, end, thread = (np.array([row[place] for row in rows], np.int64) for place in range(3))
    owner, pieces = self_times(IntervalArray(start, end), thread)
    found: dict[tuple[int, int], int] = {}
    for row, low, high in zip(owner.tolist(), pieces.start.tolist(), pieces.end.tolist(), strict=True):
        assert low < high
        for moment in range(low, high):
            assert found.setdefault((rows[row][2], moment), row) == row
    return found


@given(nested_rows())
def test_each_moment_of_a_thread_belongs_to_the_innermost_row(rows: list[tuple[int, int, int]]) -> None:
    assert owners(rows) == {place: running[-1] for place, running in by_moment(rows).items()}


@given(flat)
def test_rows_that_overlap_without_nesting_lose_no_time(rows: list[tuple[int, int, int]]) -> None:
    assert owners(rows).keys() == by_moment(rows).keys()
