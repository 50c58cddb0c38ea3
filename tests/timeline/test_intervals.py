"""The interval algebra against a brute-force reference: sets of single nanoseconds (docs/dev/measuring.md, K6)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.errors import InputError, IntervalError
from aorta.timeline.intervals import Interval, clip, intersect, measure, merge, offset, subtract
from tests.strategies import bases, interval_lists, intervals, shifted


def instants(spans: list[Interval]) -> set[int]:
    """The reference: each nanosecond that lies in at least one interval."""
    return {instant for start, end in spans for instant in range(start, end)}


def is_merged(spans: list[Interval]) -> bool:
    return all(start < end for start, end in spans) and all(
        before[1] < after[0] for before, after in itertools.pairwise(spans)
    )


@given(interval_lists, bases)
def test_merge_is_the_union_sorted_disjoint_and_never_abutting(spans, base):
    spans = shifted(spans, base)
    merged = merge(spans)
    assert instants(merged) == instants(spans)
    assert is_merged(merged)
    assert merge(merged) == merged
    assert merge(reversed(spans)) == merged


@given(interval_lists, interval_lists, bases)
def test_intersect_and_subtract_are_those_of_sets(left, right, base):
    left, right = shifted(left, base), shifted(right, base)
    both, rest = intersect(merge(left), merge(right)), subtract(merge(left), merge(right))
    assert instants(both) == instants(left) & instants(right)
    assert instants(rest) == instants(left) - instants(right)
    assert is_merged(both)
    assert is_merged(rest)
    assert both == intersect(merge(right), merge(left))
    assert merge([*both, *rest]) == merge(left)


@given(interval_lists, bases)
def test_measure_counts_the_nanoseconds_of_a_merged_list(spans, base):
    assert measure(merge(shifted(spans, base))) == len(instants(spans))


@given(interval_lists, intervals, bases)
def test_clip_keeps_what_lies_inside_the_window_in_the_order_given(spans, window, base):
    (window,) = shifted([window], base)
    spans = shifted(spans, base)
    clipped = clip(spans, window)
    assert clipped == [part for span in spans for part in clip([span], window)]
    assert instants(clipped) == instants(spans) & instants([window])
    assert all(window[0] <= start < end <= window[1] for start, end in clipped)


@given(interval_lists, st.integers(-3, 40), st.integers(1, 9))
def test_an_interval_that_ends_before_it_starts_is_refused(spans, start, by):
    inverted = [*spans, (start, start - by)]
    for operation in (merge, lambda found: clip(found, (-100, 100))):
        with pytest.raises(IntervalError, match=rf"interval \[{start}, {start - by}\) ends before it starts"):
            operation(inverted)


def test_a_broken_interval_is_bad_input_and_a_value_error():
    assert issubclass(IntervalError, InputError)
    assert issubclass(IntervalError, ValueError)
    assert IntervalError.exit_code == 2


def test_the_offset_of_two_clocks_is_what_puts_one_inside_the_other():
    outer = [(0, 1_000), (1_100, 1_110), (2_000, 2_900)]
    assert offset(outer, outer) == 0
    assert offset([(start + 90, end + 90) for start, end in outer], outer) == 90
    assert offset([(start - 90, end - 90) for start, end in outer], outer) == -90
    # Where marks surround what they mark by any amount, nothing is known but that it is inside.
    inner = [(start + 9, end - 300) for start, end in outer if end - start > 300]
    assert offset(inner, outer) == 0
    assert offset([(start - 90, end - 90) for start, end in inner], outer) == -81
    assert offset([(start - 90, end - 90) for start, end in inner], outer, slack=5) == -76
    assert offset([(start + 400, end + 400) for start, end in inner], outer) == 100
    assert offset([(5_000, 6_000)], outer) is None
    assert offset([(90, 100)], [(0, 10)]) is None
