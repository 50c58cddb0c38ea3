"""What a step's line says of its rows, and what it does not know (R8)."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from aorta.records import ring_file as rf
from aorta.records.device_rows import DevicePace, DeviceRows, Stretch
from aorta.records.device_steps import marks_of
from aorta.records.ring_steps import RingSteps
from aorta.records.schema import Step
from aorta.timeline.overlap import NO_COPIES
from tests.instrument.device_rows_by_hand import DeviceByHand
from tests.instrument.taps import MS
from tests.instrument.test_rows import ByHand, value


@pytest.fixture
def hand() -> ByHand:
    return ByHand()


def only(hand: ByHand) -> Step:
    """The line of its only step."""
    (line,) = hand.steps.take(late=True)
    return line


def test_a_collective_the_seam_did_not_see_makes_the_ratios_null(hand: ByHand) -> None:
    hand.step(0, 10, lambda: [hand.row(rf.PASS, 0, 5, name=hand.block), hand.collective(1, 2)], issued=2)
    line = only(hand)
    why = "the backends counted 2 collectives, AORTA saw 1"
    assert (line.coverage.seen, line.coverage.issued, line.coverage.reason) == (1, 2, why)
    nulls = {name for name, value in line.overlap.items() if value is None} - {"copy_ms"}
    assert {"overlap_ratio", "overlap_over_compute", "comm_ms", "exposed_comm_ms", "idle_ms"} <= nulls
    assert {name: line.reasons[name] for name in nulls} == dict.fromkeys(nulls, f"incomplete coverage: {why}")
    assert line.overlap["compute_ms"] == 5
    assert line.concurrency == {"mean": None, "max": None}


@pytest.mark.parametrize(
    ("counted", "op", "seen", "reason"),
    [
        pytest.param(1, 0, 1, None, id="all"),
        pytest.param(rf.NOT_COUNTED, 0, 1, "a backend keeps no count of its collectives", id="no count"),
        pytest.param(0, 0, 1, "the backends counted 0 collectives, AORTA saw 1", id="more seen"),
        pytest.param(0, 1, 0, None, id="a send that its backend does not count"),
    ],
)
def test_coverage_says_what_the_backends_counted(hand, counted, op, seen, reason):
    hand.step(0, 10, lambda: hand.collective(1, 2, op=op), issued=counted)
    coverage = only(hand).coverage
    assert (coverage.seen, coverage.complete, coverage.reason) == (seen, reason is None, reason)
    assert coverage.issued == (None if counted == rf.NOT_COUNTED else counted)


def test_what_was_captured_cannot_be_seen_and_a_pass_that_is_open_is_left_out(hand: ByHand) -> None:
    hand.step(0, 10, lambda: hand.row(rf.PASS, 3, name=hand.block))
    hand.row(rf.NOTE, flags=rf.CAPTURED, a=2, b2=0)
    line = only(hand)
    assert "2 collectives were captured into a CUDA graph" in str(line.coverage.reason)
    assert line.compute == []


def test_a_backward_tail_is_a_stall_only_where_there_is_communication(hand: ByHand) -> None:
    hand.step(0, 20, lambda: [hand.collective(2, 8), hand.row(rf.TAIL, 6, 12), hand.row(rf.STALL, 15, 16)], issued=1)
    line = only(hand)
    assert [(stall.start_ns, stall.end_ns) for stall in line.stalls] == [(6 * MS, 8 * MS), (15 * MS, 16 * MS)]
    assert line.overlap["compute_stall_ms"] == 3


def test_scalars_and_wall_clock(hand: ByHand) -> None:
    hand.step(2_000, 2_010, lambda: [value(hand, rf.LOSS, 0.5), value(hand, rf.GRAD_NORM, 2.0)])
    hand.step(2_010, 2_020, lambda: None)
    hand.step(2_020, 2_030, lambda: [value(hand, rf.LOSS, float("nan")), value(hand, rf.GRAD_NORM, float("inf"))])
    first, second, third = hand.steps.take()
    assert (first.loss, first.grad_norm) == (0.5, 2.0)
    assert {"loss", "grad_norm"} & first.reasons.keys() == set()
    assert (first.t_start_ns, first.t_end_ns) == (6_000 * MS, 6_010 * MS)
    assert (second.loss, second.grad_norm) == (None, None)
    assert second.reasons["loss"] == "not read in this step: see training.log_interval, or recording.note"
    assert second.reasons["grad_norm"] == "not computed or not read in this step"
    assert (third.reasons["loss"], third.reasons["grad_norm"]) == ("was nan", "was inf")


def test_every_null_has_its_reason(hand: ByHand) -> None:
    hand.step(0, 10, lambda: None)  # no communication, no compute
    line = only(hand)
    nulls = {name for name, value in line.overlap.items() if value is None}
    assert nulls == {"overlap_ratio", "overlap_over_compute", "copy_ms"}
    assert nulls | {"loss", "grad_norm", "lr"} == line.reasons.keys()
    assert line.copies is msgspec.UNSET
    assert line.reasons["copy_ms"] == "on a CPU"


# On a device, whose marks pass at `(when, when the host recorded them)`


def at(ns: int) -> tuple[int, int]:
    """A mark that the device reached long after the host had recorded it."""
    return ns, ns - 500


def lines(hand: DeviceByHand) -> list[Step]:
    return RingSteps(hand.ring).take(late=True)


def copied(hand: DeviceByHand, window: tuple[int, int], *copies: tuple[int, int, tuple[int, int] | None]) -> None:
    """A step with copies: direction, bytes, when."""
    step = hand.begin(window)
    for way, size, span in copies:
        ends = (None, None) if span is None else (at(span[0]), at(span[1]))
        hand.between(rf.COPY, *ends, flags=way | (0 if span else rf.ELSEWHERE), x=size)
    hand.end(step, 0)


def test_copies_are_a_union_and_reach_into_the_next_step() -> None:
    hand = DeviceByHand()
    copied(hand, (10 * MS, 20 * MS), (0, 3_000_000, (11 * MS, 14 * MS)), (1, 8_000_000, (13 * MS, 21 * MS)))
    copied(hand, (20 * MS, 30 * MS))
    copied(hand, (30 * MS, 40 * MS))
    first, second, third = found = lines(hand)
    assert [line.overlap["copy_ms"] for line in found] == [9, 1, 0]
    assert [list(row) for row in msgspec.to_builtins(first.copies)] == [
        ["h2d", 3_000_000, 1 * MS, 4 * MS],
        ["d2h", 8_000_000, 3 * MS, 11 * MS],
    ]
    assert (first.overlap["h2d_gb_per_s"], first.overlap["d2h_gb_per_s"]) == (1, 1)
    assert second.copies == third.copies == []
    assert "h2d_gb_per_s" not in second.overlap
    assert first.per_stream_ms["copy"] == 9


def test_a_copy_that_cannot_be_timed_makes_the_time_unknown() -> None:
    hand = DeviceByHand()
    copied(hand, (10 * MS, 20 * MS), (0, 100, (11 * MS, 14 * MS)), (3, 100, None))
    (line,) = lines(hand)
    assert line.overlap["copy_ms"] is None
    assert line.reasons["copy_ms"].startswith("1 of 2 copies were issued on another device's stream")
    assert len(line.copies) == 2


def test_copies_that_are_not_looked_at_are_unknown_and_why_is_said() -> None:
    hand = DeviceByHand()
    copied(hand, (10, 20))
    hand.append(rf.NOTE, flags=rf.NO_COPIES, name=hand.ring.text(NO_COPIES), b2=0)
    (line,) = lines(hand)
    assert (line.copies, line.overlap["copy_ms"], line.reasons["copy_ms"]) == (msgspec.UNSET, None, NO_COPIES)


def test_a_tail_in_which_the_strategy_waits_is_a_stall_only_where_it_waits() -> None:
    hand = DeviceByHand(bound_ns=0)
    step = hand.begin((1_000, 1_200))
    hand.collective(0, 1, None, at(1_020), at(1_090))
    hand.between(rf.GAP, at(1_050), at(1_060))
    hand.between(rf.TAIL, at(1_030), at(1_120))
    hand.end(step, 1)
    assert [(stall.start_ns, stall.end_ns) for stall in lines(hand)[0].stalls] == [(50, 60)]


def test_the_pace_is_that_of_the_stream_that_computes_its_copies_too() -> None:
    hand = DeviceByHand()
    hand.between(rf.PASS, (10, 5), (20, 6), flags=rf.COMPUTES)
    hand.between(rf.COPY, (30, 7), (40, 8), flags=rf.COMPUTES)
    hand.between(rf.COPY, (50, 9), (60, 9))  # on another stream
    hand.between(rf.AUX, (70, 9), (80, 9), flags=rf.COMPUTES)
    hand.between(rf.STALL, (90, 9), None)
    hand.between(rf.PASS, (100, 9), (110, 9))  # in no step
    (marks,) = marks_of(hand.ring.rows_since(0)[0], np.array([0, 0, 0, 0, 0, -1]), 1)
    assert sorted(marks) == [(10, 5), (20, 6), (30, 7), (40, 8), (90, 9)]


MARK_NS = 3
"""How long the device takes to write a mark."""


@pytest.fixture
def device() -> DeviceRows:
    return DeviceRows(0)


PACE = DevicePace(0, [(50, 0), (50 + MARK_NS, 1)])


@pytest.mark.parametrize(("sent_ns", "first_ns"), [(20, 300 - 2 * MARK_NS), (299, 300 - 2 * MARK_NS), (300, 250)])
def test_a_queued_collective_may_have_begun_before_the_mark_behind_the_one_before(device, sent_ns, first_ns):
    """By as much as that mark takes; at any time, where the host recorded it after the end."""
    spans = (Stretch(200, 300, sent_ns), Stretch(250, 400, 30), Stretch(280, 500, 30))
    found = [device.ran("allreduce", "0", None, span, PACE) for span in spans]
    assert [ran.communication.possible for ran in found] == [(200, 300), (first_ns, 400), (400 - 2 * MARK_NS, 500)]
    assert [ran.start_ns for ran in found] == [200, 300, 400]


@pytest.mark.parametrize(
    ("launch", "spans", "starts_ns"),
    [
        (1, [(200, 300), (200, 310)], [200, 200]),  # what is launched together begins together
        # Clocks of different epochs differ by less than a microsecond: the second seems to end before the first.
        (None, [(100, 500), (200, 490), (300, 800)], [100, 490, 500]),
    ],
    ids=["one launch", "free when the latest has ended"],
)
def test_when_a_communicator_is_free(device, launch, spans, starts_ns):
    found = [device.ran("allreduce", "0", launch, Stretch(*span, 1), PACE).start_ns for span in spans]
    assert found == starts_ns


def test_readings_of_the_hosts_clock_are_no_devices(device: DeviceRows) -> None:
    ran = device.ran("allreduce", "0", None, Stretch(200, 300), PACE)
    assert (ran.communication.certain, ran.communication.on_device) == ([(200, 300)], False)
