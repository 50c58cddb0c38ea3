"""Kineto traces: what is work, on which device and in which step; collectives, found by name and described by their
host's operator (docs/dev/measuring.md, W12-W16); and broken text."""

from __future__ import annotations

import json

import numpy as np
import pytest

from aorta.errors import InputError
from aorta.read.traces import chrome_json
from aorta.read.traces.files import find_units
from aorta.read.traces.interval_table import IntervalClass
from aorta.read.traces.tables import UNTIMED, by_launch, read_trace_tables
from benchmarks.kineto_traces import Plan, rank_text
from tests.read.kineto_files import (
    BASE_NS,
    GEMM,
    document,
    event,
    kernel,
    read,
    read_text,
    step,
)


def test_the_layout_of_the_file_does_not_matter(monkeypatch):
    plan = Plan(megabytes=0.2, steps=2)
    expected = read_text(rank_text(plan, 0))
    assert len(expected.windows) == 2
    assert set(expected.intervals.cls.tolist()) == {IntervalClass.COMPUTE, IntervalClass.COMM, IntervalClass.COPY}
    text = rank_text(plan, 0)
    loaded = json.loads(text)
    reordered = {"traceEvents": loaded["traceEvents"], **loaded}
    texts = [json.dumps(loaded, separators=(",", ":")), json.dumps(loaded, indent=4, sort_keys=True)]
    texts += [json.dumps(reordered), f"\n\t {text}\n\n"]
    columns = ("start_ns", "end_ns", "cls", "kind", "bytes", "seq", "step", "stream", "device")
    for block in (4 << 20, 4096, 1500):
        monkeypatch.setattr(chrome_json, "BLOCK", block)
        for place, written in enumerate(texts):
            trace = read_text(written)
            for name in columns:
                found = getattr(trace.intervals, name).tolist()
                assert found == getattr(expected.intervals, name).tolist(), (place, name)
            assert trace.counters == expected.counters


GOOD = json.dumps(document([kernel(GEMM, number * 10, 5) for number in range(40)]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GOOD[:-300], "cut off"),
        (GOOD.replace('"dur": 5', '"dur": 1e999', 1), "events that are not JSON are left out"),
        (GOOD.replace('"ts": 10,', '"ts": [10],', 1), "events that are not JSON are left out"),
        (GOOD.replace('"name": "Cijk', '"name": {}, "x": "Cijk', 1), "events that are not JSON are left out"),
    ],
)
@pytest.mark.parametrize("block", [1 << 20, 700])
def test_a_damaged_row_is_left_out_and_said(text, words, block, monkeypatch):
    monkeypatch.setattr(chrome_json, "BLOCK", block)
    whole, damaged = read_text(GOOD), read_text(text)
    assert 0 < len(damaged.intervals) < len(whole.intervals)
    assert any(words in note for note in damaged.notes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"traceEvents": []}', "none of them work"),
        (GOOD.replace(str(BASE_NS), str(2**80), 1), "traceEvents|no clock"),
        (GOOD.replace(str(BASE_NS), str(2**62), 1), "no clock"),
        (json.dumps([1, 2, 3]), "Expected"),
    ],
)
@pytest.mark.parametrize("block", [1 << 20, 700])
def test_a_broken_trace_is_an_error_that_says_where(text, words, block, monkeypatch):
    monkeypatch.setattr(chrome_json, "BLOCK", block)
    with pytest.raises(InputError, match=rf"(?s)^t\.json: .*({words})") as caught:
        read_text(text)
    assert caught.value.exit_code == 2
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(("at_us", "doubtful"), [(20_000, [2]), (150_000, [2]), (343_000, [2, 3]), (600_000, [3])])
def test_where_a_device_lags_a_row_without_a_launch_is_of_a_step_that_it_may_belong_to(at_us, doubtful):
    """The host is two steps ahead; a profiler that starts then sees kernels whose launches it did not see."""
    events = [step(2, 0, 50_000), step(3, 50_000, 50_000)]
    for number in range(8):
        issued, ran = 1_000 + 12_000 * number, 100_000 + 50_000 * number
        events.append(event("cuda_runtime", "cudaLaunchKernel", issued, 5, 4242, 4242, correlation=number + 10))
        events.append(kernel(GEMM, ran, 40_000, correlation=number + 10))
    trace = by_launch(read([*events, kernel(GEMM, at_us, 5_000, correlation=1)]))
    assert (trace.windows.start_ns - BASE_NS).tolist() == [100_000_000, 350_000_000]
    why = "the device lags behind the steps, and rows without a launch belong to an unknown one"
    assert [gap.step for gap in trace.gaps if gap.why == why] == doubtful


def test_steps_of_the_host_are_not_those_of_a_device_whose_rows_have_no_length(tmp_path):
    """A trace that was exported while the next profiler session began has kernels of time 0 (torch 2.11, CUDA 13)."""
    events = [step(2, 0, 50_000), step(3, 50_000, 50_000), *[kernel(GEMM, 0.0, 0.0) for _ in range(8)]]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document(events)))
    ((unit,), *_) = find_units(str(path))
    (trace,) = read_trace_tables(unit)
    (device,) = trace.devices
    assert np.isnan(device.tables.steps.metrics["window_ms"]).all()
    assert {reasons["window_ms"] for reasons in device.tables.steps.reasons} == {UNTIMED}
