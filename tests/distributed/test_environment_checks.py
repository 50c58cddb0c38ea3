"""Each setting that changes a measurement is named with its value, what it does and what to do; others are not."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

from aorta.distributed.environment_checks import (
    EnvironmentWarning,
    cores,
    one_rank,
    python_timing_warning,
    refuse_two_tracers,
    setting_warnings,
    streams_used,
    too_many_ranks,
    tracer_present,
    untraced,
)
from aorta.errors import ConfigError
from aorta.recording.rank_process import run_rank
from tests.loop import resolved

CASES = json.loads(Path(__file__).with_suffix(".json").read_text())


@pytest.mark.parametrize(("platform", "environment", "streams", "sentence"), CASES["warned"])
def test_a_setting_that_changes_the_measurement_is_named(platform, environment, streams, sentence):
    ((warning, level),) = setting_warnings(environment, platform, {0: streams}, timing_events=False)
    assert re.fullmatch(sentence + ".*", warning)
    assert level == logging.WARNING


@pytest.mark.parametrize(("platform", "environment", "streams"), CASES["silent"])
def test_what_changes_nothing_is_not_complained_of(platform, environment, streams):
    assert setting_warnings(environment, platform, {0: streams}, timing_events=True) == []


def test_queues_of_rocm_are_those_of_one_priority_and_connections_of_cuda_those_of_all():
    used = {0: 4, -1: 5}
    (rocm,), (cuda,) = (setting_warnings({}, platform, used, timing_events=True) for platform in ("rocm", "cuda"))
    assert "up to 5 streams of priority -1;" in rocm.text
    assert "up to 9 streams;" in cuda.text
    assert setting_warnings({"GPU_MAX_HW_QUEUES": "5"}, "rocm", used, timing_events=True) == []


@pytest.mark.parametrize(
    ("looking", "priority", "used"),
    [
        (False, None, {0: 4, -1: 3}),  # compute, FSDP2's all-reduce, and the backend's for each of two groups
        (True, None, {0: 6, -1: 5}),  # AORTA's keep the priority of the stream a collective was issued on
        (True, -2, {0: 4, -1: 3, -2: 2}),
    ],
)
def test_streams_are_counted_for_every_group_and_priority(looking, priority, used):
    assert streams_used({-1: 3, 0: 1}, 2, looking=looking, priority=priority) == used


def test_one_hardware_queue_with_timing_events_is_an_error_of_its_own():
    one = {"CUDA_DEVICE_MAX_CONNECTIONS": " 1 "}
    warning, error = setting_warnings(one, "cuda", {0: 3}, timing_events=True)
    assert [warning] == setting_warnings(one, "cuda", {0: 3}, timing_events=False)
    assert error == EnvironmentWarning(error.text, logging.ERROR)
    assert "together with AORTA's timing events" in error.text
    assert "not that of a run without AORTA; unset it, or use instrument.mode=off" in error.text
    assert setting_warnings({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, "cuda", {0: 8}, timing_events=True) == []


@pytest.mark.parametrize(("devices", "started", "command"), CASES["one rank"])
def test_one_rank_names_the_command_with_all_devices(devices, started, command):
    text, level = one_rank(1, devices, started)
    assert (level, text.endswith(f"with the same arguments: {command}")) == (logging.WARNING, True)
    assert one_rank(2, devices, started) is None


def test_one_rank_of_a_machine_with_one_device_and_more_ranks_than_cores():
    assert one_rank(1, 1, ["train.py"]).text.endswith("or two CPU cores (training.device=cpu)")
    assert re.match(r"4 ranks on 2 cores: .* \(--nproc_per_node 2\)", too_many_ranks(4, 2, "cpu").text)
    assert too_many_ranks(2, 2, "cpu") is too_many_ranks(8, 2, "cuda") is None
    assert cores() >= 1


@pytest.mark.parametrize(("interceptor", "sentence"), CASES["timed from Python"])
def test_collectives_timed_from_python_are_told_with_the_cost_and_the_remedy(interceptor, sentence):
    warning = python_timing_warning(interceptor)
    assert (warning is None) == (sentence is None)
    if warning is not None:
        assert warning.level == logging.WARNING
        assert re.match(sentence, warning.text)


# --- tracers ----------------------------------------------------------------------------------------------------------


TOOL = "/opt/rocm/lib/rocprofiler-sdk/librocprofiler-sdk-tool.so"
ROCPROF = {"LD_PRELOAD": f"{TOOL}:/opt/rocm/lib/librocprofiler-sdk.so", "ROCP_TOOL_LIBRARIES": TOOL}
NSYS = {"NSYS_PROFILING_SESSION_ID": "4711", "CUDA_INJECTION64_PATH": "/opt/nsys/libToolsInjection64.so"}


@pytest.mark.parametrize(
    ("environment", "tracer"),
    [
        ({}, None),
        ({"LD_PRELOAD": "libjemalloc.so"}, None),
        ({"NSYS_PROFILING_SESSION_ID": ""}, None),
        (ROCPROF, "rocprofv3"),
        ({"LD_PRELOAD": TOOL}, "rocprofv3"),
        (NSYS, "nsys"),
    ],
)
@pytest.mark.spec("D28")
def test_a_tracer_is_known_by_its_environment(environment, tracer):
    assert tracer_present(environment) == tracer


@pytest.mark.parametrize(("environment", "name"), [(ROCPROF, "rocprofv3"), (NSYS, "nsys")])
@pytest.mark.spec("D28")
def test_torch_profiler_beside_a_tracer_is_refused(environment, name):
    refuse_two_tracers(False, environment)
    refuse_two_tracers(True, {})
    with pytest.raises(ConfigError, match=f"traced by {name}.*profiling.enabled=false"):
        refuse_two_tracers(True, environment)


@pytest.mark.spec("D28")
def test_every_rank_refuses_before_it_does_anything(monkeypatch):
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "4711")
    with pytest.raises(ConfigError, match="traced by nsys"):
        run_rank(resolved("profiling.enabled=true"), lambda *_: None, leave_together=True)


@pytest.mark.parametrize(
    ("traced", "left"),
    [({"LD_PRELOAD": "x.so"}, {"LD_PRELOAD": "x.so"}), (ROCPROF, {}), (NSYS, {"NSYS_PROFILING_SESSION_ID": "4711"})],
)
def test_helper_programs_are_not_traced_along(traced, left):
    assert untraced(traced | {"PATH": "/bin"}) == left | {"PATH": "/bin"}
