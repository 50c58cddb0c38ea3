"""Kineto traces: what is work, on which device and in which step (docs/dev/measuring.md, W13-W16), and broken text."""

from __future__ import annotations

import json

import pytest

from aorta.errors import InputError
from aorta.read.traces import chrome_json
from aorta.read.traces.interval_table import NULL, IntervalClass
from aorta.read.traces.tables import device_timelines
from aorta.timeline.arrays import interval_array
from benchmarks.kineto_traces import Plan, rank_text
from tests.read.kineto_files import (
    ALLREDUCE,
    BASE_NS,
    GEMM,
    document,
    event,
    kernel,
    read,
    read_text,
    rows,
    step,
    whole,
)


def test_work_is_chosen_by_category_and_not_by_its_arguments_w13():
    trace = read(
        [
            kernel(GEMM, 10, 5),
            event("cpu_op", "triton_poi_fused_add", 0, 100, 4242, 4242, stream=7, device=0),
            event("gpu_user_annotation", "ProfilerStep#3", 0, 100, 0, 7, stream=7),
            event("gpu_user_annotation", "nccl:all_reduce", 0, 100, 0, 20, stream=20),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 20, 2, 0, 27, bytes=4096),
            event("gpu_memset", "Memset (Device)", 23, 1, 0, 27, bytes=16),
            event("cuda_runtime", "hipLaunchKernel", 0, 50, 4242, 4242, stream=7),
        ]
    )
    assert [name for name, *_ in rows(trace, IntervalClass.COMPUTE)] == [GEMM]
    assert trace.intervals.bytes[trace.intervals.cls == IntervalClass.COPY].tolist() == [4096, 16]
    measured = whole(trace)
    assert (measured.compute_ns, measured.copy_ns, measured.comm_ns, measured.idle_ns) == (5000, 3000, 0, 6000)


def test_categories_of_old_traces_have_capitals():
    trace = read(
        [
            event("Kernel", GEMM, 10, 5, 0, "stream 7"),
            event("Memcpy", "Memcpy DtoH (Device -> Pageable)", 20, 5, 0, "stream 7"),
            event("Operator", "aten::mm", 0, 5, 4242, "4242"),
        ]
    )
    assert (len(trace.intervals), trace.intervals.stream.tolist()) == (2, [7, 7])


@pytest.mark.parametrize(
    "odd",
    [
        event("never heard of", "x", 0, 1),
        {key: value for key, value in event("", "x", 0, 1).items() if key != "cat"},
        event("cuda_runtime", "cudaLaunchKernel", 0, 1, 4242, 4242, correlation=[7]),
        event("user_annotation", "far", 2.0**43 + 0.5, 1, 4242, 4242),
        event("Operator", "ProfilerStep#1", 20, 5, 4242, 4242),
    ],
)
@pytest.mark.parametrize("block", [1 << 20, 100])
def test_an_odd_event_changes_nothing_about_the_others(odd, block, monkeypatch):
    monkeypatch.setattr(chrome_json, "BLOCK", block)
    work = [kernel(GEMM, at, 0.125, correlation=at) for at in range(8)]
    trace = read([*work[:4], odd, step(0, 2, 16), *work[4:]])
    assert rows(trace, IntervalClass.COMPUTE) == [
        (GEMM, BASE_NS + at * 1000, BASE_NS + at * 1000 + 125) for at in range(8)
    ]
    assert trace.windows.step.tolist() == [0, 1][: 1 + (odd["name"] == "ProfilerStep#1")]
    assert not trace.notes


@pytest.mark.parametrize(("other", "merged"), [("[PP01]", True), ("[PP00]", False)])
def test_ids_that_merged_processes_share_link_nothing(other: str, merged: bool) -> None:
    """Both processes call their first operator 7: an all-reduce in one, and a product in the other."""
    host, linked = f"{other} 4000", {"External_id": 7, "correlation": 70}
    trace = read(
        [
            event("cpu_op", "c10d::allreduce_", 0, 5, host, host, External_id=7),
            event("cuda_runtime", "cudaLaunchKernel", 2, 1, host, host, **linked),
            event("kernel", "void mine(float*)", 10, 5, "[PP00] 0", 7, **linked),
            event("kernel", "void mine(float*)", 30, 5, f"{other} 1", 7, **linked),
        ]
    )
    assert [int(found) for found in trace.intervals.cls] == [
        int(IntervalClass.COMPUTE if merged else IntervalClass.COMM)
    ] * 2
    assert (trace.intervals.launch_ns == NULL).all() == merged
    assert ("t.json: merged of several processes" in "\n".join(trace.notes)) == merged


def test_two_devices_of_one_trace_stay_two_w15():
    # Merged, device 1's compute would hide all of device 0's communication.
    trace = read([kernel(ALLREDUCE, 0, 10, 0, 20), kernel(GEMM, 0, 10, 1, 7), kernel(GEMM, 8, 4, 0, 7)])
    window = interval_array([(BASE_NS, BASE_NS + 12_000)])
    ratios = {each.device: each.measure(window)[0].overlap_ratio for each in device_timelines(trace)}
    assert ratios == {0: 0.2, 1: None}


def test_steps_are_the_profilers_and_kernels_outside_belong_to_none():
    trace = read(
        [
            kernel(GEMM, 5, 2),
            step(4, 20, 10),
            step(3, 10, 10),
            kernel(GEMM, 12, 4),
            kernel(ALLREDUCE, 14, 10, stream=20),
            kernel(GEMM, 22, 1),
            kernel(GEMM, 30, 5),
        ]
    )
    assert trace.windows.step.tolist() == [3, 4]
    assert trace.intervals.step.tolist() == [NULL, 3, 3, 4, NULL]
    (timeline,) = device_timelines(trace)
    windows = [(BASE_NS + start * 1000, BASE_NS + end * 1000) for start, end in ((10, 20), (20, 30))]
    first, second = timeline.measure(interval_array(windows))
    assert (first.compute_ns, first.comm_ns, first.hidden_ns, first.idle_ns) == (4000, 6000, 2000, 2000)
    assert (second.compute_ns, second.comm_ns, second.hidden_ns, second.idle_ns) == (1000, 4000, 1000, 6000)


def test_rows_without_times_or_that_end_before_they_start_are_left_out_and_counted():
    no_end = kernel(GEMM, 3, 1)
    del no_end["dur"]
    trace = read([kernel(GEMM, 0, 5), kernel(GEMM, 7, -2), no_end, kernel(GEMM, 9, 0)])
    assert len(trace.intervals) == 2
    assert (trace.counters["negative_duration"], trace.counters["without_times"]) == (1, 1)


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


def test_an_event_that_only_some_decoders_refuse_is_left_out_beside_broken_ones():
    odd = [event("ac2g", "x", 0, 1) | {"pid": {}}, *[event("of a new kind", "x", 0, 1)] * 5]
    text = json.dumps(document([*odd, kernel(GEMM, 0, 5), event("kernel", "broken", 0, 1)]))
    trace = read_text(text.replace('"broken"', "broken"))
    assert len(trace.intervals) == 1
    assert any("left out" in note for note in trace.notes)


def test_an_operator_of_impossible_length_is_counted_where_operators_are_the_work():
    events = [event("cpu_op", "aten::mm", 0, 5), event("cpu_op", "aten::mm", 9, {})]
    trace = read_text(json.dumps(document(events, distributedInfo=None, deviceProperties=[{"id": 0}])))
    assert (len(trace.intervals), trace.counters["without_times"]) == (1, 1)
