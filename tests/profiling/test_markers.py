"""Ranges round steps, as nsys and rocprofv3 see them: a stand-in for NVTX writes down what it is told (D19, D28)."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import aorta
from aorta.profiling.window_recording import StepMarkers

NSYS = {"NSYS_PROFILING_SESSION_ID": "4711"}
ROCPROF = {"ROCP_TOOL_LIBRARIES": "/opt/rocm/lib/rocprofiler-sdk/librocprofiler-sdk-tool.so"}


@pytest.fixture
def told(monkeypatch):
    """What NVTX was told, in order."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "mark", lambda _: None)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    return calls


@pytest.mark.parametrize("environment", [NSYS, ROCPROF])
@pytest.mark.spec("D28")
def test_steps_are_marked_when_a_tool_is_there(told, environment):
    markers = StepMarkers(None, environment)
    for step in (4, 5):
        with markers.iteration(step):
            assert told[-1] == f"iteration#{step}"
    assert told == ["iteration#4", "pop", "iteration#5", "pop"]


@pytest.mark.parametrize(("asked", "environment", "on"), [(None, {}, False), (False, NSYS, False), (True, {}, True)])
@pytest.mark.spec("D28")
def test_otherwise_only_when_asked(told, asked, environment, on):
    markers = StepMarkers(asked, environment)
    with markers.iteration(0):
        pass
    assert bool(told) is on


@pytest.mark.spec("D28")
def test_without_a_tool_nothing_at_all_is_called():
    # torch's own stub raises when it is called; a context of the standard library cannot call it.
    assert type(StepMarkers(None, {}).iteration(0)) is nullcontext


@pytest.mark.spec("D28")
def test_a_step_that_fails_ends_its_range(told):
    with pytest.raises(ZeroDivisionError), StepMarkers(True, {}).iteration(0):
        raise ZeroDivisionError
    assert told == ["iteration#0", "pop"]


@pytest.mark.spec("D28")
def test_a_torch_without_nvtx_says_so_and_trains_on(monkeypatch, caplog):
    def fail(_: str) -> None:
        raise RuntimeError("NVTX functions not installed")

    monkeypatch.setattr(torch.cuda.nvtx, "mark", fail)
    with caplog.at_level(logging.WARNING):
        markers = StepMarkers(True, {})
    with markers.iteration(0):
        pass
    assert "profiling.nvtx=true: this torch" in caplog.text


@pytest.mark.spec("D28")
def test_a_loop_of_ones_own_is_marked_too(told, monkeypatch, tmp_path):
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "4711")
    with aorta.record(tmp_path / "run", model=nn.Linear(2, 2), start_step=7) as recording:
        recording.step()
        recording.restart()
        recording.step()
    assert told == ["iteration#7", "pop", "iteration#8", "pop", "iteration#8", "pop", "iteration#9", "pop"]
