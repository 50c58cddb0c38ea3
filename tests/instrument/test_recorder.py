"""Which step has what: what is issued between steps, by other threads, in steps that fail; and that none is waited for
for ever (R4).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from aorta.instrument import ring_lines
from aorta.instrument.device_recorder import DeviceRecorder
from aorta.instrument.event_clock import DeviceClock
from aorta.instrument.python_interceptor import PythonInterceptor
from aorta.instrument.recorder import Recorder, Scalar
from aorta.instrument.timed_work import InFlight
from aorta.read.record import load_run
from aorta.records import ring_file as rf
from aorta.records.progress import SLOTS
from aorta.records.ring_file import RingGroup
from aorta.records.schema import Step
from aorta.records.step_line import StepFacts
from aorta.records.window_kernels import WindowKernels
from aorta.timeline.overlap import Unseen
from tests.analysis.builders import footer, header, write_rank
from tests.instrument.taps import MS, ring_in_memory


class Rig:
    """A recorder, and collectives as its interceptor would record them; the backend counts them, too."""

    def __init__(self, slots: int = SLOTS) -> None:
        self.ring, self.lines = ring_in_memory(slots=slots), list[Step]()
        self.interceptor = PythonInterceptor({}, self.ring)
        self.counted: dict[int, int | None] = {1: 0}
        self.recorder = Recorder(self.ring, self.interceptor, lambda: dict(self.counted), self.lines.append)
        self._group = self.ring.group(RingGroup("0", 1, counts_point_to_point=True))
        self.steps_begun = 0

    def facts(self) -> StepFacts:
        """Of the next step."""
        number, self.steps_begun = self.steps_begun, self.steps_begun + 1
        return StepFacts(0, number, number, 1e-3, warmup=False)

    @contextmanager
    def step(self) -> Iterator[None]:
        with self.recorder.step(self.facts()):
            yield

    def collective(self, *, ended: bool = True) -> InFlight:
        now_ns, rows, row = time.perf_counter_ns(), self.interceptor.rows, -1
        if self.interceptor.steps.is_open:
            row = rows.append(rf.COLLECTIVE, a=now_ns, b=(now_ns + 1) * 2 if ended else 0, x=8, group=self._group)
        issued = InFlight("allreduce", "0", 0, 8, now_ns, rows=rows, row=row)
        self.interceptor.steps.issued.append(issued)
        before = self.counted[1]
        self.counted[1] = before + 1
        return issued


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_finish_gives_callbacks_that_are_on_their_way_some_time(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    with rig.step():
        late = rig.collective(ended=False)
    monkeypatch.setattr(ring_lines.time, "sleep", lambda _seconds: rig.interceptor.steps.over(late))
    rig.recorder.finish()
    assert rig.lines[0].coverage.complete
    assert len(rig.lines) == 1


@pytest.mark.parametrize("end", ["finish", "salvage"])
def test_neither_end_waits_for_ever_and_salvage_not_at_all(rig: Rig, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    with rig.step():
        rig.collective(ended=False)
    if end == "finish":
        monkeypatch.setattr(ring_lines, "FINISH_GRACE_S", 0.01)
    else:
        monkeypatch.setattr(ring_lines.time, "sleep", pytest.fail)
    getattr(rig.recorder, end)()
    (line,) = rig.lines
    why = "1 of 1 collectives had not ended when their step was written"
    assert (line.coverage.complete, line.coverage.reason) == (False, why)
    assert (line.overlap["overlap_ratio"], line.reasons["overlap_ratio"]) == (None, f"incomplete coverage: {why}")
    assert line.overlap["compute_ms"] == 0  # what does not rest on communication is kept


def test_what_happens_between_steps_belongs_to_none(rig: Rig) -> None:
    rig.collective()
    rig.recorder.on_stall(1, 2)
    rig.recorder.note(Scalar(torch.ones(())), None)
    with rig.recorder.aux("data"):
        pass
    with rig.step():
        pass
    rig.recorder.finish()
    (line,) = rig.lines
    assert (line.collectives, line.stalls, line.compute, line.aux, line.loss) == ([], [], [], [], None)


def test_what_is_issued_between_steps_is_part_of_the_step_that_continues(rig: Rig) -> None:
    with rig.step():
        pass
    rig.collective()
    rig.recorder.begin(rig.facts(), continues=True)
    rig.recorder.end()
    rig.recorder.finish()
    line = rig.lines[1]
    (row,) = line.collectives
    assert row.issue_ns < 0
    assert (line.coverage.seen, line.coverage.outside, line.coverage.complete) == (1, 0, True)


def test_what_is_part_of_no_step_is_counted_and_a_step_that_fails_is_none(rig: Rig) -> None:
    with rig.step():
        pass
    rig.collective()
    with pytest.raises(RuntimeError, match="no memory"), rig.step():  # noqa: PT012  the failure is the step's
        rig.collective()
        raise RuntimeError("no memory")
    rig.collective()
    with rig.step():
        pass
    rig.collective()
    rig.recorder.finish()
    told = [(line.global_step, line.coverage.seen, line.coverage.outside, line.coverage.complete) for line in rig.lines]
    assert told == [(0, 0, 0, True), (2, 0, 3, True)]
    assert rig.recorder.outside == 1


def test_a_call_of_another_thread_that_is_underway_at_a_steps_end_is_not_missing_and_one_that_was_missed_is(rig):
    def step(counted: int, underway: int = 0) -> None:
        """So many have been counted at its end; one more call, or one fewer, is underway."""
        rig.recorder.begin(rig.facts(), continues=True)
        rig.interceptor.steps.add_underway(underway)
        if underway > 0:
            rig.collective()
        rig.counted[1] = counted
        rig.recorder.end()

    step(0, underway=1)
    step(1, underway=-1)
    step(2)  # one that nobody saw
    step(2)
    rig.recorder.finish()
    assert [line.coverage.complete for line in rig.lines] == [True, True, False, True]
    assert rig.lines[2].coverage.reason == "the backends counted 1 collectives, AORTA saw 0"


def test_at_the_tail_what_the_backend_has_completed_ends_at_the_latest(rig: Rig) -> None:
    with rig.step():
        done, not_done = (rig.collective(ended=False) for _ in range(2))
        done.has_completed, not_done.has_completed = (lambda: True), (lambda: False)
        rig.interceptor.steps.settle(12)
    assert (done.end, done.end_source, not_done.end) == (12, "future", None)
    done.stamp("wait")
    assert (done.end, done.end_source) == (12, "future")  # the first to notice counts


def test_an_auxiliary_range_is_closed_by_its_failure(rig: Rig) -> None:
    with rig.step():
        with pytest.raises(ValueError, match="bad batch"), rig.recorder.aux("data"):
            raise ValueError("bad batch")
        assert rig.recorder.lacks("data")
        with rig.recorder.aux("data"):
            assert not rig.recorder.lacks("data")
            other = threading.Thread(target=lambda: told.append(rig.recorder.lacks("other")))
            told: list[bool] = []
            other.start()
            other.join()
    rig.recorder.finish()
    assert told == [False]
    assert [row.name for row in rig.lines[0].aux] == ["data", "data"]


def test_a_step_that_is_not_looked_at_knows_its_window_only(rig: Rig) -> None:
    rig.recorder.unseen = Unseen("paused", compute=True)
    with rig.step():
        rig.counted = {1: 3}
        rig.recorder.unseen = None  # what counts is how the step began
    with rig.step():
        pass
    rig.recorder.finish()
    blind, seen = rig.lines
    assert (blind.overlap["compute_ms"], blind.overlap["overlap_ratio"]) == (None, None)
    assert blind.overlap["window_ms"] is not None
    unknown = {name for name, value in blind.overlap.items() if value is None} - {"copy_ms"}
    assert {blind.reasons[name] for name in unknown} == {"paused"}
    assert (blind.coverage.seen, blind.coverage.issued, blind.coverage.reason) == (0, 3, "paused")
    assert blind.active_segments == []
    assert blind.per_stream_ms["compute"] is None
    assert seen.coverage.complete


def test_steps_whose_rows_were_overwritten_are_counted_and_the_report_says_it(tmp_path, monkeypatch):
    """Here lines are not looked for before the end: meanwhile the ring has come round."""
    rig = Rig(slots=64)
    monkeypatch.setattr(rig.recorder, "catch_up", lambda: None)
    for _ in range(20):
        with rig.step():
            for _ in range(8):
                with rig.recorder.aux("data"):
                    pass
    rig.recorder.finish()
    written = [line.global_step for line in rig.lines]
    assert written == list(range(20 - len(written), 20))
    assert rig.recorder.steps_ended == 20
    assert 0 < len(written) < 20
    write_rank(tmp_path, header(world_size=1), rig.lines, footer(len(written), steps_lost=20 - len(written)))
    why = f"rank_0_metrics.jsonl: {20 - len(written)} of 20 steps have no line: what was noted"
    assert any(problem.startswith(why) for problem in load_run(tmp_path).health.problems)


BEGIN_NS = 1_000 * MS


# On a device, on a clock that a test sets: each step is written once the device has passed its end (R4).


class SetClock(DeviceClock):
    """Marks are `LATE_NS` behind the host, which is at `now_ns`; the device has come as far as `passed_ns`."""

    LATE_NS, bound_ns = 100 * MS, 0

    def __init__(self) -> None:
        self.now_ns = self.passed_ns = BEGIN_NS
        self.taken: list[SimpleNamespace] = []
        self.released: list[Any] = []
        self.drained = 0

    def new_epoch(self) -> None:
        """Epochs are of real clocks."""

    def mark(self) -> SimpleNamespace:
        self.now_ns += MS
        self.taken.append(SimpleNamespace(sent_ns=self.now_ns))
        return self.taken[-1]

    def read_ns(self, mark: Any) -> int | None:
        at_ns = int(mark.sent_ns) + self.LATE_NS
        return at_ns if at_ns <= self.passed_ns else None

    def sent_ns(self, mark: Any) -> int:
        return int(mark.sent_ns)

    def release(self, mark: Any) -> None:
        self.released.append(mark)

    def drain(self) -> None:
        self.drained += 1
        self.passed_ns = self.now_ns + self.LATE_NS


class DeviceRig:
    """A recorder of a device where nothing is compiled."""

    def __init__(self) -> None:
        self.clock, self.lines = SetClock(), list[Step]()
        ring = ring_in_memory(slots=1024, bound_ns=0, times_spans=False)
        interceptor = PythonInterceptor({}, ring, on_device=True)
        self.recorder = DeviceRecorder(ring, interceptor, self.clock, lambda: {1: 0}, self.lines.append)
        self.recorder.unseen = Unseen("not compiled", compute=True)

    def step(self, number: int) -> None:
        """A step with an optimizer, which no mark brackets, and a loss: two marks, a millisecond apart."""
        with self.recorder.step(StepFacts(0, number, number, 0.5, warmup=False)):
            with self.recorder.aux("optimizer"):
                pass
            self.recorder.note(Scalar(torch.tensor(number + 0.25)), None)


@pytest.fixture
def device_rig() -> DeviceRig:
    return DeviceRig()


def test_a_step_is_written_once_the_device_has_passed_its_end_and_salvage_asks_it_for_nothing(
    device_rig: DeviceRig,
) -> None:
    device_rig.step(0)
    device_rig.step(1)
    device_rig.recorder.catch_up()
    assert device_rig.lines == []
    device_rig.clock.passed_ns = BEGIN_NS + 102 * MS
    device_rig.recorder.catch_up()
    (line,) = device_rig.lines
    assert (line.start_mono_ns, line.end_mono_ns) == (BEGIN_NS + 101 * MS, BEGIN_NS + 102 * MS)
    assert {name: value for name, value in line.overlap.items() if value is not None} == {"window_ms": 1}
    assert (line.aux, line.loss) == ([], 0.25)
    assert line.reasons["aux_ms"] == "optimizer, clipping, loss read and data were not recorded apart from the rest"
    assert line.reasons["compute_ms"] == line.coverage.reason == "not compiled"
    assert line.copies is msgspec.UNSET
    device_rig.recorder.salvage()
    assert (len(device_rig.lines), device_rig.recorder.steps_ended, device_rig.clock.drained) == (1, 2, 0)


def test_finish_waits_for_the_device_and_every_mark_goes_back_once(device_rig: DeviceRig) -> None:
    for number in range(3):
        device_rig.step(number)
    device_rig.recorder.finish()
    assert [line.loss for line in device_rig.lines] == [0.25, 1.25, 2.25]
    assert device_rig.clock.drained == 1
    assert sorted(map(id, device_rig.clock.released)) == sorted(map(id, device_rig.clock.taken))
    assert device_rig.recorder.is_whole


@pytest.mark.parametrize("end", ["finish", "salvage"])
def test_a_run_that_ends_in_its_window_writes_every_step(device_rig: DeviceRig, end: str) -> None:
    device_rig.recorder.kernels = kernels = WindowKernels()
    device_rig.step(0)
    device_rig.clock.drain()
    device_rig.recorder.catch_up()
    assert device_rig.lines == []  # its kernels are not known
    getattr(device_rig.recorder, end)()
    assert [line.measured_by for line in device_rig.lines] == [msgspec.UNSET]
    assert kernels.problem == "the run ended in the window"
