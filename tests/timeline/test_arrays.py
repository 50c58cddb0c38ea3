"""The interval algebra against a brute-force reference, sets of single nanoseconds; and the algebra on columns against
that on lists (docs/dev/measuring.md, K6).
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.errors import InputError, IntervalError
from aorta.timeline import arrays
from aorta.timeline.arrays import Interval, interval_array, pairs
from aorta.timeline.classes import LANES
from aorta.timeline.overlap import NO_COPIES, OF_UNKNOWN_KIND, measure_windows
from tests.pair_algebra import measure, merge
from tests.strategies import bases, collectives, interval_lists, intervals, shifted
from tests.windows import lane, lanes, measure_window


def instants(spans: list[Interval]) -> set[int]:
    """The reference: each nanosecond that lies in at least one interval."""
    return {instant for start, end in spans for instant in range(start, end)}


def is_merged(spans: list[Interval]) -> bool:
    return all(start < end for start, end in spans) and all(
        before[1] < after[0] for before, after in itertools.pairwise(spans)
    )


@given(interval_lists, interval_lists, bases)
def test_the_algebra_is_that_of_sets(left, right, base):
    left, right = shifted(left, base), shifted(right, base)
    one, two = merge(left), merge(right)
    assert instants(one) == instants(left)
    assert is_merged(one)
    assert merge(one) == merge(reversed(left)) == pairs(arrays.merge(interval_array(left))) == one
    assert measure(one) == arrays.measure(interval_array(one)) == len(instants(left))
    both = pairs(arrays.intersect(interval_array(one), interval_array(two)))
    assert instants(both) == instants(left) & instants(right)
    assert is_merged(both)
    assert pairs(arrays.union([interval_array(one), interval_array(two)])) == merge([*one, *two])


def offset(inner: list[Interval], outer: list[Interval], slack: int = 0) -> int | None:
    return arrays.offset(interval_array(inner), interval_array(outer), slack)


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


@given(st.lists(intervals, max_size=4), interval_lists, collectives, interval_lists, interval_lists, bases)
def test_windows_measured_at_once_are_each_the_window_alone(found, compute, comm, unknown, copy, base):
    """Windows may overlap, and come in any order."""
    found = shifted(found, base)
    lists = {"compute": compute, "of_unknown_kind": unknown, "copy": copy}
    lists = {name: shifted(own, base) for name, own in lists.items()}
    comm = {kind: shifted(own, base) for kind, own in comm.items()}
    alone = [measure_window(window, comm=comm, stalls=None, aux=None, **lists) for window in found]
    columns, merged = interval_array(found), {name: lane(own) for name, own in lists.items()}
    assert measure_windows(columns, comm=lanes(comm), **merged, tiled=True) == alone

    bits = {LANES.index(kind): own for kind, own in lanes(comm).items()}
    bits |= {LANES.index(name): merged[name] for name in ("compute", "copy")}
    mine, tiles, masks = arrays.tile_windows(columns, bits)
    tiled = list(zip(mine.tolist(), *(end.tolist() for end in tiles), masks.tolist(), strict=True))
    assert tiled == [
        (at, found[at][0] + low, found[at][0] + high, mask)
        for at, overlap in enumerate(alone)
        for low, high, mask in overlap.tiles
    ]


@given(intervals, interval_lists, collectives, interval_lists)
def test_communication_of_unknown_kind_counts_in_comm_and_in_no_kind(window, compute, comm, unknown):
    one_more = {**comm, "barrier": [*comm.get("barrier", []), *unknown]}
    named = measure_window(window, compute=compute, comm=one_more, stalls=None, aux=None)
    measured = measure_window(window, compute=compute, comm=comm, of_unknown_kind=unknown, stalls=None, aux=None)
    assert (measured.comm_ns, measured.hidden_ns) == (named.comm_ns, named.hidden_ns)
    assert measured.idle_ns == named.idle_ns
    assert set(measured.kinds) == set(comm)


def test_where_a_kind_is_unknown_the_milliseconds_of_kinds_are_null_and_those_of_communication_are_not():
    named = {"compute": [(0, 5)], "comm": {"allreduce": [(2, 4)], "allgather": [(6, 7)]}}
    unknown = measure_window((0, 10), **named, of_unknown_kind=[(4, 6)], stalls=None, aux=None)
    values, reasons = unknown.metrics()
    of_kinds = [f"{part}{kind}_ms" for kind in named["comm"] for part in ("", "compute_", "exposed_")]
    assert {name: values[name] for name in of_kinds} == dict.fromkeys(of_kinds)
    assert {reasons[name] for name in of_kinds} == {OF_UNKNOWN_KIND}
    assert unknown.per_stream_ms()["allreduce"] is None
    assert [values[name] for name in ("comm_ms", "compute_comm_ms", "compute_ms")] == pytest.approx([5e-6, 3e-6, 5e-6])
    known = measure_window((0, 10), **named, of_unknown_kind=[(10, 12)])  # outside of the window
    assert known.metrics()[0]["allreduce_ms"] == pytest.approx(2e-6)


def test_what_nobody_looked_for_is_null_with_its_reason_and_not_0():
    measured = measure_window((0, 10), compute=[(0, 5)], comm={"allreduce": [(2, 4)]}, stalls=None, aux=None)
    values, reasons = measured.metrics()
    for name in ("copy_ms", "aux_ms", "compute_stall_ms"):
        assert values[name] is None
        assert "not" in reasons[name]
    assert reasons["copy_ms"] == NO_COPIES
    assert "copy" not in measured.per_stream_ms()
    assert values["overlap_ratio"] == 1.0


@given(interval_lists, st.integers(-3, 40), st.integers(1, 9))
def test_an_interval_that_ends_before_it_starts_is_bad_input_and_a_value_error(found, start, by):
    inverted = [*found, (start, start - by)]
    operations = (
        lambda spans: arrays.merge(interval_array(spans)),
        lambda spans: measure_windows(interval_array(spans), compute=interval_array(), comm={}),
    )
    for operation in operations:
        with pytest.raises(
            IntervalError, match=rf"interval \[{start}, {start - by}\) ends before it starts"
        ) as refused:
            operation(inverted)
        assert isinstance(refused.value, InputError)
        assert isinstance(refused.value, ValueError)
