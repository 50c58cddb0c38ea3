"""Numbers of `workload=streams` from times made by hand."""

from __future__ import annotations

import pytest

from aorta.streams.issue import concurrency, elapsed_ns, knee, most_at_once, ran_together

US = 1_000


def test_concurrency_is_the_area_over_the_union_and_idle_time_does_not_count() -> None:
    kernels = [(0, 10 * US), (0, 10 * US), (30 * US, 40 * US)]
    assert concurrency(kernels) == pytest.approx(1.5)
    assert most_at_once(kernels) == 2
    assert elapsed_ns(kernels) == 40 * US


def test_kernels_that_abut_within_the_events_resolution_did_not_run_at_once() -> None:
    assert most_at_once([(0, 10 * US + 8), (10 * US, 20 * US)]) == 1
    assert not ran_together((0, 10 * US + 8), (10 * US, 20 * US))
    assert most_at_once([(0, 13 * US), (10 * US, 20 * US)]) == 2
    assert ran_together((0, 13 * US), (10 * US, 20 * US))


@pytest.mark.parametrize(
    ("gains", "found"),
    [
        ({1: 1.0, 2: 2.0, 4: 4.0, 8: 4.1}, 4),  # 2.5 % more is noise
        ({1: 1.0, 4: 4.0, 5: 2.5, 6: 3.0, 8: 4.0}, 4),  # a dip between multiples of four queues
        ({1: 1.0, 2: 1.9, 3: 1.5, 4: 3.0}, 4),  # a dip is no knee where more streams gain later
        ({1: 1.0, 2: 0.9}, 1),
        ({1: 1.0}, 1),
    ],
)
def test_the_knee_is_the_smallest_number_that_no_larger_one_beats(gains: dict[int, float], found: int) -> None:
    assert knee(gains, 0.05) == found
