"""The schedule, against torch.profiler's own and against tables; ranges round steps, as nsys and rocprofv3 see them."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from itertools import product
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerAction
from torch.profiler import schedule as torch_schedule

import aorta
from aorta.profiling.profiler_plan import Action, Schedule
from aorta.profiling.window_recording import StepMarkers

N, W, A, S = Action.NONE, Action.WARMUP, Action.ACTIVE, Action.ACTIVE_AND_SAVE
THEIRS = (ProfilerAction.NONE, ProfilerAction.WARMUP, ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
SAME = dict(zip(THEIRS, Action, strict=True))


# torch's own schedule warns about warmup=0; here it only serves as the answer.
@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup:UserWarning")
def test_it_is_torch_s_schedule():
    for wait, warmup, active, repeat, skip_first in product((0, 1, 2, 5), (0, 1, 3), (1, 2, 4), (0, 1, 3), (0, 2)):
        answer = torch_schedule(wait=wait, warmup=warmup, active=active, repeat=repeat, skip_first=skip_first)
        ours = Schedule(wait, warmup, active, repeat, skip_first)
        assert [ours(step) for step in range(41)] == [SAME[answer(step)] for step in range(41)], ours


@pytest.mark.parametrize(
    ("numbers", "cycle"), [((4, 1, 1), [N, N, W, S]), ((7, 2, 3), [N, N, W, W, A, A, S])], ids=["4", "7"]
)
@pytest.mark.spec("A2")
def test_a_period_is_the_whole_cycle(numbers, cycle):
    schedule = Schedule.periodic(*numbers)
    assert [schedule(step) for step in range(3 * len(cycle))] == cycle * 3


LEAST = "active must be at least 1, the others at least 0"


@pytest.mark.parametrize(
    ("make", "numbers", "said"),
    [
        (Schedule.periodic, (2, 2, 1), "period=2, warmup=2, active=1"),
        (Schedule.periodic, (3, 1, 0), "period=3, warmup=1, active=0"),
        (Schedule.periodic, (4, -1, 2), "period=4, warmup=-1, active=2"),
        (Schedule, (-1, 1, 1, 1), LEAST),
        (Schedule, (1, -1, 1, 1), LEAST),
        (Schedule, (1, 1, 0, 1), LEAST),
        (Schedule, (1, 1, 1, -1), LEAST),
    ],
)
@pytest.mark.spec("A3")
def test_bad_numbers_are_refused_when_it_is_made(make, numbers, said):
    with pytest.raises(ValueError, match=said):
        make(*numbers)


@pytest.mark.parametrize(
    ("numbers", "epoch"),
    [
        ((0, 0, 1, 4, 1), [W, A, A, A, S, N, N]),
        ((0, 0, 1, 4, 0), [W, A, A, A, S, W, S]),
        ((0, 0, 1, 4, 0), [W, A, A, A, S, N]),  # a warm-up that the epoch ends before anything is kept is left out
        ((2, 1, 1, 2, 2), [N, N, N, W, A, S, N, W, S]),
        ((1, 0, 0, 3, 0), [N, A, A, S, A, A, S, S]),
    ],
)
@pytest.mark.spec("E7")
def test_counted_in_every_epoch_whose_last_step_saves(numbers, epoch):
    skip_first, wait, warmup, active, repeat = numbers
    schedule = Schedule(wait, warmup, active, repeat, skip_first, steps_per_epoch=len(epoch))
    assert [schedule(step) for step in range(3 * len(epoch))] == epoch * 3


@pytest.mark.spec("E7")
def test_after_a_resume_skip_first_counts_from_there():
    schedule = Schedule(0, 1, 1, 1, skip_first=1, steps_per_epoch=8, resumed_at=11)  # batch 3 of epoch 1
    assert [schedule(step) for step in range(11, 20)] == [N, W, S, N, N, N, W, S, N]


@pytest.mark.spec("A12")
def test_a_resume_changes_no_window():
    whole = Schedule(1, 1, 2, 0, 3)
    for start in range(13):
        resumed = Schedule(1, 1, 2, 0, 3, resumed_at=start)
        assert [whole(step) for step in range(start, 30)] == [resumed(step) for step in range(start, 30)]


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


@pytest.mark.parametrize(
    ("asked", "environment", "on"),
    [(None, NSYS, True), (None, ROCPROF, True), (True, {}, True), (None, {}, False), (False, NSYS, False)],
)
@pytest.mark.spec("D28")
def test_steps_are_marked_when_a_tool_is_there_or_when_asked(told, asked, environment, on):
    markers = StepMarkers(asked, environment)
    for step in (4, 5):
        with markers.iteration(step):
            assert told[-1:] == [f"iteration#{step}"] * on
    assert told == ["iteration#4", "pop", "iteration#5", "pop"] * on
    # torch's own stub raises when it is called; a context of the standard library cannot call it.
    assert (type(markers.iteration(0)) is nullcontext) is not on


@pytest.mark.spec("D28")
def test_a_step_that_fails_ends_its_range(told):
    with pytest.raises(ZeroDivisionError), StepMarkers(True, {}).iteration(0):
        raise ZeroDivisionError
    assert told == ["iteration#0", "pop"]


@pytest.mark.spec("D28")
def test_a_torch_without_nvtx_says_so_and_trains_on(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda.nvtx, "mark", Mock(side_effect=RuntimeError("NVTX functions not installed")))
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
