"""The page of a trace whose allocations are known."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from aorta.distributed import cuda
from aorta.profiling import memory_history, window_recording
from aorta.profiling.memory_timeline import main, page, timelines
from aorta.profiling.trace_names import TraceWindow
from aorta.profiling.trace_saver import Job, SavedFile, Saver
from tests.profiling.windows import files_below, listening, loop, preset


def memory(ts, gained, address, allocated, **more):
    args = {"Bytes": gained, "Addr": address, "Total Allocated": allocated, "Total Reserved": 0} | {
        "Device Type": 0,
        "Device Id": -1,
    }
    return {"ph": "i", "name": "[memory]", "ts": ts, "pid": 1, "tid": 1, "args": args | more}


def span(category, name, ts, dur, **args):
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 1, "args": args}


KNOWN = {
    "traceEvents": [
        span("cpu_op", "aten::mm", 0, 100, **{"Input Dims": [[4, 8]]}),
        span("cpu_op", "aten::empty", 10, 5),
        span("python_function", "model.py(7): forward", 0, 200),
        memory(12, 1024, 0xA, 5000),
        memory(20, 2048, 0xB, 7048),
        memory(30, -1024, 0xA, 6024),
        memory(40, 4096, 0xC, 10120),
        memory(50, 100, 0xD, 9000),
        memory(60, 10 << 20, 0xE, 10 << 20, **{"Device Type": 1, "Device Id": 3, "Total Reserved": 20 << 20}),
    ]
}


@pytest.mark.spec("E19")
def test_peak_and_what_was_alive_then():
    cpu, gpu = timelines(KNOWN)
    assert (cpu.device, cpu.peak.allocated, cpu.peak.ts_us) == ("CPU", 10120, 40)
    # 0xA was given back before, 0xD came after.
    assert [(one.bytes, one.operator) for one in cpu.live] == [(4096, "aten::mm"), (2048, "aten::mm")]
    assert cpu.live_bytes == 4096 + 2048
    assert (cpu.live[0].shapes, cpu.live[0].line) == ("[[4, 8]]", "model.py(7): forward")
    assert (gpu.device, gpu.peak.bytes) == ("GPU 3", 10 << 20)


@pytest.mark.spec("E19")
def test_the_innermost_operator_is_named():
    events = [*KNOWN["traceEvents"][:4]]
    ((one,),) = [timeline.live for timeline in timelines({"traceEvents": events})]
    assert one.operator == "aten::empty"


@pytest.mark.spec("E17", "E19")
def test_the_page_stands_alone_and_names_the_highest_values(tmp_path):
    source, target = tmp_path / "trace.json", tmp_path / "memory.html"
    source.write_text(json.dumps(KNOWN))
    assert main([str(source), str(target)]) == 0
    text = target.read_text()
    assert (
        "CPU: max allocated 9.88 KiB, max reserved 0 B; GPU 3: max allocated 10.00 MiB, max reserved 20.00 MiB" in text
    )
    assert not re.search(r"http|//[a-z]|<script|<link|src=|url\(", text)
    assert text.count("<svg") == text.count("</svg>") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["memory.html", "trace.json"]


@pytest.mark.spec("E19")
def test_names_in_a_trace_are_text_on_the_page():
    trace = {"traceEvents": [span("cpu_op", "<b>x</b>", 0, 9), memory(1, 8, 1, 8)]}
    assert "&lt;b&gt;x&lt;/b&gt;" in page(trace, "<title>")
    assert "<b>" not in page(trace, "<title>")


@pytest.mark.spec("E19")
def test_a_trace_without_allocations_says_so():
    assert "The trace holds no <code>[memory]</code> events" in page({"traceEvents": []}, "empty")


@pytest.mark.spec("E19")
def test_a_long_curve_keeps_its_peak():
    events = [memory(t, 1, t, 50 if t != 7777 else 999) for t in range(10_000)]
    text = page({"traceEvents": events}, "long")
    top = min(float(y) for y in re.findall(r",(\d+\.\d+)", text[text.index("<polyline") :]))
    assert top == pytest.approx(260 - 260 * 0.92, abs=0.01)


@pytest.fixture
def device(monkeypatch, tmp_path):
    """A build with a device, as far as the allocator's history is concerned."""
    calls = []
    monkeypatch.setattr(cuda, "has_memory_history", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **words: calls.append(words))

    def dump(path):
        calls.append(path)
        (tmp_path / "snap").mkdir(exist_ok=True)
        with open(path, "wb") as file:  # noqa: PTH123
            file.write(b"pickle")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    return calls


