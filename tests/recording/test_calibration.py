"""Which steps of a run are measured by kernels as well, what is done there, and what the record says where none are."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerAction

from aorta.config.loop import CALIBRATION_STEPS
from aorta.profiling.profiler_plan import Schedule
from aorta.profiling.sessions import ProfilerUnavailable
from aorta.recording import calibration
from aorta.recording.calibration import Calibrator, calibration_plan
from aorta.records.schema import BlockKernels, Calibration, CalibrationPlan
from aorta.records.window_kernels import MeasuredTwice, WindowKernels
from aorta.timeline.classes import DeviceKernel
from tests.analysis.builders import step

DEVICE, CPU = torch.device("cuda", 0), torch.device("cpu")


def plan(setting: str = "auto", device: torch.device = DEVICE, **more) -> CalibrationPlan | None:
    asked = {"mode": "observe", "start_step": 0, "warmup_steps": 5, "environment": {}} | more
    return calibration_plan(setting, device, **asked)


def test_on_a_device_a_few_steps_behind_the_warm_up():
    assert plan() == CalibrationPlan("auto", 5, CALIBRATION_STEPS)
    assert plan("7", start_step=100) == CalibrationPlan("7", 105, 7)
    assert plan(stop=7) == CalibrationPlan("auto", 5, 2)  # of a short run
    # The profiler is started a step before: without a warm-up the first step cannot be measured.
    assert plan(warmup_steps=0) == CalibrationPlan("auto", 1, CALIBRATION_STEPS)
    assert plan("auto", CPU) is plan("off", CPU) is None
    # Steps 4 and 5 are free, and 6 is the profiler's: the window would end in it.
    schedule = Schedule(wait=6, warmup=1, active=2, repeat=0)
    for setting, steps in (("auto", CALIBRATION_STEPS), ("2", 2)):
        found = plan(setting, profiled=lambda step: schedule(step) is not ProfilerAction.NONE)
        assert found == CalibrationPlan(setting, 10, steps)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"setting": "off"}, None),
        ({"mode": "off"}, "instrument.mode=off: nothing is measured"),
        ({"stop": 5}, "the run is too short"),
        ({"environment": {"NSYS_PROFILING_SESSION_ID": "1"}}, "nsys profiles this program"),
        ({"profiled": lambda _step: True}, "profiling windows leave no 4 consecutive steps"),
        ({"setting": "2", "device": CPU}, "a CPU has no kernels"),
    ],
)
def test_none(changes, problem):
    found = plan(**changes)
    assert (found.steps, found.problem) == (0, problem)


# The window itself


class Recording:
    """In the place of a profiler: what is done with it, and in which step. `fails`: what cannot be done."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []
        self.number, self.seconds, self.fails = -1, 0.0, ""

    def start(self) -> None:
        self._do("start", 2)

    def stop(self) -> list[DeviceKernel]:
        self._do("stop", 3)
        return []

    def abandon(self) -> None:
        self._do("abandon", 0)

    def _do(self, what: str, seconds: float) -> None:
        self.seconds += seconds
        if what == self.fails:
            raise ProfilerUnavailable(f"{what} failed")
        self.done.append((what, self.number))


