"""Lines that are made of the rows of a ring: many at once as a witness makes each, and known for rows by hand (R3);
what a line does not know (R8).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

from aorta.instrument.instrumentation import ON_A_CPU, Instrumentation, ring_facts
from aorta.instrument.operators import offered
from aorta.instrument.ring_rows import RingRows
from aorta.records import ring_file as rf
from aorta.records import ring_steps
from aorta.records.clocks import boot_id, read_clocks
from aorta.records.device_steps import DevicePace, DeviceSteps, Stretch, marks_of
from aorta.records.progress import ROWS_AT, UnreadableProgress
from aorta.records.ring_file import RingFile, RingGroup
from aorta.records.ring_steps import MOST, MOST_STEPS_LATE, RingSteps
from aorta.records.schema import Stall, Step
from aorta.records.step_line import StepFacts
from aorta.timeline.overlap import NO_COPIES
from tests.instrument.device_rows_by_hand import DeviceByHand
from tests.instrument.taps import ANCHOR, MS, compiled_part, lines_at_once
from tests.instrument.witness import witnessed
from tests.records.test_progress import facts as progress_facts


class ByHand:
    """A ring whose rows a test writes."""

    def __init__(
        self, slots: int = 1024, path: Path | None = None, anchor_interval: int | None = None, lanes: int = 1
    ) -> None:
        process = msgspec.structs.replace(progress_facts(), boot_id=boot_id())
        self.ring = RingFile.create(path, process, slots)
        self.ring.describe(ring_facts(0, 2, ANCHOR, MS, anchor_interval=anchor_interval))
        self.rows = RingRows(self.ring)
        self.group, self.block = self.ring.group(RingGroup("0", lanes, False)), self.ring.text("block")
        self.steps = RingSteps(self.ring)
        self.begun = 0

    def row(self, kind: int, begin_ms: float = 0, end_ms: float = 0, **fields: Any) -> int:
        """Append a row; returns its index."""
        return self.rows.append(kind, **{"a": round(begin_ms * MS), "b": round(end_ms * MS), **fields})

    def collective(self, issue_ms: float, end_ms: float | None, **fields: Any) -> int:
        """A row of an all-reduce, whose end its future told."""
        both = 0 if end_ms is None else round(end_ms * MS) * 2
        return self.row(rf.COLLECTIVE, issue_ms, b=both, group=self.group, **fields)

    def on_a_link(self, start_ms: float, end_ms: float, backend_ms: float) -> int:
        """A row of an all-reduce on an emulated link, which was free when it was issued."""
        row = self.collective(start_ms, end_ms)
        self.rows.linked(self.row(rf.LINK, x=row), rf.BY_FABRIC, round(start_ms * MS), round(backend_ms * MS))
        return row

    def step(self, begin_ms: float, end_ms: float, inside: Callable[[], object], issued: int = 0) -> None:
        """A step and its rows; `issued`: by the backends."""
        at = self.row(rf.STEP, begin_ms, a2=self.ring.count, x=self.begun)
        self.begun += 1
        inside()
        behind = self.ring.count
        self.row(rf.SUMMARY, b=at, x=issued)
        self.rows.end(at, round(end_ms * MS), behind)


def value(hand: ByHand, which: int, number: float) -> None:
    """A row of a value."""
    hand.row(rf.VALUE, flags=which, x=int(np.array(number).view(np.int64)))


def test_a_step_of_rows_by_hand() -> None:
    hand = ByHand()

    def inside() -> None:
        hand.row(rf.PASS, 0, 60, name=hand.block)
        hand.collective(40, 80)
        hand.collective(42, 90, y=1)  # queued behind the first
        hand.row(rf.WAIT, 50, 55, flags=rf.BLOCKED | rf.OVER, group=hand.group)
        hand.row(rf.AUX, 95, 120, name=hand.ring.text("optimizer"))  # reaches over the end of its step
        value(hand, rf.LOSS, 0.5)

    hand.step(0, 100, inside, issued=2)
    (line,) = hand.steps.take()
    known = {"window_ms": 100, "compute_ms": 55, "comm_ms": 50, "compute_comm_ms": 15, "exposed_comm_ms": 35}
    known |= {"compute_stall_ms": 5, "aux_ms": 5, "idle_ms": 5, "allreduce_ms": 50, "overlap_ratio": 0.3}
    assert {name: line.overlap[name] for name in known} == known
    assert [(row.start_ns, row.end_ns) for row in line.collectives] == [(40 * MS, 80 * MS), (80 * MS, 90 * MS)]
    assert line.stalls == [Stall(50 * MS, 55 * MS, "wait")]
    assert line.loss == 0.5
    assert line.coverage.complete


def test_an_open_collective_holds_up_its_step_until_many_newer_ones_are_over() -> None:
    hand = ByHand()
    hand.step(0, 10, lambda: hand.collective(5, None), issued=1)
    for number in range(1, MOST_STEPS_LATE):
        hand.step(10 * number, 10 * number + 9, lambda: None)
        assert hand.steps.take() == []
    hand.step(100, 110, lambda: None)
    first, *others = hand.steps.take()
    assert [line.global_step for line in others] == list(range(1, MOST_STEPS_LATE + 1))
    assert all(line.coverage.complete for line in others)
    assert first.coverage.reason == "1 of 1 collectives had not ended when their step was written"


def test_an_abandoned_step_and_what_is_between_steps_belong_to_none() -> None:
    hand = ByHand()
    hand.row(rf.STEP, 0, a2=0)
    hand.row(rf.PASS, 0, 5, name=hand.block)
    hand.step(10, 20, lambda: hand.row(rf.PASS, 10, 12, name=hand.block))
    hand.row(rf.PASS, 21, 25, name=hand.block)
    hand.step(30, 40, lambda: hand.row(rf.PASS, 30, 34, name=hand.block))
    assert [[row.end_ns for row in line.compute] for line in hand.steps.take()] == [[2 * MS], [4 * MS]]


def test_rows_that_were_overwritten_are_counted_and_their_steps_missing_and_one_being_written_holds_up_its_step() -> (
    None
):
    hand = ByHand(slots=16)
    for number in range(8):  # of four rows each
        hand.step(10 * number, 10 * number + 9, lambda: [hand.row(rf.PASS, 0, 1), hand.row(rf.PASS, 0, 1)])
    hand.ring._rows["stamp"][13] = 0  # of the last step
    assert [line.global_step for line in hand.steps.take()] == [4, 5, 6]
    hand.ring._rows["stamp"][13] = 30
    assert [line.global_step for line in hand.steps.take()] == [7]
    assert hand.steps.lost == 16


def test_who_goes_on_behind_a_step_makes_the_lines_that_were_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective is queued behind one of the step before, and reaches into the next."""
    monkeypatch.setattr(ring_steps, "_AGAIN", 4)
    hand = ByHand()
    for number in range(10):
        begin = 10 * number

        def inside(begin: int = begin) -> None:
            hand.collective(begin + 1, begin + 6)
            hand.collective(begin + 3, begin + 12, y=1)

        hand.step(begin, begin + 9, inside, issued=2)
    lines = hand.steps.take()
    assert len({line.overlap["comm_ms"] for line in lines}) > 1
    for done in (0, 4, 8):
        behind = RingSteps(hand.ring, behind_ns=lines[done].start_mono_ns)
        assert behind.take() == lines[done + 1 :]


