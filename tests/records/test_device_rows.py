"""When work ran that nobody saw, against what is simulated here: what is certain of a device, whose stream was busy
then whatever the pace (W28); and when a collective that gloo had queued began on its pool of threads.
"""

from __future__ import annotations

import heapq
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.records.device_steps import DevicePace, Stretch, lead_ms, nearly_all
from aorta.records.step_line import GlooWorkers
from tests.pair_algebra import intersect, measure, merge

programs = st.lists(st.none() | st.integers(0, 30), min_size=2, max_size=25)
"""A kernel's length, or None: a mark."""
costs = st.tuples(st.integers(0, 12), st.integers(0, 6), st.integers(0, 4))
"""Of a launch for the host; until the device sees it; of a mark for the device."""


def on_a_stream(program, launch_ns, latency_ns, mark_ns) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """When kernels ran, and for each mark when the stream came by and when the host recorded it."""
    host_ns, free_ns, kernels, marks = 0, 0, [], []
    for length_ns in (None, *program, None):
        if length_ns is None:
            sent_ns = host_ns
            free_ns = max(free_ns, host_ns + latency_ns) + mark_ns
            marks.append((free_ns, sent_ns))
        else:
            host_ns += launch_ns
            begin_ns = max(free_ns, host_ns + latency_ns)
            free_ns = begin_ns + length_ns
            kernels.append((begin_ns, free_ns))
    return kernels, marks


@given(programs, costs, st.booleans())
def test_what_is_certain_was_busy(program, costs, all_marks):
    launch_ns, latency_ns, mark_ns = costs
    kernels, marks = on_a_stream(program, launch_ns, latency_ns, mark_ns)
    pace = DevicePace((latency_ns + 1) // 2, marks if all_marks else (marks[0], marks[-1]))
    busy = merge(kernels)
    whole = Stretch(marks[0][0], *marks[-1])
    certain = merge(pace.block(whole))
    assert measure(intersect(certain, busy)) == measure(certain)
    assert measure(intersect([whole.span], busy)) == measure(busy)  # and nothing ran that is not possible
    for (low, _), high in pairwise(marks):
        alone = merge(pace.certain_span(Stretch(low, *high)))
        assert measure(intersect(alone, busy)) == measure(alone)


def paced(bound_ns: int = 0) -> DevicePace:
    """Of a device that writes marks in no time."""
    return DevicePace(bound_ns, [(0, 0), (0, 0)]).of_next_step([])


@pytest.mark.parametrize(
    ("stretch", "certain", "late"),
    [
        (Stretch(100, 200, 90), [(100, 200)], True),  # the host is ahead
        (Stretch(100, 200, 150), [(160, 200)], True),  # the host sets the pace
        (Stretch(100, 200, 195), [], False),
        (Stretch(100, 200), [(100, 200)], True),  # readings of the host's clock are certain
    ],
)
def test_what_is_certain_of_a_block(stretch, certain, late):
    assert paced(5).block(stretch) == certain
    assert paced(5).reached_after_recording(stretch) is late


def test_marks_inside_a_block_leave_less_open():
    pace = DevicePace(0, [(130, 90), (160, 140)])
    assert pace.marks_ns(1) == 30
    pace = pace.of_next_step([(130, 90), (130, 91), (160, 140), (200, 150)])
    assert pace.marks_ns(2) == 0  # two marks were written at once
    assert merge(pace.block(Stretch(100, 200, 150))) == [(100, 130), (140, 200)]


def test_a_block_is_cut_by_the_marks_inside_it_in_their_order():
    """Whatever the order in which they are read; not by those round it, nor by those of another step."""
    pace = paced().of_next_step([(140, 120)]).of_next_step([(250, 150), (180, 170), (50, 10), (130, 90)])
    assert merge(pace.block(Stretch(100, 200, 195))) == [(100, 130), (170, 180), (195, 200)]


def test_writing_a_mark_is_neither_computation_nor_communication():
    pace = DevicePace(0, [(100, 0), (103, 1)])
    assert pace.block(Stretch(100, 200, 5)) == [(103, 197)]
    assert pace.certain_span(Stretch(200, 300, 5), begins_late=1, ends_early=2) == [(203, 294)]


def test_the_lead_is_the_median_over_the_ends_of_blocks():
    stretches = [Stretch(0, 1_000_000, 0), Stretch(0, 5_000_000, 1_000_000), Stretch(0, 3_000_000, 3_000_000)]
    assert lead_ms(stretches) == 1
    assert lead_ms([Stretch(100, 200)]) is None  # of the host's own clock
    assert paced(5).certain_span(Stretch(100, 200)) == [(100, 200)]


STALLS = [(0, 5_000)], [(0, 1)]


@pytest.mark.parametrize(
    ("possible", "certain", "answer"),
    [
        (([(0, 10_000)], [(0, 1_000)], []), ([(0, 10_000)], [(0, 1_000)], []), True),
        (([(0, 10_000)], [(0, 1_000)], []), ([(0, 10_000)], [(1, 1_000)], []), True),
        (([(0, 10_000)], [(0, 1_000)], []), ([(0, 10_000)], [(3, 1_000)], []), False),
        # Stalls, and what is not there, say nothing of how much may be open.
        (([(0, 10_000)], [], []), ([(3, 10_000)], [], []), True),
        (([(0, 10_000)], *STALLS), ([(3, 10_000)], *STALLS), True),
    ],
)
def test_what_nobody_could_see_needs_no_bounds(possible, certain, answer):
    assert nearly_all(possible, certain) is answer


def simulate(count: int, jobs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """First in, first out on `count` threads: (issue, duration) -> (start, end)."""
    free = [0] * count
    heapq.heapify(free)
    spans = []
    for issue, duration in jobs:
        start = max(issue, heapq.heappop(free))
        heapq.heappush(free, start + duration)
        spans.append((start, start + duration))
    return spans


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 20), st.integers(1, 50)), max_size=30))
def test_starts_are_those_of_a_thread_pool(count, jobs):
    issue, ordered = 0, []
    for gap, duration in jobs:
        issue += gap
        ordered.append((issue, duration))
    lanes = GlooWorkers(count)
    expected = simulate(count, ordered)
    assert [lanes.start_ns(i, end) for (i, _), (_, end) in zip(ordered, expected, strict=True)] == [
        start for start, _ in expected
    ]


def test_an_end_before_its_issue_is_not_turned_round():
    assert GlooWorkers(2).start_ns(10, 8) == 8
