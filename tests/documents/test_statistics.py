"""The numbers of many values that arrive in parts."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aorta.documents import statistics as stats
from aorta.documents.statistics import describe


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


def test_ranks_may_come_in_any_order() -> None:
    found = describe([1.0, 10.0, 3.0, 30.0, np.nan], [0, 1, 0, 1, 2])
    assert found.per_rank_median == {"0": 2.0, "1": 20.0, "2": None}
    assert found.rank_spread == 18.0
    assert (found.count, found.nulls) == (4, 1)


def test_without_a_value_the_commonest_reason_stands_for_all() -> None:
    assert describe([np.nan] * 4, None, {"rare": 1, "common": 3}).reason == "common"
