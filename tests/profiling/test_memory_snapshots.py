"""Memory snapshots of a loop, with a stand-in for the allocator that a device would have."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import aorta
from aorta.config.schema import Profiling
from aorta.distributed import cuda
from aorta.errors import ConfigError
from aorta.profiling import trace_saver, window_recording
from aorta.profiling.profiler_plan import ProfilerPlan, TracePlace, coordinate_of
from aorta.profiling.window_recording import MemoryHistory
from tests.profiling.windows import FLAGS, files_below, listening, loop, preset

ROOM = 100
BY_BATCH = {**FLAGS, "memory_filename": "m{batch}.html"}


class Allocator:
    """What CUDA's caching allocator does, as far as snapshots see it: room, a history, observers of its failures."""

    def __init__(self) -> None:
        self.live: list[int] = []
        self.history: list[tuple[str, int]] | None = None
        self.switched: list[str | None] = []
        self.observers: list[Callable[..., object]] = []
        self.broken = False

    def allocate(self, size: int) -> None:
        if sum(self.live) + size > ROOM:
            if self.history is not None:
                self.history.append(("oom", size))
            for observer in self.observers:
                observer(0, size, ROOM, ROOM - sum(self.live))
            raise torch.OutOfMemoryError(f"tried to allocate {size}")
        self.live.append(size)
        if self.history is not None:
            self.history.append(("alloc", size))

    def record(self, enabled: str | None = "all", max_entries: int = 0) -> None:
        self.history = None if enabled is None else []
        self.switched.append(enabled)

    def dump(self, path: str) -> None:
        Path(path).write_bytes(pickle.dumps({"live": self.live, "history": self.history}))
        if self.broken:
            raise OSError(28, "No space left on device", path)


@pytest.fixture
def device(monkeypatch):
    allocator = Allocator()
    monkeypatch.setattr(cuda, "has_memory_history", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", allocator.record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", allocator.dump)
    monkeypatch.setattr(torch._C, "_cuda_attachOutOfMemoryObserver", allocator.observers.append, raising=False)
    monkeypatch.setattr(cuda, "_observers", [])
    monkeypatch.setattr(cuda, "_called", [])
    return allocator


def trained(folder: Path, allocator: Allocator, sizes: list[int], **settings) -> aorta.Profiler:
    with aorta.Profiler(folder, 4, 1, 1, None, with_stack=False, **settings) as profiler:
        for size in sizes:
            allocator.allocate(size)
            profiler.step()
    return profiler


def content(path: Path) -> dict:
    return pickle.loads(path.read_bytes())


def test_where_memory_runs_out_there_is_a_snapshot_of_that_moment(device, tmp_path):
    with listening() as said, pytest.raises(torch.OutOfMemoryError):
        trained(tmp_path, device, [40, 40, 40], oom_snapshot=True)
    (name,) = files_below(tmp_path / "memory_snapshots")
    assert name == "oom-rank-0.snapshot.pickle"
    history = [("alloc", 40), ("alloc", 40), ("oom", 40)]
    path = tmp_path / "memory_snapshots" / name
    assert content(path) == {"live": [40, 40], "history": history}
    assert (
        sum(f"out of memory; the allocations, with the lines that made them, are in {path}" in line for line in said)
        == 1
    )
    assert device.history is None  # nothing is recorded any more


def test_it_is_written_once_a_loop_and_of_each_loop(device, tmp_path):
    for _ in range(2):
        device.live.clear()
        with aorta.Profiler(tmp_path, 4, 1, 1, None, with_stack=False, oom_snapshot=True) as profiler:
            for _ in range(3):
                with pytest.raises(torch.OutOfMemoryError):
                    device.allocate(ROOM + 1)
                profiler.step()
    with pytest.raises(torch.OutOfMemoryError):
        device.allocate(ROOM + 1)  # behind the loops
    assert len(device.observers) == 1  # torch can detach none
    assert files_below(tmp_path / "memory_snapshots") == ["oom-rank-0-2.snapshot.pickle", "oom-rank-0.snapshot.pickle"]


def test_it_is_not_recorded_unless_asked(device, tmp_path):
    with pytest.raises(torch.OutOfMemoryError):
        trained(tmp_path, device, [40, 40, 40])
    assert device.observers == []
    assert not (tmp_path / "memory_snapshots").exists()


def test_windows_do_not_end_the_history_of_the_loop(device, tmp_path, monkeypatch):
    settings = preset("d9d", period=2, warmup=0, active=1, compression="none", oom_snapshot=True, **BY_BATCH)
    step, sizes = torch.ones, iter([10, 20, 30, 60])

    def allocated(*shape: int) -> torch.Tensor:
        if size := next(sizes, 0):
            device.allocate(size)
        return step(*shape)

    monkeypatch.setattr(torch, "ones", allocated)
    with pytest.raises(torch.OutOfMemoryError):
        loop(tmp_path, settings, 6)
    (name,) = files_below(tmp_path / "memory_snapshots")
    whole = [("alloc", 10), ("alloc", 20), ("alloc", 30), ("oom", 60)]
    assert content(tmp_path / "memory_snapshots" / name)["history"] == whole


