"""The numbers of many values that arrive in parts."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aorta.analysis import stats


@given(st.lists(st.lists(st.floats(-1e15, 1e15), max_size=7), min_size=1, max_size=9).filter(any))
def test_the_numbers_of_parts_are_those_of_all_values_together(parts: list[list[float]]) -> None:
    count, found = stats.numbers_of([np.array(part) for part in parts])
    everything = np.concatenate([np.array(part) for part in parts])
    p5, median, p95 = np.percentile(everything, (5, 50, 95), method="linear")
    assert found is not None
    assert count == len(everything)
    assert found.tolist() == [median, p5, p95, everything.mean(), everything.min(), everything.max()]


def test_nothing_is_no_number() -> None:
    assert stats.numbers_of([np.empty(0)]) == (0, None)
    assert stats.numbers_of([]) == (0, None)
