"""Memory snapshots of windows, with a stand-in for the allocator that a device would have."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from aorta.distributed import cuda
from aorta.profiling import trace_saver, window_recording
from aorta.profiling.window_recording import MemoryHistory
from tests.profiling.windows import FLAGS, files_below, listening, loop, preset

BY_BATCH = {**FLAGS, "memory_filename": "m{batch}.html"}


class Allocator:
    """What CUDA's caching allocator does, as far as snapshots see it: a history, and a dump of it."""

    def __init__(self) -> None:
        self.live: list[int] = []
        self.history: list[tuple[str, int]] | None = None
        self.switched: list[str | None] = []
        self.broken = False

    def allocate(self, size: int) -> None:
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
    return allocator


def content(path: Path) -> dict:
    return pickle.loads(path.read_bytes())


@pytest.mark.spec("E18")
def test_a_window_has_the_history_of_its_own(device, tmp_path):
    history = MemoryHistory(True)
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