@pytest.mark.spec("E18")
def test_a_window_has_the_history_of_its_own(device, tmp_path):
    history = MemoryHistory(True, False, Path)
    history.start()
    device.allocate(5)
    history.dump(tmp_path / "snap" / "m.snapshot.pickle")
    assert content(tmp_path / "snap" / "m.snapshot.pickle") == {"live": [5], "history": [("alloc", 5)]}
    assert not history.running
    assert device.switched == ["all", None]


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.spec("E18")
def test_a_snapshot_that_cannot_be_written_costs_neither_the_trace_nor_the_next_window(
    device, tmp_path, monkeypatch, fails
):
    breaks = iter([fails, False])

    def dump(path):
        device.broken = next(breaks)
        device.dump(path)

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    settings = preset("composer", wait=0, warmup=0, active=1, repeat=2, folder=None, **FLAGS, memory_filename="m.html")
    with listening() as said:
        profiler = loop(tmp_path, settings, 4)
    names = files_below(tmp_path)
    assert [name for name in names if "trace.json" in name] == ["rank0.1.pt.trace.json", "rank0.2.pt.trace.json"]
    # Two windows, one name: the second stands beside the first, as the pages do.
    snapshots = ["m.snapshot.pickle"] if fails else ["m.snapshot.pickle", "m-2.snapshot.pickle"]
    assert [name for name in names if "snapshot" in name] == sorted(snapshots)
    assert sum("memory snapshot" in text for text in said) == fails
    files = [file for saved in profiler.saver.windows for file in saved.files]
    assert [file.path.name for file in files if file.kind == "snapshot"] == snapshots
    assert device.history is None


@pytest.mark.spec("E18")
def test_a_profiler_that_breaks_records_no_allocations_any_more(device, tmp_path, monkeypatch):
    def fail(_):
        raise RuntimeError("Kineto has had enough")

    monkeypatch.setattr(window_recording.profile, "step", fail)
    loop(tmp_path, preset("composer", wait=0, warmup=0, active=2, folder=None, **FLAGS, memory_filename="m.html"), 4)
    assert device.switched == ["all", None]


def test_where_the_trace_of_its_window_is_lost_a_snapshot_is_still_there(device, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace_saver, "export", fail)
    device.allocate(10)
    settings = preset("d9d", period=2, warmup=0, active=1, compression="none", **BY_BATCH)
    saved = {file.kind: file for window in loop(tmp_path, settings, 2).saver.windows for file in window.files}
    assert "No space left on device" in (saved["trace"].error or "")
    assert saved["snapshot"].error is None
    assert saved["snapshot"].on_disk
    assert content(saved["snapshot"].path)["live"] == [10]


def test_a_loop_asks_for_one_under_a_tag(device, tmp_path):
    with aorta.Profiler(tmp_path, 4, 1, 1, None, with_stack=False) as profiler:
        device.allocate(7)
        path = profiler.memory_snapshot("after-warmup")
        with pytest.raises(ConfigError, match=r"memory_snapshot\('a/b'\): a tag is letters"):
            profiler.memory_snapshot("a/b")
    assert path == tmp_path / "memory_snapshots" / "after-warmup-rank-0.snapshot.pickle"
    assert content(path) == {"live": [7], "history": None}


def test_a_snapshot_that_cannot_be_written_leaves_nothing_and_the_loop_its_own_error(device, tmp_path):
    device.broken = True
    with listening() as said, pytest.raises(torch.OutOfMemoryError):
        trained(tmp_path, device, [ROOM + 1], oom_snapshot=True)
    assert files_below(tmp_path / "memory_snapshots") == []
    assert sum("No space left on device" in line and "make room" in line for line in said) == 1


def test_without_a_device_it_says_so_and_trains(tmp_path):
    if cuda.has_memory_history():
        pytest.skip("this machine has a device")
    with listening() as said:
        profiler = trained(tmp_path, Allocator(), [1] * 4, oom_snapshot=True)
        assert profiler.memory_snapshot("now") is None
    assert sum("profiling.oom_snapshot: not available here" in line for line in said) == 1
    assert sum("memory snapshots: not available here" in line for line in said) == 1
    assert files_below(tmp_path) == ["step_4/trace.tar.gz"]


@pytest.mark.parametrize(
    ("rank", "shape", "names", "name"),
    [
        (3, (2, 2), ("dp", "tp"), "oom-rank-3-dp1-tp1.snapshot.pickle"),
        (2, (2, 2), (), "oom-rank-2-coord-1-0.snapshot.pickle"),
        (1, (), (), "oom-rank-1-coord-1.snapshot.pickle"),
    ],
)
def test_names_have_tag_rank_and_mesh(rank, shape, names, name):
    world = 4
    place = TracePlace("run", rank, world_size=world, coordinate=coordinate_of(rank, shape, world), dimensions=names)
    assert ProfilerPlan(Profiling(), place, Path()).tagged_snapshot("oom").name == name
