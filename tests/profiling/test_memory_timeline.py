"""Memory: its timeline as a page, and snapshots of a window."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import aorta
from aorta.distributed import cuda
from aorta.profiling import trace_saver, window_recording
from aorta.profiling.memory_timeline import NAMES, main, page, timelines
from tests.profiling.windows import FLAGS, files_below, listening, loop, preset


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
    (first,) = timelines({"traceEvents": KNOWN["traceEvents"][:4]})
    assert [one.operator for one in first.live] == ["aten::empty"], "the innermost"


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
def test_names_in_a_trace_are_text_on_the_page_and_one_without_allocations_says_so():
    text = page({"traceEvents": [span("cpu_op", "<b>x</b>", 0, 9), memory(1, 8, 1, 8)]}, "<title>")
    assert "&lt;b&gt;x&lt;/b&gt;" in text
    assert "<b>" not in text
    assert "The trace holds no <code>[memory]</code> events" in page({"traceEvents": []}, "empty")


@pytest.mark.spec("E19")
def test_a_long_curve_keeps_its_peak():
    events = [memory(t, 1, t, 50 if t != 7777 else 999) for t in range(10_000)]
    text = page({"traceEvents": events}, "long")
    top = min(float(y) for y in re.findall(r",(\d+\.\d+)", text[text.index("<polyline") :]))
    assert top == pytest.approx(260 - 260 * 0.92, abs=0.01)


WIDTH, LAYERS, BATCH, FLOAT_BYTES = 256, 3, 128, 4
PARAMETER_BYTES = LAYERS * (WIDTH * WIDTH + WIDTH) * FLOAT_BYTES
STATE_BYTES = 2 * PARAMETER_BYTES + 2 * LAYERS * FLOAT_BYTES
"""Of Adam: two moments of every parameter, and a count of steps for each of the tensors."""


@pytest.fixture
def profiled(tmp_path):
    """The page of a window of so many steps of training, and what was logged."""

    def made(active):
        torch.manual_seed(0)
        model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
        optimizer = torch.optim.Adam(model.parameters())

        def train():
            optimizer.zero_grad()
            model(torch.randn(BATCH, WIDTH)).sum().backward()
            optimizer.step()

        train()  # from here on the optimizer has its state
        words = {"memory_filename": "m.html", "warmup": 0, "active": active, "summary_rows": 0, **FLAGS}
        with listening() as said, aorta.TorchProfiler(str(tmp_path), **words) as profiler:
            for _ in range(active + 1):
                train()
                profiler.step()
        return (tmp_path / "m.html").read_text(), said

    return made


def test_the_page_of_a_window_stacks_parameters_gradients_and_state(profiled):
    text, _ = profiled(2)
    assert "<h2>cpu by category</h2>" in text
    rows = re.findall(r'<td>([a-z\' ]+)</td><td class="n">[^<]+</td><td class="n">([0-9.]+) (\w+)</td>', text)
    most = {name: float(size) * {"B": 1, "KiB": 1024, "MiB": 1024**2}[unit] for name, size, unit in rows}
    assert list(most) == list(NAMES.values())
    assert most["gradients"] == pytest.approx(PARAMETER_BYTES, rel=0.01)
    assert most["optimizer state"] == pytest.approx(STATE_BYTES, rel=0.01)
    assert 0.99 * PARAMETER_BYTES <= most["parameters"] < 1.5 * PARAMETER_BYTES
    # Each layer keeps its input, or its output, for the backward pass.
    assert 0.99 * LAYERS * BATCH * WIDTH * FLOAT_BYTES <= most["activations"] < 3 * LAYERS * BATCH * WIDTH * FLOAT_BYTES
    assert not re.search(r"http|//[a-z]|<script", text)


def test_a_torch_that_cannot_divide_it_still_gets_its_page(profiled, monkeypatch):
    monkeypatch.delattr(torch.profiler._memory_profiler, "MemoryProfileTimeline")
    text, said = profiled(1)
    assert "Largest allocations alive at the peak" in text
    assert sum("memory is not divided into categories: AttributeError" in line for line in said) == 1


def test_areas_stand_on_each_other():
    sizes = {name: [0, 0] for name in NAMES.values()} | {"parameters": [100, 100], "gradients": [0, 100]}
    text = page({"traceEvents": []}, "two", {"cuda:0": {"times_us": [10, 20], "bytes": sizes}})
    parameters, gradients = (
        [tuple(map(float, point.split(","))) for point in points.split()]
        for points in re.findall(r'points="([^"]+)"><title>(?:parameters|gradients)', text)
    )
    height = parameters[2][1] - parameters[1][1]  # of 100 bytes
    assert height > 0
    assert gradients[1][1] == pytest.approx(parameters[1][1] - height, abs=0.02)
    assert gradients[0][1] == gradients[3][1] == parameters[0][1]


@pytest.fixture
def device(monkeypatch):
    """CUDA's caching allocator, as far as snapshots see it: what it was told, which a dump holds; some dumps break."""
    seen = SimpleNamespace(switched=[], breaks=[])

    def dump(path):
        Path(path).write_text(str(seen.switched))
        if seen.breaks and seen.breaks.pop(0):
            raise OSError(28, "No space left on device", path)

    def record(enabled="all", max_entries=0):
        seen.switched.append(enabled)

    monkeypatch.setattr(cuda, "has_memory_history", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    return seen


COMPOSER = {"wait": 0, "warmup": 0, "folder": None, "memory_filename": "m.html", **FLAGS}


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.spec("E18")
def test_a_snapshot_that_cannot_be_written_costs_neither_the_trace_nor_the_next_window(device, tmp_path, fails):
    device.breaks = [fails]
    with listening() as said:
        profiler = loop(tmp_path, preset("composer", active=1, repeat=2, **COMPOSER), 4)
    names = files_below(tmp_path)
    assert [name for name in names if "trace.json" in name] == ["rank0.1.pt.trace.json", "rank0.2.pt.trace.json"]
    # Two windows, one name: the second stands beside the first, as the pages do.
    snapshots = ["m.snapshot.pickle"] if fails else ["m.snapshot.pickle", "m-2.snapshot.pickle"]
    assert [name for name in names if "snapshot" in name] == sorted(snapshots)
    assert sum("memory snapshot" in text for text in said) == fails
    files = [file for saved in profiler.saver.windows for file in saved.files]
    assert [file.path.name for file in files if file.kind == "snapshot"] == snapshots
    assert device.switched == ["all", None] * 2


@pytest.mark.spec("E18")
def test_a_profiler_that_breaks_records_no_allocations_any_more(device, tmp_path, monkeypatch):
    monkeypatch.setattr(window_recording.profile, "step", Mock(side_effect=RuntimeError("Kineto has had enough")))
    loop(tmp_path, preset("composer", active=2, **COMPOSER), 4)
    assert device.switched == ["all", None]


def test_where_the_trace_of_its_window_is_lost_a_snapshot_is_still_there(device, tmp_path, monkeypatch):
    monkeypatch.setattr(trace_saver, "export", Mock(side_effect=OSError(28, "No space left on device")))
    settings = preset("d9d", period=2, warmup=0, active=1, compression="none", memory_filename="m{batch}.html", **FLAGS)
    saved = {file.kind: file for window in loop(tmp_path, settings, 2).saver.windows for file in window.files}
    assert "No space left on device" in (saved["trace"].error or "")
    assert saved["snapshot"].error is None
    assert saved["snapshot"].on_disk
    assert saved["snapshot"].path.read_text() == "['all']"
