"""One window against a brute-force reference, and the answers that must be known beforehand (docs/dev/measuring.md,
K6)."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.timeline.classes import ALWAYS_SHOWN, AUX, COMPUTE, COPY, KINDS, LANES
from aorta.timeline.overlap import DECIDED, Unseen, copy_rates, either
from tests.strategies import bases, collectives, interval_lists, intervals, shifted
from tests.timeline.test_arrays import instants
from tests.windows import Certain, measure_window

BIT = {lane: 1 << bit for bit, lane in enumerate(LANES)}
MS = 1_000_000


def covers(spans, instant) -> bool:
    return any(start <= instant < end for start, end in spans)


def masks(window, compute, comm, stalls, aux, copy) -> list[int]:
    """The reference: for each nanosecond of the window the set of active lanes, by asking every interval."""
    found = []
    for instant in range(*window):
        stalled = covers(stalls, instant)
        mask = BIT[COMPUTE] * (covers(compute, instant) and not stalled) | BIT[COPY] * covers(copy, instant)
        mask |= BIT[AUX] * (covers(aux, instant) and not stalled)
        for kind, spans in comm.items():
            mask |= BIT[kind] * covers(spans, instant)
        found.append(mask)
    return found


@pytest.mark.spec("D3")
@given(intervals, interval_lists, collectives, interval_lists, interval_lists, interval_lists, bases)
def test_a_window_agrees_with_the_reference(window, compute, comm, stalls, aux, copy, base):
    expected = masks(window, compute, comm, stalls, aux, copy)
    (moved,) = shifted([window], base)
    seen = measure_window(
        moved,
        compute=shifted(compute, base),
        comm={kind: shifted(spans, base) for kind, spans in comm.items()},
        stalls=shifted(stalls, base),
        aux=shifted(aux, base),
        copy=shifted(copy, base),
    )

    def time(*lanes: str) -> int:
        return sum(any(mask & BIT[lane] for lane in lanes) for mask in expected)

    def hidden(*lanes: str) -> int:
        return sum(any(mask & BIT[lane] for lane in lanes) and bool(mask & BIT[COMPUTE]) for mask in expected)

    assert seen.window_ns == len(expected)
    assert (seen.compute_ns, seen.copy_ns, seen.aux_ns) == (time(COMPUTE), time(COPY), time(AUX))
    assert (seen.comm_ns, seen.hidden_ns) == (time(*comm), hidden(*comm))
    assert seen.idle_ns == expected.count(0)
    assert seen.stall_ns == sum(covers(stalls, instant) for instant in range(*window))
    assert set(seen.kinds) == set(comm)
    for kind, part in seen.kinds.items():
        assert (part.total_ns, part.hidden_ns) == (time(kind), hidden(kind))

    # The segments tile the window, and say of every nanosecond which lanes were active in it.
    assert [mask for start, end, mask in seen.tiles for _ in range(start, end)] == expected
    assert all(start < end for start, end, _ in seen.tiles)
    assert all(before[1] == after[0] and before[2] != after[2] for before, after in itertools.pairwise(seen.tiles))
    if expected:
        assert (seen.tiles[0][0], seen.tiles[-1][1]) == (0, len(expected))


@pytest.mark.spec("D25")
@given(intervals, interval_lists, collectives, interval_lists)
def test_hidden_and_exposed_add_up_in_the_metrics(window, compute, comm, stalls):
    measured = measure_window(window, compute=compute, comm=comm, stalls=stalls)
    values, reasons = measured.metrics()
    for name in ("comm", *comm):
        if f"{name}_ms" in values:
            total = values[f"compute_{name}_ms"] + values[f"exposed_{name}_ms"]
            assert total == pytest.approx(values[f"{name}_ms"], abs=1e-12)
    # A null has its reason, a value has none, and a ratio is a share.
    assert reasons.keys() == {name for name, value in values.items() if value is None}
    for ratio in ("overlap_ratio", "overlap_over_compute", "exposed_share"):
        assert values[ratio] is None or 0 <= values[ratio] <= 1
    assert set(ALWAYS_SHOWN) <= set(measured.per_stream_ms()) <= set(LANES)
    busiest = max((mask.bit_count() for _, _, mask in measured.tiles), default=0)
    concurrency = measured.concurrency()
    assert concurrency["max"] == busiest
    assert 0 <= concurrency["mean"] <= busiest


@pytest.mark.spec("D24")
@pytest.mark.parametrize(
    ("compute", "comm", "ratio", "hidden"),
    [
        pytest.param([(0, 20)], [(5, 7)], 1.0, 2, id="inside"),
        pytest.param([(0, 10)], [(10, 15)], 0.0, 0, id="abutting is disjoint"),
        pytest.param([(0, 10)], [(5, 15)], 0.5, 5, id="half"),
        pytest.param([], [(5, 15)], 0.0, 0, id="no compute"),
        pytest.param([(0, 5), (5, 10)], [(2, 4), (3, 8)], 1.0, 6, id="overlapping collectives count once (W10)"),
        pytest.param([(0, 6), (2, 4)], [(3, 9)], 0.5, 3, id="nested compute counts once (W7)"),
        pytest.param([(-50, 1)], [(-9, 2)], 0.5, 1, id="cut off at the window"),
    ],
)
def test_known_ratios(compute, comm, ratio, hidden):
    measured = measure_window((0, 20), compute=compute, comm={"allreduce": comm})
    assert measured.overlap_ratio == ratio
    assert measured.hidden_ns == measured.kinds["allreduce"].hidden_ns == hidden


@pytest.mark.spec("D2")
def test_lanes_that_are_never_used_are_silent_unless_always_shown():
    measured = measure_window((0, 4 * MS), compute=[(0, 3 * MS)], comm={"allgather": [(2 * MS, 4 * MS)]})
    always = {"compute": 3.0, "allreduce": 0.0, "reducescatter": 0.0, "allgather": 2.0, "aux": 0.0}
    assert measured.per_stream_ms() == always
    values, _ = measured.metrics()
    assert (values["compute_allgather_ms"], values["exposed_allgather_ms"]) == (1.0, 1.0)
    assert (values["compute_allreduce_ms"], values["compute_reducescatter_ms"]) == (0.0, 0.0)
    assert "broadcast_ms" not in values
    assert measured.concurrency() == {"mean": 5 / 4, "max": 2.0}


@pytest.mark.spec("D24")
def test_ratios_are_of_communication_of_compute_and_of_the_whole_window():
    measured = measure_window(
        (0, 100), compute=[(0, 40)], comm={"allreduce": [(30, 80)]}, copy=[(35, 45)], aux=[(80, 90)]
    )
    assert measured.overlap_ratio == 10 / 50
    assert measured.overlap_over_compute == 10 / 40
    assert measured.exposed_share == 40 / 100
    # The window counts whole, its idle end too: 40 + 50 + 10 + 10 ns of lanes in 100.
    assert measured.concurrency() == {"mean": 1.1, "max": 3.0}


@pytest.mark.spec("D24")
def test_a_ratio_of_nothing_is_unknown_and_says_why():
    values, reasons = measure_window((0, 10), compute=[(0, 10)], comm={"allreduce": []}, copy=()).metrics()
    assert reasons == {"overlap_ratio": "no communication in this window"}
    assert (values["comm_ms"], values["exposed_share"], values["overlap_over_compute"]) == (0.0, 0.0, 0.0)
    values, reasons = measure_window((0, 10), compute=[], comm={"allreduce": [(0, 5)]}, copy=()).metrics()
    assert values["overlap_ratio"] == 0.0
    assert reasons == {"overlap_over_compute": "no compute in this window"}
    of_no_length = measure_window((7, 7), compute=[(2, 12)], comm={"allreduce": [(7, 12)]}, copy=())
    assert of_no_length.window_ns == of_no_length.idle_ns == of_no_length.compute_ns == of_no_length.comm_ns == 0
    assert not of_no_length.tiles
    assert of_no_length.concurrency() == {"mean": 0.0, "max": 0.0}
    assert set(of_no_length.metrics()[1]) == {"overlap_ratio", "overlap_over_compute", "exposed_share"}


@pytest.mark.parametrize(
    ("unseen", "known", "streams"),
    [
        (Unseen("missed"), {"window_ms": 4, "compute_ms": 2, "copy_ms": 0, "aux_ms": 1}, {"compute": 2, "aux": 1}),
        (Unseen("missed", compute=True), {"window_ms": 4, "copy_ms": 0, "aux_ms": 1}, {"aux": 1}),
    ],
    ids=["communication", "compute too"],
)
def test_what_was_not_seen_makes_every_metric_that_rests_on_it_unknown_and_not_0(unseen, known, streams):
    lanes = {"compute": [(0, 2 * MS)], "comm": {"allreduce": [(0, MS)]}, "aux": [(3 * MS, 4 * MS)], "copy": ()}
    measured = measure_window((0, 4 * MS), **lanes)
    values, reasons = measured.metrics(unseen)
    assert {name: value for name, value in values.items() if value is not None} == known
    assert reasons == dict.fromkeys(values.keys() - known.keys(), "missed")
    assert values.keys() == measured.metrics()[0].keys(), "an unknown metric is null, not absent"
    unknown = dict.fromkeys(("compute", "allreduce", "reducescatter", "aux"))
    assert measured.per_stream_ms(unseen) == unknown | streams


def test_a_rate_is_all_bytes_of_a_direction_over_the_union_of_its_copies():
    copies = [("h2d", 6_000, (0, 2_000)), ("h2d", 6_000, (1_000, 4_000)), ("d2h", 500, (0, 1_000)), ("d2d", 4, (7, 7))]
    assert copy_rates(copies) == {"h2d_gb_per_s": 3.0, "d2h_gb_per_s": 0.5}
    assert copy_rates([]) == {}


def test_an_unknown_kind_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'all_reduce'.*allreduce"):
        measure_window((0, 1), compute=[], comm={"all_reduce": [(0, 1)]})


def test_bubbles_are_waits_within_the_pipeline_without_what_was_computed():
    measured = measure_window(
        (0, 100),
        compute=[(10, 30), (50, 70)],
        comm={"recv": [(0, 10), (30, 45), (75, 90)]},
        stalls=[(0, 10), (30, 45), (75, 90)],
        pipeline=[(0, 80)],
        bubbles=[(0, 12), (30, 55), (75, 90)],
    )
    # Ten before computing, twenty between (longer than the receive itself), and five before the pipeline is left.
    assert (measured.pipeline_ns, measured.bubble_ns, measured.bubble_share) == (80, 35, 35 / 80)
    # A bubble is not idle: idle are 70 to 75 and 90 to 100.
    assert measured.idle_ns == 15
    assert measured.per_stream_ms()["bubble"] == 35e-6
    assert measured.concurrency()["max"] == 1  # in a bubble nothing is done
    assert [tile for tile in measured.tiles if tile[2] == BIT["bubble"]] == [(45, 50, BIT["bubble"])]


def test_bubbles_are_null_where_not_all_was_seen_and_absent_without_a_pipeline():
    measured = measure_window((0, 10), compute=[(0, 5)], comm={}, pipeline=[(0, 9)], bubbles=[(5, 8)])
    values, reasons = measured.metrics(Unseen("why"))
    assert (values["pipeline_ms"], values["bubble_ms"], values["bubble_share"]) == (9e-6, None, None)
    assert reasons["bubble_ms"] == reasons["bubble_share"] == "why"
    without = measure_window((0, 10), compute=[(0, 5)], comm={"recv": [(3, 8)]})
    assert not [name for name in without.metrics()[0] if "bubble" in name or "pipeline" in name]
    assert "bubble" not in without.per_stream_ms()


def test_the_lanes_of_a_record_never_change_their_bits():
    # The bit positions are the file format: a new kind goes to the end, and the schema version rises.
    kinds = "allreduce reducescatter allgather broadcast alltoall reduce gather scatter send recv barrier"
    assert ("compute", *kinds.split(), "copy", "aux", "bubble") == LANES


def spans_of(times) -> list[tuple[int, int]]:
    return [(instant, instant + 1) for instant in sorted(times)]


def between(possible, keep, add) -> tuple[set[int], set[int]]:
    """What is certain of the possible intervals, and what was in truth: all of the former and some of the rest."""
    every = instants(possible)
    certain = every & instants(keep)
    return certain, certain | (every & instants(add))


@given(
    intervals,
    st.tuples(interval_lists, interval_lists, interval_lists),
    collectives,
    st.tuples(interval_lists, interval_lists),
    st.tuples(interval_lists, interval_lists, interval_lists),
    st.tuples(interval_lists, interval_lists, interval_lists),
    st.tuples(interval_lists, interval_lists, st.none() | interval_lists),
)
def test_whatever_ran_between_the_certain_and_the_possible_its_metrics_are_within_the_bounds(
    window, compute, comm, of_comm, stalls, bubbles, others
):
    (aux, copy, pipeline), (stalled, waited) = others, (stalls[0], bubbles[0] if others[2] is not None else None)
    sure_compute, computed = between(*compute)
    kinds = {kind: between(spans, *of_comm) for kind, spans in comm.items()}
    sure_stalls, stood = between(*stalls)
    sure_waits, waiting = between(*bubbles)
    fixed = {"aux": aux, "copy": copy, "pipeline": pipeline}
    certain = Certain(
        spans_of(sure_compute),
        {kind: spans_of(sure) for kind, (sure, _) in kinds.items()},
        spans_of(sure_stalls),
        None if pipeline is None else spans_of(sure_waits),
    )
    seen = measure_window(
        window, compute=compute[0], comm=comm, stalls=stalled, bubbles=waited, certain=certain, **fixed
    )
    truth = measure_window(
        window,
        compute=spans_of(computed - instants(stalled)),
        comm={kind: spans_of(ran) for kind, (_, ran) in kinds.items()},
        stalls=spans_of(stood),
        bubbles=None if pipeline is None else spans_of(waiting),
        **fixed,
    )
    values, _ = truth.metrics()
    for name, value in values.items():
        if value is not None and name in seen.bounds:
            least, most = seen.bounds[name]
            assert least - 1e-12 <= value <= most + 1e-12, name
    # Of what is possible the metrics are as without bounds, and theirs are within them, too.
    without = measure_window(window, compute=compute[0], comm=comm, stalls=stalled, bubbles=waited, **fixed)
    assert dataclasses.replace(seen, bounds={}) == without
    for name, value in without.metrics()[0].items():
        if value is not None and name in seen.bounds:
            assert seen.bounds[name][0] - 1e-12 <= value <= seen.bounds[name][1] + 1e-12, name
    # Every metric that rests on what is not certain has bounds, and is null where they are apart.
    rest_on_marks = {name for name, value in without.metrics()[0].items() if value is not None}
    exact = {"window_ms", "copy_ms", "pipeline_ms"}
    unused = {f"{part}{kind}_ms" for kind in set(KINDS) - comm.keys() for part in ("", "compute_", "exposed_")}
    assert rest_on_marks - seen.bounds.keys() <= exact | unused
    decided, reasons = seen.metrics()
    assert reasons.keys() == {name for name, value in decided.items() if value is None}
    assert seen.undecided.keys() >= {name for name, value in decided.items() if value is None} & rest_on_marks


@given(intervals, interval_lists, collectives, interval_lists, interval_lists)
def test_where_all_is_certain_there_are_no_bounds_apart(window, compute, comm, stalls, aux):
    seen = measure_window(
        window, compute=compute, comm=comm, stalls=stalls, aux=aux, certain=Certain(compute, comm, stalls)
    )
    exact = measure_window(window, compute=compute, comm=comm, stalls=stalls, aux=aux)
    assert seen.undecided == {}
    assert seen.metrics() == exact.metrics()
    assert all(least == most for least, most in seen.bounds.values())
    assert seen.per_stream_ms() == exact.per_stream_ms()


def test_a_host_that_sets_the_pace_leaves_the_ratio_open():
    # A block of 100 whose last 20 certainly ran, beside a collective from 60 to 100: 20 to 40 of its 40 were hidden.
    block, reduced = [(0, 100 * MS)], {"allreduce": [(60 * MS, 100 * MS)]}
    certain = Certain([(80 * MS, 100 * MS)], reduced, ())
    seen = measure_window((0, 100 * MS), compute=block, comm=reduced, certain=certain)
    assert seen.bounds["overlap_ratio"] == (0.5, 1.0)
    values, reasons = seen.metrics()
    assert values["overlap_ratio"] is None
    assert reasons["overlap_ratio"] == "host-bound: between 0.5 and 1 (marks alone cannot say more)"
    assert reasons["compute_ms"] == "host-bound: between 20 and 100 ms (marks alone cannot say more)"
    assert (values["comm_ms"], seen.per_stream_ms()["compute"]) == (40, None)
    # What is open by as little as telemetry and kernels may differ is a number all the same.
    open_ns = round(DECIDED * 40 * MS / 2)
    nearly = Certain([(0, 60 * MS), (60 * MS + open_ns, 100 * MS)], reduced, ())
    assert measure_window((0, 100 * MS), compute=block, comm=reduced, certain=nearly).metrics()[0]["overlap_ratio"] == 1


def test_two_readings_of_one_window_have_bounds_that_hold_for_both():
    """80 ms communicate for certain, 40 of them hidden; 10 more hidden and 10 exposed are doubted."""
    window, compute = (0, 200 * MS), [(0, 60 * MS), (100 * MS, 120 * MS)]
    first = measure_window(window, compute=compute, comm={"allreduce": [(20 * MS, 100 * MS)]})
    spans = [(20 * MS, 110 * MS), (120 * MS, 130 * MS)]
    second = measure_window(window, compute=compute, comm={"allreduce": spans})
    both = either(first, second, "why")
    assert both.comm_ns == first.comm_ns
    assert both.bounds["comm_ms"] == both.bounds["allreduce_ms"] == (80.0, 100.0)
    assert both.bounds["compute_comm_ms"] == both.bounds["exposed_comm_ms"] == (40.0, 50.0)
    assert both.bounds["overlap_ratio"] == (pytest.approx(4 / 9), pytest.approx(5 / 9))  # of each some may be true
    assert {"overlap_ratio", "allreduce_ms", "compute_ms"} & both.undecided.keys() == {"overlap_ratio", "allreduce_ms"}

    extra = [(100 * MS, 110 * MS)]
    unnamed = measure_window(window, compute=compute, comm={"allreduce": [(20 * MS, 100 * MS)]}, of_unknown_kind=extra)
    of_kinds = either(first, unnamed, "why").bounds
    assert (of_kinds["comm_ms"], of_kinds["allreduce_ms"]) == ((80.0, 90.0), (80.0, 90.0))
    assert of_kinds["compute_allreduce_ms"] == (30.0, 50.0)  # the unknown may be of it, or not, and hidden or not
    assert of_kinds["exposed_allreduce_ms"] == (40.0, 50.0)

    nothing = measure_window(window, compute=compute, comm={})
    assert either(nothing, second, "why").bounds["overlap_ratio"] == (0.0, 1.0)
    assert "overlap_ratio" not in either(nothing, nothing, "why").bounds