SEND = list(offered()).index("send")


def only(hand: ByHand) -> Step:
    """The line of its only step."""
    (line,) = hand.steps.take(late=True)
    return line


@pytest.mark.parametrize(
    ("counted", "op", "seen", "reason"),
    [
        pytest.param(1, 0, 1, None, id="all"),
        pytest.param(rf.NOT_COUNTED, 0, 1, "a backend keeps no count of its collectives", id="no count"),
        pytest.param(0, 0, 1, "the backends counted 0 collectives, AORTA saw 1", id="more seen"),
        pytest.param(0, SEND, 0, None, id="a send that its backend does not count"),
    ],
)
def test_coverage_says_what_the_backends_counted(counted, op, seen, reason):
    hand = ByHand()
    hand.step(0, 10, lambda: hand.collective(1, 2, op=op), issued=counted)
    coverage = only(hand).coverage
    assert (coverage.seen, coverage.complete, coverage.reason) == (seen, reason is None, reason)
    assert coverage.issued == (None if counted == rf.NOT_COUNTED else counted)


def test_scalars_and_wall_clock() -> None:
    hand = ByHand()
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


def test_every_null_has_its_reason() -> None:
    hand = ByHand()
    hand.step(0, 10, lambda: None)  # no communication, no compute
    line = only(hand)
    nulls = {name for name, value in line.overlap.items() if value is None}
    assert nulls == {"overlap_ratio", "overlap_over_compute", "copy_ms"}
    assert nulls | {"loss", "grad_norm", "lr"} == line.reasons.keys()
    assert line.copies is msgspec.UNSET
    assert line.reasons["copy_ms"] == ON_A_CPU