class Window:
    """A run of ten steps: 3, 4 and 5 are measured by kernels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, plan: CalibrationPlan | None) -> None:
        self.lines: list[tuple[int, Calibration]] = []
        self.kernels: list[WindowKernels | None] = []
        self.captured: set[int] = set()
        self.recording = Recording()
        self.done = self.recording.done
        self.recorder = SimpleNamespace(kernels=None)
        monkeypatch.setattr(calibration, "KernelRecording", lambda _device: self.recording)
        monkeypatch.setattr(calibration, "is_capturing", lambda: self.recording.number in self.captured)
        monkeypatch.setattr(calibration, "time", SimpleNamespace(monotonic=lambda: self.recording.seconds))
        self.calibrator = Calibrator(plan, DEVICE, lambda line: self.lines.append((self.recording.number, line)))
        self.calibrator.attach(self.recorder)

    def train(self, numbers: Iterable[int]) -> None:
        """Each step is one of the window's kernels' where the recorder says so."""
        for number in numbers:
            self.recording.number = number
            self.calibrator.before(number)
            self.kernels.append(self.recorder.kernels)
            self.calibrator.after(number)

    def measured(self, steps: int = 3) -> WindowKernels:
        """What the window has when its steps are read."""
        (kernels,) = {id(one): one for one in self.kernels if one is not None}.values()
        blocks = {("a", "forward"): (2_000_000, 500_000), ("b", "forward"): (0, 0)}
        kernels.compared = MeasuredTwice(steps, 100, 40, 60.0, 20.0, blocks)
        return kernels

    def write(self, numbers: Iterable[int], longer_ms: float = 0.0, **changes: Any) -> None:
        """Steps are written: their lengths tell which of them counted."""
        lengths = dict(zip(range(3, 10), (30.0, 50.0, 31.0, 10.0, 90.0, 20.0, 1.0), strict=True))
        for number in numbers:
            self.recording.number = number
            self.calibrator.take(
                step(0, 1, number, overlap={"window_ms": lengths.get(number, 500.0) + longer_ms}, **changes)
            )


PLAN = CalibrationPlan("3", 3, 3)


@pytest.fixture
def window(monkeypatch):
    return Window(monkeypatch, PLAN)


def test_as_many_steps_behind_the_window_are_written_and_then_its_line(window):
    window.train(range(10))
    assert [kernels is not None for kernels in window.kernels] == [3 <= number <= 5 for number in range(10)]
    window.measured()
    window.write(range(10), longer_ms=7.0, phase="compute_only")
    window.write(range(10))
    window.calibrator.finish()
    ((step, line),) = window.lines
    blocks = [BlockKernels("a", "forward", 2.0, 0.25), BlockKernels("b", "forward", 0.0, None)]
    assert (step, line) == (8, Calibration(3, 5, 3, None, 0.4, 0.75, blocks, 31.0, 20.0, 5_000.0))
    assert window.done == [("start", 2), ("stop", 5), ("abandon", 8)]


MISSING = "the other steps could not be observed, or the run ended before them"
UNSEEN = "the profiler saw no kernel inside the blocks of a step"


@pytest.mark.parametrize(("steps", "met", "problem"), [(0, None, MISSING), (2, None, MISSING), (2, UNSEEN, UNSEEN)])
def test_steps_that_are_missing_are_a_problem(window, steps, met, problem):
    """Also those that marks alone measured; a window without communication has no ratio."""
    window.train(range(6))
    kernels = window.measured(steps)
    kernels.compared = MeasuredTwice(steps)
    if met is not None:
        kernels.problem = met
    window.calibrator.finish()
    ((_, line),) = window.lines
    assert (line.steps, line.problem, kernels.known) == (steps, problem, True)
    assert line.window_step_ms is line.other_step_ms is line.ratio_by_kernels is line.ratio_by_marks is None


@pytest.mark.parametrize(("fails", "setup_ms"), [("start", 2_000.0), ("stop", 5_000.0)])
def test_a_profiler_that_cannot_be_had_is_a_sentence_of_the_line(window, fails, setup_ms):
    window.recording.fails = fails
    window.train(range(10))
    window.calibrator.finish()
    ((_, line),) = window.lines
    assert (line.steps, line.problem, line.ratio_by_kernels, line.blocks) == (0, f"{fails} failed", None, [])
    assert line.setup_ms == setup_ms


def test_nothing_is_started_or_stopped_while_a_graph_is_captured(window, monkeypatch):
    window.captured = {2}
    window.train(range(10))
    window.calibrator.finish()
    assert window.done == [("abandon", 9)]
    assert window.lines[0][1].problem == "a CUDA graph was being captured"
    other = Window(monkeypatch, PLAN)
    other.captured = {5, 6}
    other.train(range(10))
    assert other.done == [("start", 2), ("stop", 7)]
    assert [kernels is not None for kernels in other.kernels] == [3 <= number <= 5 for number in range(10)]


def test_a_run_that_ends_in_its_window_stops_the_profiler_and_before_it_has_no_line(window, monkeypatch):
    window.train(range(5))
    window.calibrator.close()
    window.calibrator.close()
    assert (window.done, window.recorder.kernels) == ([("start", 2), ("stop", 4)], None)
    other = Window(monkeypatch, PLAN)
    other.train(range(2))
    other.calibrator.finish()
    assert (other.done, other.lines) == ([("abandon", 1)], [])


@pytest.mark.parametrize("plan", [None, CalibrationPlan("off", 3, 0)])
def test_without_a_window_nothing_is_done(monkeypatch, plan):
    window = Window(monkeypatch, plan)
    window.train(range(10))
    window.write(range(10))
    window.calibrator.close()
    window.calibrator.finish()
    assert (window.done, window.lines) == ([], [])
