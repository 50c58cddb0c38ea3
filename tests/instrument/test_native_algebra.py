"""The compiled operations on intervals give what those in Python give, which are held to brute force (K6)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.errors import IntervalError
from aorta.instrument.native.native_interceptor import compiled_algebra
from aorta.timeline.overlap import PAIRS, Algebra, measure_lanes
from tests.instrument.taps import compiled_part
from tests.strategies import bases, collectives, interval_lists
from tests.strategies import intervals as windows

WIDE = (-(2**60), 2**62)


@pytest.fixture(scope="module")
def compiled() -> Algebra[Any, Any]:
    return compiled_algebra(compiled_part())


def shifted(found: list[tuple[int, int]], base: int) -> list[tuple[int, int]]:
    return [(start + base, end + base) for start, end in found]


@given(windows, interval_lists, interval_lists, bases)
def test_every_operation_is_that_of_lists(
    compiled: Algebra[Any, Any],
    window: tuple[int, int],
    left: list[tuple[int, int]],
    right: list[tuple[int, int]],
    base: int,
) -> None:
    left, right, (window,) = shifted(left, base), shifted(right, base), shifted([window], base)
    one, two = PAIRS.lane(left, window), PAIRS.lane(right, window)
    mine, other = compiled.lane(left, window), compiled.lane(iter(right), window)
    assert compiled.pairs(mine) == one
    assert compiled.pairs(compiled.lane(mine, window)) == one  # merged ones are as good as raw ones
    assert compiled.pairs(compiled.lane(compiled.lane(left, WIDE), window)) == one
    assert compiled.pairs(compiled.union([mine, other])) == PAIRS.union([one, two])
    assert compiled.pairs(compiled.union([])) == []
    assert compiled.pairs(compiled.intersect(mine, other)) == PAIRS.intersect(one, two)
    assert compiled.pairs(compiled.subtract(mine, other)) == PAIRS.subtract(one, two)
    assert compiled.measure(mine) == PAIRS.measure(one)
    assert compiled.tile(window, {0: mine, 12: other}) == PAIRS.tile(window, {0: one, 12: two})


@given(windows, interval_lists, collectives, interval_lists, interval_lists, bases)
def test_a_window_is_that_of_lists(
    compiled: Algebra[Any, Any],
    window: tuple[int, int],
    compute: list[tuple[int, int]],
    comm: dict[str, list[tuple[int, int]]],
    stalls: list[tuple[int, int]],
    aux: list[tuple[int, int]],
    base: int,
) -> None:
    (window,) = shifted([window], base)
    lanes = {"compute": shifted(compute, base), "stalls": shifted(stalls, base), "aux": shifted(aux, base)}
    kinds = {kind: shifted(found, base) for kind, found in comm.items()}
    expected, _ = measure_lanes(PAIRS, window, comm=kinds, tiled=True, **lanes)
    measured, _ = measure_lanes(compiled, window, comm=kinds, tiled=True, **lanes)
    assert measured == expected
    assert measured.concurrency() == expected.concurrency()


@given(interval_lists, st.integers(-3, 40), st.integers(1, 9))
def test_an_interval_that_ends_before_it_starts_is_refused(
    compiled: Algebra[Any, Any], found: list[tuple[int, int]], start: int, by: int
) -> None:
    with pytest.raises(IntervalError, match=rf"interval \[{start}, {start - by}\) ends before it starts"):
        compiled.lane([*found, (start, start - by)], (-100, 100))


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ([(0, 1, 2)], TypeError),
        ([[0, 1]], TypeError),
        ([(0, 1.5)], TypeError),
        ([(0, 2**63)], OverflowError),
        (7, TypeError),
    ],
)
def test_what_is_no_interval_of_nanoseconds_is_refused(
    compiled: Algebra[Any, Any], raw: Any, problem: type[Exception]
) -> None:
    with pytest.raises(problem):
        compiled.lane(raw, (0, 10))
