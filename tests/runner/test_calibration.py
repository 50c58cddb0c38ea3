"""Which steps of a run are measured by kernels as well, and what stands in the header where none are."""

from __future__ import annotations

import pytest
import torch

from aorta.config.groups.loop import CALIBRATION_STEPS, calibration_steps
from aorta.errors import ConfigError
from aorta.profiling.schedule import Action, Schedule
from aorta.records.schema import CalibrationPlan
from aorta.runner.calibration import calibration_plan

DEVICE, CPU = torch.device("cuda", 0), torch.device("cpu")


def plan(setting: str = "auto", device: torch.device = DEVICE, **more) -> CalibrationPlan | None:
    asked = {"mode": "observe", "start_step": 0, "warmup_steps": 5, "environment": {}} | more
    return calibration_plan(setting, device, **asked)


def test_on_a_device_a_few_steps_behind_the_warm_up():
    assert plan() == CalibrationPlan("auto", 5, CALIBRATION_STEPS)
    assert plan("7", start_step=100) == CalibrationPlan("7", 105, 7)
    # The profiler is started a step before: without a warm-up the first step cannot be measured.
    assert plan(warmup_steps=0) == CalibrationPlan("auto", 1, CALIBRATION_STEPS)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"setting": "off"}, None),
        ({"mode": "off"}, "instrument.mode=off: nothing is measured"),
        ({"stop": 5}, "the run is too short"),
        ({"environment": {"NSYS_PROFILING_SESSION_ID": "1"}}, "nsys profiles this program"),
        ({"environment": {"ROCP_TOOL_LIBRARIES": "librocprofiler-sdk-tool.so"}}, "rocprofv3 profiles this program"),
        ({"profiled": lambda _step: True}, "the windows of profiling leave no 4 steps in a row"),
        ({"setting": "2", "device": CPU}, "a CPU has no kernels"),
    ],
)
def test_none(changes, problem):
    found = plan(**changes)
    assert found is not None
    assert (found.steps, found.problem) == (0, problem)


@pytest.mark.parametrize("setting", ["auto", "off"])
def test_nothing_is_said_of_a_cpu(setting):
    assert plan(setting, CPU) is None


def test_a_short_run_has_a_short_window():
    assert plan(stop=7) == CalibrationPlan("auto", 5, 2)


def test_the_window_lies_between_those_of_the_profiler():
    schedule = Schedule(wait=6, warmup=1, active=2, repeat=0)
    on = [step for step in range(30) if schedule(step) is not Action.NONE]
    found = plan(profiled=lambda step: schedule(step) is not Action.NONE)
    assert found is not None
    assert not set(range(found.first_step - 1, found.first_step + found.steps)) & set(on)
    assert found.first_step == 10


@pytest.mark.parametrize("setting", ["", "on", "0", "-1", "2.5", "101", "³"])
def test_other_settings_are_refused(setting):
    with pytest.raises(ConfigError, match="must be auto, off, or a number of steps from 1 to 100"):
        calibration_steps(setting, on_device=True)
