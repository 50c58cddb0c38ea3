"""What a step's line says of its marks, and what it does not know (R8)."""

from __future__ import annotations

import msgspec
import pytest
import torch

from aorta.instrument.compute_ranges import Range
from aorta.instrument.open_step import ON_A_CPU, Copied, Scalar
from aorta.timeline.overlap import NO_COPIES
from tests.instrument.steps import MS, Rig


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_collective_that_reaches_into_the_next_step_counts_in_both_windows(rig: Rig) -> None:
    with rig.step(0, 10):
        rig.collective(rig.clock.at(7), rig.clock.at(24))
    with rig.step(10, 20):
        rig.compute(10, 14)
    with rig.step(20, 30):
        pass
    with rig.step(30, 40):
        pass
    assert [line.overlap["comm_ms"] for line in rig.lines] == [3, 10, 4, 0]
    assert [line.overlap["compute_comm_ms"] for line in rig.lines] == [0, 4, 0, 0]
    assert [len(line.collectives) for line in rig.lines] == [1, 0, 0, 0]  # the row stands where it was issued


def test_a_communicator_is_free_when_the_latest_of_its_collectives_has_ended(rig: Rig) -> None:
    """Clocks of different epochs differ by less than a microsecond: the second seems to end before the first."""
    with rig.step(0, 10):
        for start_ms, end_ms in ((1, 5), (2, 4.9), (3, 8)):
            rig.collective(rig.clock.at(start_ms), rig.clock.at(end_ms)).communicator = "0"
    assert [(row.start_ns, row.end_ns) for row in rig.lines[0].collectives] == [
        (1 * MS, 5 * MS),
        (4.9 * MS, 4.9 * MS),
        (5 * MS, 8 * MS),
    ]


def test_every_event_is_given_back_once_and_tensors_are_let_go(rig: Rig) -> None:
    with rig.step(0, 10):
        issued = rig.collective(rig.clock.at(1), rig.clock.at(4))
        issued.alive = (torch.ones(1),)
        rig.recorder.on_stall(rig.clock.at(4), rig.clock.at(5))
        rig.recorder.on_backward_tail(rig.clock.at(3), rig.clock.at(6))
        rig.compute(1, 2)
        with rig.recorder.aux("optimizer"):
            pass
    assert rig.written == [0]
    assert issued.alive is None
    assert sorted(map(id, rig.clock.released)) == sorted(map(id, rig.clock.taken))


def test_a_collective_the_seam_did_not_see_makes_the_ratios_null(rig: Rig) -> None:
    with rig.step(0, 10):
        rig.compute(0, 5)
        rig.collective(rig.clock.at(1), rig.clock.at(2))
        rig.counted = {1: 2}
    line = rig.lines[0]
    why = "the backends counted 2 collectives, AORTA saw 1"
    assert (line.coverage.seen, line.coverage.issued, line.coverage.reason) == (1, 2, why)
    nulls = {name for name, value in line.overlap.items() if value is None} - {"copy_ms"}
    assert {"overlap_ratio", "overlap_over_compute", "comm_ms", "exposed_comm_ms", "idle_ms"} <= nulls
    assert {name: line.reasons[name] for name in nulls} == dict.fromkeys(nulls, f"incomplete coverage: {why}")
    assert line.overlap["compute_ms"] == 5
    assert line.concurrency == {"mean": None, "max": None}


@pytest.mark.parametrize(
    ("counted", "captured", "complete", "reason"),
    [
        pytest.param({1: 0, 2: 1}, False, True, None, id="a group made inside the step"),
        pytest.param({1: 1}, True, False, "captured into a CUDA graph", id="captured"),
        pytest.param({1: None}, False, False, "a backend keeps no count of its collectives", id="no count"),
        pytest.param({1: 0}, False, False, "the backends counted 0 collectives, AORTA saw 1", id="more seen"),
    ],
)
def test_coverage_says_what_the_backends_counted(rig: Rig, counted, captured, complete, reason) -> None:
    if captured:
        rig.recorder.on_captured()
    with rig.step(0, 10):
        rig.collective(rig.clock.at(1), rig.clock.at(2))
        rig.counted = counted
    coverage = rig.lines[0].coverage
    assert (coverage.seen, coverage.complete, coverage.reason is None) == (1, complete, complete)
    assert reason is None or reason in str(coverage.reason)
    assert captured or coverage.issued == (None if None in counted.values() else sum(counted.values()))


def test_a_backward_tail_is_a_stall_only_where_there_is_communication(rig: Rig) -> None:
    with rig.step(0, 20):
        rig.collective(rig.clock.at(2), rig.clock.at(8))
        rig.recorder.on_backward_tail(rig.clock.at(6), rig.clock.at(12))
        rig.recorder.on_stall(rig.clock.at(15), rig.clock.at(16))
    line = rig.lines[0]
    assert [(stall.start_ns, stall.end_ns) for stall in line.stalls] == [(6 * MS, 8 * MS), (15 * MS, 16 * MS)]
    assert line.overlap["compute_stall_ms"] == 3


def test_a_tail_in_which_the_strategy_waits_is_a_stall_only_where_it_waits(rig: Rig) -> None:
    with rig.step(0, 20):
        rig.collective(rig.clock.at(2), rig.clock.at(9))
        rig.recorder.on_stream_wait(rig.clock.at(5), rig.clock.at(6), ())
        rig.recorder.on_backward_tail(rig.clock.at(3), rig.clock.at(12))
    assert [(stall.start_ns, stall.end_ns) for stall in rig.lines[0].stalls] == [(5 * MS, 6 * MS)]