def test_copies_that_are_not_looked_at_are_unknown_and_why_is_said() -> None:
    hand = DeviceByHand()
    hand.end(hand.begin((10, 20)), 0)
    hand.append(rf.NOTE, flags=rf.NO_COPIES, name=hand.ring.text(NO_COPIES), b2=0)
    (line,) = RingSteps(hand.ring).take()
    assert (line.copies, line.overlap["copy_ms"], line.reasons["copy_ms"]) == (msgspec.UNSET, None, NO_COPIES)


def at(ns: int) -> tuple[int, int]:
    """A mark that the device reached long after the host had recorded it."""
    return ns, ns - 500


def test_a_tail_in_which_the_strategy_waits_is_a_stall_only_where_it_waits() -> None:
    hand = DeviceByHand(bound_ns=0)
    step = hand.begin((1_000, 1_200))
    hand.collective(0, 1, None, at(1_020), at(1_090))
    hand.between(rf.GAP, at(1_050), at(1_060))
    hand.between(rf.TAIL, at(1_030), at(1_120))
    hand.end(step, 1)
    assert [(stall.start_ns, stall.end_ns) for stall in RingSteps(hand.ring).take()[0].stalls] == [(50, 60)]


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
def device() -> DeviceSteps:
    return DeviceSteps(0)


PACE = DevicePace(0, [(50, 0), (50 + MARK_NS, 1)])


@pytest.mark.parametrize(("sent_ns", "first_ns"), [(20, 300 - 2 * MARK_NS), (299, 300 - 2 * MARK_NS), (300, 250)])
def test_a_queued_collective_may_have_begun_before_the_mark_behind_the_one_before(device, sent_ns, first_ns):
    """By as much as that mark takes; at any time, where the host recorded it after the end."""
    spans = (Stretch(200, 300, sent_ns), Stretch(250, 400, 30), Stretch(280, 500, 30))
    found = [device.ran("allreduce", "0", None, span, PACE) for span in spans]
    assert [ran.possible for _, ran in found] == [(200, 300), (first_ns, 400), (400 - 2 * MARK_NS, 500)]
    assert [start_ns for start_ns, _ in found] == [200, 300, 400]


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
    found = [device.ran("allreduce", "0", launch, Stretch(*span, 1), PACE)[0] for span in spans]
    assert found == starts_ns


def test_readings_of_the_hosts_clock_are_no_devices(device: DeviceSteps) -> None:
    _, ran = device.ran("allreduce", "0", None, Stretch(200, 300), PACE)
    assert (ran.certain, ran.on_device) == ([(200, 300)], False)


def test_names_are_listed_once_and_stand_for_others_where_there_is_no_space() -> None:
    ring = ByHand().ring
    assert ring.text("block") == ring.text("block")
    new, group = ring.text("new"), ring.group(RingGroup("0", 1, False))
    assert ring.names()[new] == "new"
    assert tuple(ring.names()[group]) == ("0", 1, False, [])
    for number in range(3):
        last = ring.text(f"{number}" * 100_000)
    assert ring.names()[last] == rf.OTHERS


def test_a_file_that_is_no_ring_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "rank_0.bin").write_bytes(b"\0" * (ROWS_AT + 64))
    with pytest.raises(UnreadableProgress, match="not a progress file"):
        RingFile.open(path)


def test_what_lines_cost_is_shared_by_as_many_later_steps() -> None:
    compiled_part()
    lines: list[Step] = []

    def slow(line: Step) -> None:
        lines.append(line)
        time.sleep(0.005)

    with Instrumentation(torch.device("cpu"), "observe", 0, 1, read_clocks(), slow, native=True) as instrument:
        for number in range(2 * MOST):
            with instrument.recorder.step(StepFacts(0, number, number, None, warmup=False)):
                pass
        instrument.recorder.finish()
    own = [line.overlap["aorta_ms"] or 0 for line in lines]
    assert median(own[:MOST]) < 5 <= min(own[MOST:])
    assert median(own[MOST:]) < 2 * min(own[MOST:])


LENGTH_NS = 400


