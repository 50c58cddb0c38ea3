"""Steps are written when everything in them has happened, in order, and none is waited for (R4)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aorta.instrument import step_recorder as recorder_module
from aorta.instrument.in_flight import InFlight, Waited
from aorta.instrument.open_step import Scalar
from aorta.instrument.step_recorder import MAX_STEPS_LATE
from aorta.records.step_line import Name, StepFacts
from aorta.timeline.overlap import Unseen
from tests.instrument.steps import MS, Pending, Rig


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_step_is_written_when_its_collectives_have_ended_and_not_before(rig: Rig) -> None:
    late = Pending(None)
    with rig.step(0, 10):
        rig.collective(rig.clock.at(1), late)
    assert rig.written == []
    with rig.step(10, 20):
        pass
    assert rig.written == []  # the second has happened, but order is kept
    late.at_ns = 9 * MS
    with rig.step(20, 30):
        pass
    assert rig.written == [0, 1, 2]
    assert rig.lines[0].overlap["comm_ms"] == 8
    assert rig.recorder.steps_written == 3


def test_a_step_is_not_written_before_its_own_end_has_happened(rig: Rig) -> None:
    with rig.step(0, 10):
        rig.clock.running = False
    assert rig.written == []
    rig.clock.taken[-1].at_ns = 11 * MS
    rig.clock.running = True
    with rig.step(11, 20):
        pass
    assert [line.overlap["window_ms"] for line in rig.lines] == [11, 9]


def test_a_collective_that_never_ends_costs_its_own_step_and_no_other(rig: Rig) -> None:
    with rig.step(0, 10):
        rig.compute(2, 8)
        rig.collective(rig.clock.at(1), None)
        rig.collective(rig.clock.at(2), rig.clock.at(4))
    for number in range(1, MAX_STEPS_LATE):
        with rig.step(10 * number, 10 * number + 10):
            pass
    assert rig.written == []
    with rig.step(100, 110):
        pass
    assert rig.written == list(range(MAX_STEPS_LATE + 1))
    first = rig.lines[0]
    assert (first.coverage.seen, first.coverage.issued, first.coverage.complete) == (2, 2, False)
    assert first.coverage.reason == "1 of 2 collectives had not ended when their step was written"
    assert first.overlap["overlap_ratio"] is None
    assert first.reasons["overlap_ratio"] == f"incomplete coverage: {first.coverage.reason}"
    assert first.overlap["compute_ms"] == 6  # what does not rest on communication is kept
    assert [line.coverage.complete for line in rig.lines[1:]] == [True] * MAX_STEPS_LATE


def test_finish_drains_then_gives_callbacks_that_are_on_their_way_some_time(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = Pending(None)
    with rig.step(0, 10):
        rig.collective(rig.clock.at(1), late)

    def callback_comes(_seconds: float) -> None:
        assert rig.clock.drained == 1
        late.at_ns = 5 * MS

    monkeypatch.setattr(recorder_module.time, "sleep", callback_comes)
    rig.recorder.finish()
    assert rig.lines[0].overlap["comm_ms"] == 4


def test_finish_does_not_wait_for_ever(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "FINISH_GRACE_S", 0.01)
    with rig.step(0, 10):
        rig.collective(rig.clock.at(1), None)
    rig.recorder.finish()
    assert rig.written == [0]
    assert not rig.lines[0].coverage.complete


def test_salvage_writes_what_can_be_read_and_asks_the_device_for_nothing(rig: Rig) -> None:
    with rig.step(0, 10):
        rig.collective(rig.clock.at(1), None)
    with rig.step(10, 20):
        rig.clock.running = False
    with rig.step(20, 30):
        pass
    rig.recorder.salvage()
    assert rig.written == [0]  # the second step's end never happened
    assert rig.clock.drained == 0


def test_a_step_that_fails_is_not_recorded_and_the_next_begins_afresh(rig: Rig) -> None:
    with pytest.raises(RuntimeError, match="no memory"), rig.step(0, 10):  # noqa: PT012  the failure is the step's
        rig.collective(rig.clock.at(1), rig.clock.at(2))
        raise RuntimeError("no memory")
    with rig.step(20, 30):
        pass
    rig.recorder.finish()
    assert rig.written == [1]
    assert rig.lines[0].coverage.seen == 0
    assert rig.lines[0].coverage.complete


def test_what_happens_between_steps_belongs_to_none(rig: Rig) -> None:
    rig.collective(rig.clock.at(0), rig.clock.at(1))
    rig.recorder.on_stall(rig.clock.at(0), rig.clock.at(1))
    rig.recorder.on_backward_tail(rig.clock.at(0), rig.clock.at(1))
    rig.compute(0, 1)
    rig.recorder.note(Scalar(torch.ones(())), None)
    with rig.recorder.aux("data"):
        pass
    with rig.step(2, 10):
        pass
    line = rig.lines[0]
    assert (line.collectives, line.stalls, line.compute, line.aux, line.loss) == ([], [], [], [], None)


def test_what_is_issued_between_steps_is_part_of_the_step_that_continues(rig: Rig) -> None:
    with rig.step(0, 10):
        pass
    rig.collective(rig.clock.at(12), rig.clock.at(22), issue_ms=12)
    rig.clock.now_ns = 20 * MS
    rig.recorder.begin(StepFacts(0, 1, 1, None, warmup=False), continues=True)
    rig.compute(20, 30)
    rig.recorder.end()
    line = rig.lines[1]
    assert [row.issue_ns for row in line.collectives] == [-8 * MS]
    assert (line.coverage.seen, line.coverage.outside, line.coverage.complete) == (1, 0, True)
    assert line.overlap["comm_ms"] == 2  # its part in this step


def test_what_is_part_of_no_step_is_counted(rig: Rig) -> None:
    with rig.step(0, 10):
        pass
    rig.collective(rig.clock.at(12), rig.clock.at(13))
    with pytest.raises(RuntimeError), rig.step(15, 16):  # noqa: PT012  the failure is the step's
        rig.collective(rig.clock.at(15), rig.clock.at(16))
        raise RuntimeError
    rig.collective(rig.clock.at(17), rig.clock.at(18))
    with rig.step(20, 30):
        pass
    rig.collective(rig.clock.at(31), rig.clock.at(32))
    rig.recorder.finish()
    assert [line.coverage.outside for line in rig.lines] == [0, 3]
    assert rig.recorder.outside == 1
    assert all(line.coverage.complete for line in rig.lines)


def test_a_call_of_another_thread_that_is_underway_at_a_steps_end_is_not_missing_and_one_that_was_missed_is(
    rig: Rig,
) -> None:
    def follow(number: int) -> None:
        rig.recorder.begin(StepFacts(0, number, number, None, warmup=False), continues=True)

    follow(0)
    rig.recorder.add_underway(1)
    rig.collective(rig.clock.at(1), rig.clock.at(2))
    rig.counted[1] = 0  # not yet counted
    rig.recorder.end()
    follow(1)
    rig.recorder.add_underway(-1)
    rig.counted[1] = 1
    rig.recorder.end()
    follow(2)
    rig.counted[1] = 2  # one that nobody saw
    rig.recorder.end()
    follow(3)
    rig.recorder.end()
    assert [line.coverage.complete for line in rig.lines] == [True, True, False, True]
    assert rig.lines[2].coverage.reason == "the backends counted 1 collectives, AORTA saw 0"


def test_waits_and_calls_of_other_threads_hold_up_no_computation(rig: Rig) -> None:
    with rig.step(0, 10):
        wait = Waited(Name("0", 0), 1 * MS, 4 * MS)
        other = threading.Thread(target=lambda: (rig.recorder.on_wait(wait), rig.recorder.on_call(1 * MS, 4 * MS)))
        other.start()
        other.join()
    assert rig.lines[0].stalls == []
    assert rig.lines[0].waits == []


def test_at_the_tail_what_the_backend_has_completed_ends_at_the_latest(rig: Rig) -> None:
    done, not_done = InFlight("allreduce", "0", 0, 8, None, 0), InFlight("allreduce", "0", 1, 8, None, 0)
    done.has_completed, not_done.has_completed = (lambda: True), (lambda: False)
    with rig.step(0, 20):
        rig.recorder.on_issue(done)
        rig.recorder.on_issue(not_done)
        rig.recorder.on_backward_tail(rig.clock.at(6), rig.clock.at(12))
    assert (done.end_source, not_done.end) == ("future", None)
    stamped = done.end
    done.stamp("wait")
    assert (done.end, done.end_source) == (stamped, "future")  # the first to notice counts


def test_a_step_that_is_not_looked_at_knows_its_window_only(rig: Rig) -> None:
    rig.recorder.unseen = Unseen("paused", compute=True)
    with rig.step(0, 10):
        rig.counted = {1: 3}
        rig.recorder.unseen = None  # what counts is how the step began
    with rig.step(10, 20):
        pass
    blind, seen = rig.lines
    assert (blind.overlap["window_ms"], blind.overlap["compute_ms"], blind.overlap["overlap_ratio"]) == (10, None, None)
    unknown = {name for name, value in blind.overlap.items() if value is None} - {"copy_ms"}
    assert {blind.reasons[name] for name in unknown} == {"paused"}
    assert (blind.coverage.seen, blind.coverage.issued, blind.coverage.reason) == (0, 3, "paused")
    assert blind.active_segments == []
    assert blind.per_stream_ms["compute"] is None
    assert seen.coverage.complete


def test_its_own_time_is_in_the_lines_and_that_of_lines_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = [0]
    monkeypatch.setattr(recorder_module.time, "perf_counter_ns", lambda: now_ns[0])
    rig = Rig()
    rig.recorder.own.counted = True

    def takes(ms: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def taking(*args: Any) -> Any:
            now_ns[0] += ms * MS
            return call(*args)

        return taking

    monkeypatch.setattr(rig.recorder, "_issued_by_backends", takes(1, lambda: dict(rig.counted)))
    monkeypatch.setattr(rig.recorder, "_sink", takes(3, rig.lines.append))
    monkeypatch.setattr(rig.recorder.progress, "enter", takes(10, lambda phase: phase))
    for number in range(4):
        with rig.step(10 * number, 10 * number + 10):
            now_ns[0] += 1_000 * MS  # the step's
            if number == 3:
                with rig.recorder.aux("data"):
                    now_ns[0] += 1_000 * MS
    assert [line.overlap["aorta_ms"] for line in rig.lines] == [2, 2 + 3, 2 + 3, 2 + 3 + 2 * 10]
