"""The algebra on columns gives what the algebra on lists gives, which is held to a brute-force reference (K6)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.errors import IntervalError
from aorta.timeline import arrays, intervals
from aorta.timeline.arrays import COLUMNS, MERGED_COLUMNS, pairs, spans
from aorta.timeline.classes import LANES
from aorta.timeline.overlap import NO_COPIES, OF_UNKNOWN_KIND, PAIRS, measure_lanes, measure_window
from tests.strategies import bases, collectives, interval_lists
from tests.strategies import intervals as windows


def shifted(found, base):
    return [(start + base, end + base) for start, end in found]


@given(interval_lists, interval_lists, bases)
def test_union_intersection_and_difference_are_those_of_lists(left, right, base):
    left, right = shifted(left, base), shifted(right, base)
    one, two = intervals.merge(left), intervals.merge(right)
    assert pairs(arrays.merge(spans(left))) == one
    assert pairs(arrays.intersect(spans(one), spans(two))) == intervals.intersect(one, two)
    assert pairs(arrays.subtract(spans(one), spans(two))) == intervals.subtract(one, two)
    assert pairs(arrays.union([spans(one), spans(two)])) == intervals.merge([*one, *two])
    assert arrays.measure(spans(one)) == intervals.measure(one)


@given(interval_lists, windows, bases)
def test_clipping_is_that_of_lists_and_quick_for_merged_ones(found, window, base):
    found, (window,) = shifted(found, base), shifted([window], base)
    assert pairs(arrays.clip(spans(found), window)) == intervals.clip(found, window)
    merged = intervals.merge(found)
    assert pairs(arrays.cut(spans(merged), window)) == intervals.clip(merged, window)


@given(windows, interval_lists, collectives, interval_lists, interval_lists, interval_lists, bases)
def test_a_window_on_columns_is_the_window_on_lists(window, compute, comm, stalls, aux, copy, base):
    (window,) = shifted([window], base)
    lists = {"compute": compute, "stalls": stalls, "aux": aux, "copy": copy}
    lists = {name: shifted(found, base) for name, found in lists.items()}
    comm = {kind: shifted(found, base) for kind, found in comm.items()}
    expected, lanes = measure_lanes(PAIRS, window, comm=comm, **lists)

    columns = {name: spans(found) for name, found in lists.items()}
    measured, measured_lanes = measure_lanes(
        COLUMNS, window, comm={kind: spans(found) for kind, found in comm.items()}, **columns
    )
    assert measured == expected
    assert {name: pairs(lane) for name, lane in measured_lanes.items()} == lanes
    merged = {name: arrays.merge(found) for name, found in columns.items()}
    of_merged, _ = measure_lanes(
        MERGED_COLUMNS, window, comm={kind: arrays.merge(spans(found)) for kind, found in comm.items()}, **merged
    )
    assert of_merged == expected

    bits = {LANES.index(name): lane for name, lane in measured_lanes.items()}
    stretches, masks = arrays.tile(window, bits)
    tiled = [(*pair, mask) for pair, mask in zip(pairs(stretches), masks.tolist(), strict=True)]
    live = measure_window(window, comm=comm, **lists)
    assert tiled == [(part.start_ns, part.end_ns, part.lanes) for part in live.segments]


@given(windows, interval_lists, collectives, interval_lists)
def test_communication_of_unknown_kind_counts_in_comm_and_in_no_kind(window, compute, comm, unknown):
    one_more = {**comm, "barrier": [*comm.get("barrier", []), *unknown]}
    named, _ = measure_lanes(PAIRS, window, compute=compute, comm=one_more)
    measured, _ = measure_lanes(PAIRS, window, compute=compute, comm=comm, of_unknown_kind=unknown)
    assert (measured.comm_ns, measured.hidden_ns) == (named.comm_ns, named.hidden_ns)
    assert measured.idle_ns == named.idle_ns
    assert set(measured.kinds) == set(comm)


def test_where_a_kind_is_unknown_the_milliseconds_of_kinds_are_null_and_those_of_communication_are_not():
    lanes = {"compute": [(0, 5)], "comm": {"allreduce": [(2, 4)], "allgather": [(6, 7)]}}
    unknown, _ = measure_lanes(PAIRS, (0, 10), **lanes, of_unknown_kind=[(4, 6)])
    values, reasons = unknown.metrics()
    of_kinds = [f"{part}{kind}_ms" for kind in lanes["comm"] for part in ("", "compute_", "exposed_")]
    assert {name: values[name] for name in of_kinds} == dict.fromkeys(of_kinds)
    assert {reasons[name] for name in of_kinds} == {OF_UNKNOWN_KIND}
    assert unknown.per_stream_ms()["allreduce"] is None
    assert [values[name] for name in ("comm_ms", "compute_comm_ms", "compute_ms")] == pytest.approx([5e-6, 3e-6, 5e-6])
    known, _ = measure_lanes(PAIRS, (0, 10), **lanes, of_unknown_kind=[(10, 12)])  # outside of the window
    assert known.metrics()[0]["allreduce_ms"] == pytest.approx(2e-6)


def test_what_nobody_looked_for_is_null_with_its_reason_and_not_0():
    measured, _ = measure_lanes(PAIRS, (0, 10), compute=[(0, 5)], comm={"allreduce": [(2, 4)]})
    values, reasons = measured.metrics()
    for name in ("copy_ms", "aux_ms", "compute_stall_ms"):
        assert values[name] is None
        assert "not" in reasons[name]
    assert reasons["copy_ms"] == NO_COPIES
    assert "copy" not in measured.per_stream_ms()
    assert values["overlap_ratio"] == 1.0


@given(interval_lists, st.integers(-3, 40), st.integers(1, 9))
def test_an_interval_that_ends_before_it_starts_is_refused(found, start, by):
    inverted = spans([*found, (start, start - by)])
    for operation in (arrays.merge, lambda columns: arrays.clip(columns, (-100, 100))):
        with pytest.raises(IntervalError, match=rf"interval \[{start}, {start - by}\) ends before it starts"):
            operation(inverted)
