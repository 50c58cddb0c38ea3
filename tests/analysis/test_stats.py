"""Percentiles of values that are never in memory together, against numpy's of all of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aorta.analysis import pools, stats
from aorta.analysis.pools import Pools
from aorta.analysis.readers.store import Store

values = st.one_of(
    st.lists(st.floats(-1e15, 1e15), min_size=1, max_size=60),
    st.lists(st.sampled_from([0.0, 0.0, 0.0, 1e-6, 3.25, 7e9]), min_size=1, max_size=60),
    st.lists(st.floats(1.0, 1.0 + 1e-12), min_size=1, max_size=60),
)


@settings(max_examples=300, deadline=None)
@given(values, st.integers(1, 7))
@example([0.0, 5e-324], 1)
def test_exact_percentiles_from_blocks(numbers: list[float], length: int) -> None:
    everything = np.array(numbers)
    blocks = [everything[start : start + length] for start in range(0, len(everything), length)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats, "_GATHER", 2)  # so that it has to look closer, again and again
        patch.setattr(stats, "_BINS", 4)
        count, found = stats.numbers_of(lambda: blocks)
    p5, median, p95 = np.percentile(everything, (5, 50, 95), method="linear")
    assert found is not None
    assert count == len(everything)
    assert found[[0, 1, 2, 4, 5]].tolist() == [median, p5, p95, everything.min(), everything.max()]
    assert found[3] == pytest.approx(everything.mean(), rel=1e-9, abs=1e-3)


def test_nothing_is_no_number() -> None:
    assert stats.numbers_of(lambda: [np.empty(0)]) == (0, None)


def test_pools_that_do_not_fit_into_memory_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "BUFFER", 10)
    monkeypatch.setattr(pools, "_BLOCK", 3)
    store = Store()
    kept = Pools(store)
    expected: dict[int, list[float]] = {0: [], 1: [], 2: []}
    generator = np.random.default_rng(0)
    for number in range(50):
        part = generator.random(number % 7)
        part[part < 0.2] = np.nan
        kept.add(number % 3, part)
        expected[number % 3] += part[~np.isnan(part)].tolist()
    for key, known in expected.items():
        count, found = kept.numbers(key)
        assert found is not None
        assert count == len(known)
        assert found[0] == np.median(known)
    assert store.size >= 8 * 40  # most of it went to the disk
    assert kept.numbers("never seen") == (0, None)
