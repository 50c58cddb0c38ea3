"""Which collective an exposed nanosecond is assigned to: disjoint, complete, and by the rule
(docs/dev/attribution.md)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aorta.analysis.attribution.accumulate import CollectiveSpan, assigned, overlaid, parts, tiled
from aorta.analysis.attribution.keys import BUBBLE_PART, NOWHERE, TRANSFER, UNKNOWN_PART, WAIT, Region
from aorta.timeline.intervals import merge
from aorta.timeline.overlap import Exposure, exposure, measure_window
from tests.strategies import interval_lists, intervals

kinds = st.sampled_from(["allreduce", "allgather", "reducescatter"])


@st.composite
def rows(draw: st.DrawFn) -> list[CollectiveSpan]:
    found = []
    for order, (start, end) in enumerate(draw(interval_lists)):
        wait = draw(st.integers(-1, max(end - start, 0)))
        found.append(CollectiveSpan(start, end, draw(kinds), draw(st.sampled_from("ab")), 8, order, wait))
    return found


def nanoseconds(spans: list[tuple[int, int]]) -> set[int]:
    return {at for start, end in spans for at in range(start, end)}


def row(start: int, end: int, order: int = 0, kind: str = "allreduce", wait: int = -1) -> CollectiveSpan:
    return CollectiveSpan(start, end, kind, "0", 8, order, wait)


def exposed_by(window, found, compute, stalls) -> Exposure:
    return exposure(window, [(one.start, one.end) for one in found], compute, stalls)


@given(intervals, rows(), interval_lists, interval_lists)
def test_every_exposed_nanosecond_of_the_recorders_definition_is_assigned_once(window, found, compute, stalls):
    lanes = exposed_by(window, found, compute, stalls)
    by_kind: dict[str, list[tuple[int, int]]] = {}
    for one in found:
        by_kind.setdefault(one.kind, []).append((one.start, one.end))
    measured = measure_window(window, compute=compute, comm=by_kind, stalls=stalls)
    pieces = list(assigned(lanes.exposed, found))
    seen = [at for piece in pieces for at in nanoseconds(piece.spans)]
    assert len(seen) == len(set(seen)) == measured.comm_ns - measured.hidden_ns
    assert set(seen) == nanoseconds(lanes.exposed)
    for piece in pieces:
        assert nanoseconds(piece.spans) <= nanoseconds([(piece.row.start, piece.row.end)])


@given(intervals, rows(), interval_lists)
def test_the_rule_nanosecond_by_nanosecond(window, found, compute):
    """The reference: for each nanosecond, of those in flight, by (outlasts the stretch, start, end, order)."""
    lanes = exposed_by(window, found, compute, [])
    owner = {at: piece.row for piece in assigned(lanes.exposed, found) for at in nanoseconds(piece.spans)}
    for stretch in lanes.exposed:
        for at in range(*stretch):
            flying = [one for one in found if one.start <= at < one.end]
            best = min(flying, key=lambda one: (one.end > stretch[1], one.start, one.end, one.order))
            assert owner[at] == best


@given(rows())
def test_waiting_and_transfer_make_up_the_whole(found):
    lanes = exposed_by((0, 1000), found, [], [])
    for piece in assigned(lanes.exposed, found):
        split = dict(parts(piece))
        assert sorted(at for spans in split.values() for at in nanoseconds(spans)) == sorted(nanoseconds(piece.spans))
        if piece.row.wait_ns < 0:
            assert set(split) == {UNKNOWN_PART}
        else:
            assert UNKNOWN_PART not in split
            assert max(nanoseconds(split.get(WAIT, [])), default=-1) < min(
                nanoseconds(split.get(TRANSFER, [])), default=10**9
            )


def test_a_collective_that_outlasts_the_stretch_was_not_waited_for():
    # a long one in the background from 0, a short one from 10 to 20 behind which computing goes on at 22
    long, short = row(0, 100, 0), row(10, 20, 1, "allgather")
    lanes = exposed_by((0, 100), [long, short], [(0, 10), (22, 100)], [])
    assert [(piece.row, piece.spans) for piece in assigned(lanes.exposed, [long, short])] == [
        (short, [(10, 20)]),
        (long, [(20, 22)]),
    ]


def test_of_two_that_end_inside_the_first_one_that_started_is_charged():
    first, second = row(0, 30, 0), row(10, 40, 1)
    lanes = exposed_by((0, 50), [first, second], [], [])
    assert [(piece.row, piece.spans) for piece in assigned(lanes.exposed, [first, second])] == [
        (first, [(0, 30)]),
        (second, [(30, 40)]),
    ]


def test_a_rank_that_did_not_wait_only_transfers():
    (piece,) = assigned([(5, 40)], [row(0, 40, wait=0)])
    assert dict(parts(piece)) == {TRANSFER: [(5, 40)]}


def test_a_rank_waits_first_and_transfers_then():
    (piece,) = assigned([(5, 40)], [row(0, 40, wait=12)])
    assert dict(parts(piece)) == {WAIT: [(5, 12)], TRANSFER: [(12, 40)]}


def test_what_lies_in_a_bubble_is_one_and_the_rest_is_split_as_ever():
    (piece,) = assigned([(5, 40)], [row(5, 40, kind="recv")])
    assert dict(parts(piece, [(0, 30)])) == {BUBBLE_PART: [(5, 30)], UNKNOWN_PART: [(30, 40)]}
    assert dict(parts(piece, [(0, 50)])) == {BUBBLE_PART: [(5, 40)]}
    (known,) = assigned([(5, 40)], [row(5, 40, wait=7)])
    assert dict(parts(known, [(30, 35)])) == {
        BUBBLE_PART: [(30, 35)],
        WAIT: [(5, 12)],
        TRANSFER: [(12, 30), (35, 40)],
    }


# --- where in the step

A, B = Region("backward", "a"), Region("backward", "b")


@given(intervals, st.lists(st.tuples(intervals, st.sampled_from([A, B])), max_size=8))
def test_tiles_cover_the_window_and_name_the_innermost_range(window, found):
    ranges = [(start, end, place) for (start, end), place in found]
    tiles = tiled(window, ranges)
    assert [at for tile in tiles for at in range(tile.start, tile.end)] == list(range(*window))
    for tile in tiles:
        for at in range(tile.start, tile.end):
            over = [part for part in ranges if part[0] <= at < part[1]]
            starts = [max(part[0], window[0]) for part in over]
            innermost = {part[2] for part, start in zip(over, starts, strict=True) if start == max(starts)}
            assert (tile.inside in innermost) if over else tile.inside is None


@given(intervals, st.lists(st.tuples(intervals, st.sampled_from([A, B])), max_size=8))
def test_between_ranges_the_neighbours_are_the_nearest_ones(window, found):
    """The reference walks from each nanosecond to the nearest one that lies inside a range, either way."""
    tiles = tiled(window, [(start, end, place) for (start, end), place in found])
    inside = {at: tile.inside for tile in tiles for at in range(tile.start, tile.end) if tile.inside}
    for tile in tiles:
        if tile.inside is None:
            earlier = [at for at in inside if at < tile.start]
            later = [at for at in inside if at >= tile.end]
            assert tile.before == (inside[max(earlier)] if earlier else None)
            assert tile.after == (inside[min(later)] if later else None)


def test_behind_ranges_that_overlap_the_nearest_is_the_one_that_ended_last():
    *_, gap = tiled((0, 30), [(0, 10, A), (5, 20, B)])
    assert (gap.start, gap.inside, gap.before, gap.after) == (20, None, B, None)


@given(intervals, st.lists(st.tuples(intervals, st.sampled_from([A, B])), max_size=8), interval_lists)
def test_laying_spans_over_tiles_loses_nothing(window, found, spans):
    tiles = tiled(window, [(start, end, place) for (start, end), place in found])
    inside = [(start, end) for start, end in merge(spans) if window[0] <= start and end <= window[1]]
    lengths = list(overlaid(tiles, inside))
    assert sum(length for _, length in lengths) == sum(end - start for start, end in inside)
    assert all(0 < length <= tile.end - tile.start for tile, length in lengths)


def test_between_two_ranges_what_brings_belongs_to_the_next_and_what_takes_away_to_the_last():
    _, gap, _ = tiled((0, 30), [(0, 10, A), (20, 30, B)])
    assert gap.region("allgather") == B
    assert [gap.region(kind) for kind in ("allreduce", "reducescatter", "alltoall")] == [A, A, A]
    (alone,) = tiled((0, 30), [])
    assert alone.region("allgather") == NOWHERE
    first, _ = tiled((0, 30), [(10, 30, B)])
    assert first.region("allreduce") == B
