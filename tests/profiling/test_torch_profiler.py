"""The schedule, against torch.profiler's own and against tables; ranges round steps, as nsys and rocprofv3 see them.

Profiler windows over a small loop: which files, with which steps inside, where kernels are on the record's clock, and
never a failed run.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerAction
from torch.profiler import schedule as torch_schedule

import aorta
from aorta.profiling import window_recording
from aorta.profiling.profiler_plan import ProfilerPlan, Schedule
from aorta.profiling.sessions import KernelRecording
from aorta.profiling.window_recording import NullProfiler, StepMarkers, open_profiler
from tests.profiling.windows import FLAGS, HERE, files_below, loop, preset, read, steps_in
from tests.simulated.kineto import DeviceEvent

N, W, A, S = (ProfilerAction.NONE, ProfilerAction.WARMUP, ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


# torch's own schedule warns about warmup=0; here it only serves as the answer.
@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup:UserWarning")
def test_it_is_torch_s_schedule():
    for wait, warmup, active, repeat, skip_first in product((0, 1, 2, 5), (0, 1, 3), (1, 2, 4), (0, 1, 3), (0, 2)):
        answer = torch_schedule(wait=wait, warmup=warmup, active=active, repeat=repeat, skip_first=skip_first)
        ours = Schedule(wait, warmup, active, repeat, skip_first)
        assert [ours(step) for step in range(41)] == [answer(step) for step in range(41)], ours


def periodic(period: int, warmup: int, active: int) -> Schedule:
    return ProfilerPlan(preset("d9d", period=period, warmup=warmup, active=active), HERE, Path()).schedule(0)


@pytest.mark.parametrize(
    ("numbers", "cycle"), [((4, 1, 1), [N, N, W, S]), ((7, 2, 3), [N, N, W, W, A, A, S])], ids=["4", "7"]
)
@pytest.mark.spec("A2")
def test_a_period_is_the_whole_cycle(numbers, cycle):
    schedule = periodic(*numbers)
    assert [schedule(step) for step in range(3 * len(cycle))] == cycle * 3


LEAST = "active must be at least 1, the others at least 0"


@pytest.mark.parametrize(
    ("make", "numbers", "said"),
    [
        (periodic, (2, 2, 1), "period=2, warmup=2, active=1"),
        (periodic, (3, 1, 0), "period=3, warmup=1, active=0"),
        (periodic, (4, -1, 2), "period=4, warmup=-1, active=2"),
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


# --- windows


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "torch_profiler" / "rank0"


@pytest.fixture
def run(folder):
    """A training loop of steps `first` to `stop`; gives the profiler."""
    return lambda stop, first=0, fail_in=None, **settings: loop(
        folder.parent, preset("aorta", **settings), stop, first, fail_in=fail_in
    )


@pytest.fixture
def said(caplog):
    """The messages logged so far, at a level."""
    caplog.set_level(logging.INFO)
    return lambda level: [record.getMessage() for record in caplog.records if record.levelname == level]


@pytest.mark.parametrize(
    ("settings", "stop", "windows"),
    [
        ({"repeat": 2}, 10, [[2, 3], [6, 7]]),
        ({"wait": 0, "warmup": 0, "active": 1, "repeat": 2}, 5, [[0], [1]]),
        # A run that ends inside a window keeps what there is of it ...
        ({"repeat": 2}, 7, [[2, 3], [6]]),
        # ... and one that ends right before a window does not keep an empty one.
        ({"repeat": 2}, 6, [[2, 3]]),
    ],
)
@pytest.mark.spec("D11", "D13")
def test_windows_are_exported_each_cycle(run, said, settings, stop, windows):
    files = run(stop, **settings).files
    assert [steps_in(path) for path in files] == windows
    events = read(files[0])["traceEvents"]  # with shapes and memory, unless told otherwise
    assert any("Input Dims" in event.get("args", {}) for event in events)
    assert any(event.get("name") == "[memory]" for event in events)
    assert said("WARNING") == said("ERROR") == []


@pytest.mark.parametrize("stop", [0, 2], ids=["no step", "in warm-up"])
@pytest.mark.spec("D11")
def test_a_run_that_ends_before_its_window_leaves_no_file_and_one_warning(run, folder, said, stop):
    assert run(stop).files == []
    assert not folder.exists()
    kept = f"no trace was kept: the {stop} steps from step 0 on include no active step"
    assert said("WARNING") == [f"profiling: {kept} (wait 1, warmup 1, active 2, repeat 1, counted from step 0)"]


@pytest.mark.parametrize(
    ("settings", "stop", "names"),
    [
        ({"active": 1}, 5, ["trace.json"]),
        ({"active": 1, "repeat": 2}, 8, ["trace_step3.json", "trace_step6.json"]),
        ({"repeat": 2}, 7, ["trace_step4.json", "trace_step7.json"]),
        ({"trace_filename": "my.own.json"}, 5, ["my_step4.own.json"]),
        ({"active": 1, "trace_filename": "small.json.gz"}, 5, ["small.json.gz"]),
        ({"tensorboard": False}, 5, ["trace_step4.json"]),
    ],
)
def test_names_of_chrome_traces(run, folder, settings, stop, names):
    window = run(stop, chrome_trace=True, **settings)
    assert sorted(window.files) == sorted(folder.iterdir())
    chrome = [path for path in window.files if ".pt." not in path.name]
    assert [path.name for path in chrome] == names
    assert len(window.files) == len(names) * (1 + settings.get("tensorboard", True))
    assert all(steps_in(path) for path in window.files)


PRESETS = ("aorta", "composer")


@pytest.mark.parametrize("option", PRESETS)
@pytest.mark.spec("D12")
def test_on_rocm_nothing_is_exported_under_any_name_and_one_warning_says_so(tmp_path, said, monkeypatch, option):
    monkeypatch.setattr(torch.version, "hip", "6.4.0")
    exports = []  # calls of Kineto's exporter, which every file of torch.profiler comes from
    monkeypatch.setattr(torch._C._autograd._ProfilerResult, "save", lambda _result, path: exports.append(path))
    cycle = {"period": None, "wait": 1, "warmup": 1, "active": 2, "repeat": 2, "folder": None}
    loop(tmp_path, preset(option, **cycle, **FLAGS, memory_filename="m.html"), 10)
    assert exports == files_below(tmp_path) == []
    (warning,) = said("WARNING")
    assert warning.startswith("profiling: no trace is written on ROCm, where exporting has crashed")
    assert "profiling.chrome_trace_force=true" in warning


@pytest.mark.spec("D12")
def test_on_rocm_it_can_be_forced(run, said, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4.0")
    window = run(10, chrome_trace=True, tensorboard=False, chrome_trace_force=True)
    assert [path.name for path in window.files] == ["trace_step4.json"]
    assert said("WARNING") == []


@pytest.mark.parametrize("option", PRESETS)
@pytest.mark.spec("A17", "E25")
def test_switched_off_it_does_nothing(tmp_path, said, option):
    assert isinstance(loop(tmp_path / "none", preset(option, enabled=False, folder=None), 10), NullProfiler)
    assert list(tmp_path.iterdir()) == said("WARNING") == []


fails = Mock(side_effect=RuntimeError("Kineto has had enough"))


@pytest.mark.parametrize(
    ("what", "method"), [("start", "__enter__"), ("step", "step"), ("stop", "__exit__")], ids=["start", "step", "stop"]
)
def test_a_profiler_that_raises_is_left_out_and_said_once(run, said, monkeypatch, what, method):
    monkeypatch.setattr(window_recording.profile, method, fails)
    assert run(10)._finished == 10
    error = f"profiling: torch.profiler failed to {what} and is left out from here on: Kineto has had enough"
    assert (said("ERROR"), said("WARNING")) == ([error], [])


def test_the_run_s_own_error_is_not_hidden_by_the_profiler_s(run, said, monkeypatch):
    monkeypatch.setattr(window_recording.profile, "__exit__", fails)
    with pytest.raises(ZeroDivisionError):
        run(10, fail_in=2)
    assert len(said("ERROR")) == 1


@pytest.mark.parametrize("on", [True, False])
def test_threads_that_began_before_the_profiler_are_in_it_where_asked(folder, on):
    plan = ProfilerPlan(preset("aorta", all_threads=on), HERE, folder)
    with ThreadPoolExecutor(1) as loader:  # as one that pins batches
        loader.submit(torch.ones(4).sin).result()
        with open_profiler(plan, 0) as window:
            for _ in range(5):
                torch.ones(8, 8) @ torch.ones(8, 8)
                loader.submit(torch.ones(4).sin).result()
                window.step()
    threads: dict[str, set[int]] = {}
    for event in read(window.files[0])["traceEvents"]:
        threads.setdefault(event.get("name"), set()).add(event.get("tid"))
    assert len(threads["aten::mm"]) == 1
    assert ("aten::sin" in threads) is on
    assert threads.get("aten::sin") != threads["aten::mm"]


@pytest.mark.parametrize("on", [True, False])
def test_a_torch_without_the_setting_of_all_threads_lacks_that_only(run, said, on, monkeypatch):
    monkeypatch.delattr(torch._C._profiler, "_ExperimentalConfig")
    assert len(run(5, all_threads=on).files) == (not on)
    why = "failed to start and is left out from here on: cannot import name '_ExperimentalConfig'"
    assert [why in error for error in said("ERROR")] == [True] * on


UNIX_NS, ASLEEP_NS = 1_800_000_000_000_000_000, 50_000_000


def test_a_thread_put_to_sleep_between_two_clocks_moves_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns, calls = 0, 0

    def clock(which: int) -> int:
        nonlocal now_ns, calls
        calls += 1
        now_ns += ASLEEP_NS if calls == 2 else 10
        return now_ns + (UNIX_NS if which == time.CLOCK_REALTIME else 0)

    monkeypatch.setattr(time, "clock_gettime_ns", clock)
    gemm = {"name": "gemm", "cat": "kernel", "pid": 0, "tid": 7}
    rows: list[Any] = [DeviceEvent(gemm, UNIX_NS + 1_000_000, UNIX_NS + 3_000_000)]  # on the clock of the record: 1 ms
    (found,) = KernelRecording(torch.device("cuda", 0))._kernels(rows)
    assert (found.name, found.stream, found.end_ns - found.start_ns) == ("gemm", 7, 2_000_000)
    assert found.start_ns == pytest.approx(1_000_000, abs=100)
