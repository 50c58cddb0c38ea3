"""Steps of a device on a clock that a test sets: each is written once the device has passed its end, and none is waited
for (R4); where nothing is compiled, too.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from aorta.instrument.device_recorder import DeviceRecorder
from aorta.instrument.event_clock import DeviceClock
from aorta.instrument.python_interceptor import PythonInterceptor
from aorta.instrument.recorder import Scalar
from aorta.records.schema import Step
from aorta.records.step_line import StepFacts
from aorta.records.window_kernels import WindowKernels
from aorta.timeline.overlap import Unseen
from tests.instrument.steps import MS, ring_in_memory

BEGIN_NS = 1_000 * MS


class Pending:
    """A mark that the device passes when the test says so."""

    def __init__(self, sent_ns: int) -> None:
        self.sent_ns = sent_ns


class SetClock(DeviceClock):
    """Marks are `LATE_NS` behind the host, which is at `now_ns`; the device has come as far as `passed_ns`."""

    LATE_NS, bound_ns = 100 * MS, 0

    def __init__(self) -> None:
        self.now_ns = self.passed_ns = BEGIN_NS
        self.taken: list[Pending] = []
        self.released: list[Any] = []
        self.drained = 0

    def new_epoch(self) -> None:
        """Epochs are of real clocks."""

    def mark(self) -> Pending:
        self.now_ns += MS
        self.taken.append(Pending(self.now_ns))
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


class Rig:
    """A recorder of a device where nothing is compiled."""

    def __init__(self) -> None:
        self.clock, self.lines = SetClock(), list[Step]()
        ring = ring_in_memory(slots=1024, bound_ns=0)
        interceptor = PythonInterceptor({}, ring, clock=self.clock)
        self.recorder = DeviceRecorder(ring, interceptor, self.clock, lambda: {1: 0}, self.lines.append)
        self.recorder.unseen = Unseen("not compiled", compute=True)

    def step(self, number: int) -> None:
        """A step with an optimizer and a loss: four marks, a millisecond apart."""
        with self.recorder.step(StepFacts(0, number, number, 0.5, warmup=False)):
            with self.recorder.aux("optimizer"):
                pass
            self.recorder.note(Scalar(torch.tensor(number + 0.25)), None)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_step_is_written_once_the_device_has_passed_its_end(rig: Rig) -> None:
    rig.step(0)
    rig.step(1)
    rig.recorder.catch_up()
    assert rig.lines == []
    rig.clock.passed_ns = BEGIN_NS + 104 * MS
    rig.recorder.catch_up()
    (line,) = rig.lines
    assert (line.start_mono_ns, line.end_mono_ns) == (BEGIN_NS + 101 * MS, BEGIN_NS + 104 * MS)
    assert [(row.name, row.start_ns, row.end_ns) for row in line.aux] == [("optimizer", 1 * MS, 2 * MS)]
    assert (line.overlap["window_ms"], line.overlap["aux_ms"], line.loss) == (3, 1, 0.25)
    assert line.overlap["compute_ms"] is None
    assert line.reasons["compute_ms"] == line.coverage.reason == "not compiled"
    assert line.copies is msgspec.UNSET
    assert rig.clock.drained == 0


def test_finish_waits_for_the_device_and_every_mark_goes_back_once(rig: Rig) -> None:
    for number in range(3):
        rig.step(number)
    rig.recorder.finish()
    assert [line.loss for line in rig.lines] == [0.25, 1.25, 2.25]
    assert rig.clock.drained == 1
    assert sorted(map(id, rig.clock.released)) == sorted(map(id, rig.clock.taken))
    assert rig.recorder.is_whole


def test_salvage_writes_what_can_be_read_and_asks_the_device_for_nothing(rig: Rig) -> None:
    rig.step(0)
    rig.step(1)
    rig.clock.passed_ns = BEGIN_NS + 104 * MS
    rig.recorder.salvage()
    assert [line.global_step for line in rig.lines] == [0]
    assert (rig.clock.drained, rig.recorder.steps_lost) == (0, 1)


@pytest.mark.parametrize("end", ["finish", "salvage"])
def test_a_run_that_ends_in_its_window_writes_every_step(rig: Rig, end: str) -> None:
    rig.recorder.kernels = kernels = WindowKernels()
    rig.step(0)
    rig.clock.drain()
    rig.recorder.catch_up()
    assert rig.lines == []  # its kernels are not known
    getattr(rig.recorder, end)()
    assert [line.measured_by for line in rig.lines] == [msgspec.UNSET]
    assert kernels.problem == "the run ended in the window"