@pytest.mark.spec("E18")
def test_the_allocator_s_history_is_dumped_on_a_device(device, tmp_path):
    history = memory_history.MemoryHistory(True, False, Path)
    history.start()
    assert history.running
    history.dump(tmp_path / "snap" / "m.snapshot.pickle")
    assert (tmp_path / "snap" / "m.snapshot.pickle").read_bytes() == b"pickle"
    assert not history.running
    assert device == [
        {"max_entries": memory_history.MAX_ENTRIES},
        str(tmp_path / "snap" / "m.snapshot.pickle.part"),
        {"enabled": None},
    ]


@pytest.mark.spec("E18")
def test_without_a_device_nothing_is_called(monkeypatch, tmp_path):
    history = memory_history.MemoryHistory(True, False, Path)
    if torch.cuda.is_available():
        pytest.skip("this machine has a device")
    history.start()
    assert not history.running
    history.stop()


@pytest.mark.parametrize("error", [OSError("disk full"), None])
@pytest.mark.spec("E18")
def test_a_snapshot_that_cannot_be_written_costs_neither_the_trace_nor_the_next_window(tmp_path, monkeypatch, error):
    states = []

    def dump(path):
        if error and not (tmp_path / "failed").exists():
            (tmp_path / "failed").touch()
            raise error
        Path(path).write_bytes(b"pickle")

    monkeypatch.setattr(window_recording, "MemoryHistory", on_a_device(memory_history.MemoryHistory))
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **words: states.append(words))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    flags = {"record_shapes": True, "with_stack": True, "profile_memory": True, "memory_filename": "m.html"}
    settings = preset("composer", wait=0, warmup=0, active=1, repeat=2, folder=None, **flags)
    with listening() as said:
        profiler = loop(tmp_path / "traces", settings, 4)
    assert [name for name in files_below(tmp_path / "traces") if "trace.json" in name] == [
        "rank0.1.pt.trace.json",
        "rank0.2.pt.trace.json",
    ]
    snapshots = [name for name in files_below(tmp_path / "traces") if "snapshot" in name]
    # Two windows, one name: the second stands beside the first, as the pages do.
    assert snapshots == (["m.snapshot.pickle"] if error else ["m-2.snapshot.pickle", "m.snapshot.pickle"])
    assert sum("memory snapshot" in text for text in said) == (1 if error else 0)
    assert [file.path.name for saved in profiler.saver.windows for file in saved.files if file.kind == "snapshot"] == (
        snapshots if error else snapshots[::-1]
    )
    assert states[-1] == {"enabled": None}


@pytest.mark.spec("E18")
def test_a_profiler_that_breaks_records_no_allocations_any_more(tmp_path, monkeypatch):
    states = []

    def fail(_):
        raise RuntimeError("Kineto has had enough")

    monkeypatch.setattr(window_recording, "MemoryHistory", on_a_device(memory_history.MemoryHistory))
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **words: states.append(words))
    monkeypatch.setattr(window_recording.profile, "step", fail)
    flags = {"record_shapes": True, "with_stack": True, "profile_memory": True, "memory_filename": "m.html"}
    loop(tmp_path, preset("composer", wait=0, warmup=0, active=2, folder=None, **flags), 4)
    assert states == [{"max_entries": memory_history.MAX_ENTRIES}, {"enabled": None}]


def on_a_device(history):
    """The allocator's history as where there is a device; torch itself goes on without one."""

    def make(*arguments):
        made = history(*arguments)
        made.available = True
        return made

    return make


@pytest.mark.spec("E18")
def test_a_folder_that_is_being_filled_is_not_removed_with_an_old_window(tmp_path):
    class Remote:
        def put(self, path, name):
            return name

        def holds(self, path, name):
            return True

    saver = Saver(keep=0)
    folder = tmp_path / "window"
    with saver.filling(folder):
        saver.submit(
            Job(
                TraceWindow(0, 0, False, None),
                lambda path: path.write_text("{}"),
                [SavedFile("trace", folder / "a.json", Remote(), "a")],
            )
        )
        assert saver.drain(60)
        assert list(folder.iterdir()) == []  # its only file has gone, the folder stays