def test_collectives_that_the_backend_does_not_count_are_not_compared(rig: Rig) -> None:
    with rig.step(0, 10):
        rig.collective(rig.clock.at(1), rig.clock.at(2)).counted = False
        rig.counted = {1: 0}
    assert (rig.lines[0].coverage.complete, rig.lines[0].coverage.seen) == (True, 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_says_what_it_was(rig: Rig, value: float) -> None:
    with rig.step(0, 10):
        rig.recorder.note(Scalar(torch.tensor(value)), Scalar(torch.tensor(2.0)))
    assert rig.lines[0].reasons["loss"] == f"was {value}"
    assert "grad_norm" not in rig.lines[0].reasons


def test_queued_collectives_of_one_lane_start_one_after_the_other(rig: Rig) -> None:
    with rig.step(0, 20):
        rig.collective(None, rig.clock.at(6), issue_ms=1)
        rig.collective(None, rig.clock.at(9), issue_ms=2)
    with rig.step(20, 30):
        rig.collective(None, rig.clock.at(25), issue_ms=21)
    rows = [row for line in rig.lines for row in line.collectives]
    assert [(row.start_ns, row.end_ns) for row in rows] == [(1 * MS, 6 * MS), (6 * MS, 9 * MS), (1 * MS, 5 * MS)]


def test_an_open_range_is_left_out_and_an_aux_range_is_closed_by_its_failure(rig: Rig) -> None:
    with rig.step(0, 10):
        rig.recorder.on_range(Range("block", "backward", rig.clock.at(3)))
        with pytest.raises(ValueError, match="bad batch"), rig.recorder.aux("data"):  # noqa: PT012
            rig.clock.now_ns = 7 * MS
            raise ValueError("bad batch")
    line = rig.lines[0]
    assert line.compute == []
    assert [(row.name, row.start_ns, row.end_ns) for row in line.aux] == [("data", 3 * MS, 7 * MS)]


def test_scalars_and_wall_clock(rig: Rig) -> None:
    with rig.step(2_000, 2_010):
        rig.recorder.note(Scalar(torch.tensor(0.5)), Scalar(torch.tensor(2.0)))
    with rig.step(2_010, 2_020):
        pass
    first, second = rig.lines
    assert (first.loss, first.grad_norm) == (0.5, 2.0)
    assert {"loss", "grad_norm"} & first.reasons.keys() == set()
    assert (first.t_start_ns, first.t_end_ns) == (6_000 * MS, 6_010 * MS)
    assert (second.loss, second.grad_norm) == (None, None)
    assert second.reasons["loss"] == "not read in this step: see training.log_interval, or recording.note"
    assert second.reasons["grad_norm"] == "not computed or not read in this step"


def test_every_null_has_its_reason(rig: Rig) -> None:
    with rig.step(0, 10):  # no communication, no compute
        pass
    line = rig.lines[0]
    nulls = {name for name, value in line.overlap.items() if value is None}
    assert nulls == {"overlap_ratio", "overlap_over_compute", "copy_ms"}
    assert nulls | {"loss", "grad_norm"} == line.reasons.keys()


def test_copies_are_a_union_and_reach_into_the_next_step(rig: Rig) -> None:
    rig.recorder.no_copies = None
    with rig.step(0, 10):
        rig.recorder._current.copies.append(Copied("h2d", 3_000_000, rig.clock.at(1), rig.clock.at(4)))
        rig.recorder._current.copies.append(Copied("d2h", 8_000_000, rig.clock.at(3), rig.clock.at(11)))
    with rig.step(10, 20):
        pass
    with rig.step(20, 30):
        pass
    first, second, third = rig.lines
    assert [line.overlap["copy_ms"] for line in rig.lines] == [9, 1, 0]
    assert [list(row) for row in msgspec.to_builtins(first.copies)] == [
        ["h2d", 3_000_000, 1 * MS, 4 * MS],
        ["d2h", 8_000_000, 3 * MS, 11 * MS],
    ]
    assert (first.overlap["h2d_gb_per_s"], first.overlap["d2h_gb_per_s"]) == (1, 1)
    assert second.copies == third.copies == []
    assert "h2d_gb_per_s" not in second.overlap
    assert first.per_stream_ms["copy"] == 9


def test_a_copy_that_cannot_be_timed_makes_the_time_unknown(rig: Rig) -> None:
    rig.recorder.no_copies = None
    with rig.step(0, 10):
        rig.recorder._current.copies.append(Copied("h2d", 100, rig.clock.at(1), rig.clock.at(4)))
        rig.recorder._current.copies.append(Copied("p2p", 100, None, None))
    (line,) = rig.lines
    assert line.overlap["copy_ms"] is None
    assert line.reasons["copy_ms"].startswith("1 of 2 copies were issued on another device's stream")
    assert len(line.copies) == 2


@pytest.mark.parametrize("reason", [NO_COPIES, ON_A_CPU])
def test_copies_that_are_not_looked_at_are_unknown_and_why_is_said(rig: Rig, reason: str) -> None:
    rig.recorder.no_copies = reason
    with rig.step(0, 10):
        pass
    (line,) = rig.lines
    assert line.copies is msgspec.UNSET
    assert (line.overlap["copy_ms"], line.reasons["copy_ms"]) == (None, reason)
