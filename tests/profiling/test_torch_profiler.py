"""Profiler windows over a small loop: which files, with which steps inside, where kernels are on the record's clock,
and never a failed run.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from aorta.profiling import window_recording
from aorta.profiling.kernel_recording import KernelRecording
from aorta.profiling.profiler_plan import ProfilerPlan
from aorta.profiling.window_recording import NullProfiler, open_profiler
from tests.profiling.windows import FLAGS, HERE, files_below, loop, preset, read, steps_in
from tests.simulated.kineto import DeviceEvent


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