@st.composite
def rings(draw: st.DrawFn, on_device: bool) -> DeviceByHand:
    """Steps one behind another; the host is ahead of the device by more or less, and all lies in or round each step."""
    hand, begin_ns = DeviceByHand(3 if on_device else None, stall_cutoff_ns=50), 1_000
    block, of_group, text = hand.ring.text("block"), {"group": hand.group, "op": hand.op}, hand.ring.text

    def either(flags: int) -> int:
        return draw(st.sampled_from((0, flags)))

    for number in range(draw(st.integers(1, 4))):
        low, high = begin_ns - 5, begin_ns + draw(st.integers(1, LENGTH_NS)) + 60
        end_ns, ahead_ns = high - 60, draw(st.sampled_from((1, 20, 900)))

        def mark(least: int = low, most: int = high, ahead_ns: int = ahead_ns) -> tuple[int, int]:
            at_ns = draw(st.integers(least, most))
            return at_ns, at_ns - draw(st.integers(0, ahead_ns)) if on_device else 0

        def some(most: int, mark: Any = mark, high: int = high) -> list[tuple[Any, Any]]:
            firsts = [mark() for _ in range(draw(st.integers(0, most)))]
            return [(first, mark(first[0], max(first[0], high))) for first in firsts]

        unseen = {"name": text("why"), "flags": either(rf.BLIND)} if not draw(st.integers(0, 5)) else {}
        step, counted = hand.begin((begin_ns, end_ns), **unseen), 0
        for own in some(1):
            hand.between(rf.COMPUTE, *own, name=block, x=text("forward"))
        for own in some(3):
            hand.between(rf.PASS, *own, name=block, flags=rf.BACKWARD)
        for seq, (begin, end) in enumerate(some(3), 100 * number):
            ended, by_future = end if draw(st.integers(0, 9)) else None, draw(st.booleans())
            if on_device:
                which = draw(st.integers(0, 3)), draw(st.none() | st.integers(0, 2))
                counted += hand.collective(seq, *which, begin, ended, by_future)
                continue
            row = hand.append(
                rf.COLLECTIVE,
                a=begin[0],
                a2=either(begin[0] + 50 + draw(st.integers(-1, 1))),  # a call about as long as the cut-off
                b=ended[0] * 2 + either(1) if ended else 0,
                x=64,
                y=seq,
                flags=by_future * rf.BY_FUTURE | either(rf.UNWATCHED),
                **of_group,
            )
            counted += 1
            if draw(st.booleans()):
                hand.append(rf.LINK, x=row, a=either(begin[0] + 1), b=end[0], flags=either(rf.BY_FABRIC))
        for own in some(2):
            hand.between(rf.WAIT, *own, flags=rf.BLOCKED | either(rf.OVER), y=100 * number, **of_group)
        for own in some(2 * on_device):
            gap = hand.between(rf.GAP, *own)
            hand.append(rf.JOINED, x=gap, y=100 * number + 1, **of_group)
        for kind in (rf.TAIL, rf.STALL):
            for own in some(1):
                hand.between(kind, *own)
        for own in some(2 * on_device):
            here, flags = draw(st.integers(0, 9)), draw(st.integers(0, 3)) | either(rf.COMPUTES)
            hand.between(rf.COPY, *(own if here else (None, None)), flags=flags | (0 if here else rf.ELSEWHERE), x=8)
        for own in some(1):
            hand.between(rf.AUX, *own, name=text("optimizer"))
        for _ in some(1):
            hand.between(rf.PIPELINE, (begin_ns, begin_ns - 1), mark(begin_ns + 1, end_ns), name=text("0"))
        hand.append(rf.VALUE, flags=draw(st.integers(rf.LOSS, rf.LR)), x=draw(st.integers(0, 1 << 62)))
        hand.end(step, counted)
        for (begin, _), (end, _) in some(1):
            hand.append(rf.RANGE, a=begin, b=end, x=0, y=1, a2=text("KeyError"), b2=step, name=text("named"))
            hand.append(rf.LEFT_OUT, a=2, b=9, b2=step)
        if not draw(st.integers(0, 3)):
            hand.append(rf.NOTE, flags=rf.CAPTURED, a=2, b2=step)
        begin_ns = end_ns + draw(st.integers(0, 20))
    return hand


@pytest.mark.parametrize(("together", "on_device"), [(2, True), (64, True), (2, False)])
@given(data=st.data())
def test_lines_of_many_steps_are_those_of_each(together: int, on_device: bool, data: st.DataObject) -> None:
    hand = data.draw(rings(on_device))
    note(str(hand.ring.rows_since(0)[0]))
    encode = msgspec.json.Encoder().encode
    lines = lines_at_once(hand.ring, together, late=True)
    assert [encode(line) for line in lines] == [encode(line) for line in witnessed(hand.ring)]
    assert len(lines) == hand.steps
