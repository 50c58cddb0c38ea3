"""The page of a trace whose allocations are known."""

from __future__ import annotations

import json
import re

import pytest

from aorta.profiling.memory_timeline import main, page, timelines
from aorta.profiling.trace_names import TraceWindow
from aorta.profiling.trace_saver import Job, SavedFile, Saver


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


@pytest.mark.spec("E18")
def test_a_folder_that_is_being_filled_is_not_removed_with_an_old_window(tmp_path):
    class There:
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
                [SavedFile("trace", folder / "a.json", There(), "a")],
            )
        )
        assert saver.drain(60)
        assert list(folder.iterdir()) == []  # its only file has gone, the folder stays
