"""Kineto traces: what is work, on which device and in which step; collectives, found by name and described by their
host's operator (docs/dev/measuring.md, W12-W16); and broken text."""

from __future__ import annotations

import json

import numpy as np
import pytest

from aorta.errors import InputError
from aorta.read.traces import chrome_json
from aorta.read.traces.files import find_units
from aorta.read.traces.health import check_rows
from aorta.read.traces.interval_table import NULL, IntervalClass
from aorta.read.traces.tables import UNTIMED, by_launch, device_timelines, read_trace_tables
from aorta.timeline.arrays import interval_array
from aorta.timeline.classes import KINDS
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
    no_start = {**kernel(GEMM, 6, 1), "ts": "soon"}
    trace, facts = check_rows(read([kernel(GEMM, 0, 5), kernel(GEMM, 7, -2), no_end, no_start, kernel(GEMM, 9, 0)]))
    assert len(trace.intervals) == 2
    assert (facts.counters["negative_duration"], facts.counters["without_times"]) == (2, 1)


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


PARAMETERS = {
    "Collective name": "_allgather_base",
    "In msg nelems": 100,
    "Out msg nelems": 800,
    "Group size": 8,
    "dtype": "BFloat16",
    "Process Group Name": "7",
    "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]",
    "Seq": 41,
}


def test_patterns_of_the_command_line_add_to_the_built_in_ones():
    events = [kernel("my_ring_kernel<8>", 0, 5), kernel(ALLREDUCE, 9, 5)]
    assert read(events).intervals.cls.tolist() == [IntervalClass.COMPUTE, IntervalClass.COMM]
    assert read(events, patterns=["ring_k"]).intervals.cls.tolist() == [IntervalClass.COMM, IntervalClass.COMM]
    for broken, words in (("(", "not a regular expression"), ("x*", "matches the empty text")):
        with pytest.raises(InputError, match=f"--comm-pattern .*{words}"):
            read(events, patterns=[broken])


@pytest.mark.parametrize("on_kernel", [True, False])
def test_a_collective_is_what_record_param_comms_says_on_the_kernel_or_by_its_external_id(on_kernel):
    generic = kernel("ncclDevKernel_Generic_2(ncclDevKernelArgsStorage<4096ul>)", 10, 5, External_id=9)
    host = event("cpu_op", "record_param_comms", 1, 1, 4242, 4242)
    host["args"] = {"External id": 9, **PARAMETERS}
    if on_kernel:
        generic["args"] |= PARAMETERS
    trace = read([generic] if on_kernel else [generic, host])
    table = trace.intervals
    (row,) = zip(table.kind, table.bytes, table.seq, table.dtype, strict=True)
    # The full array of an all-gather is what came out of it: 800 numbers of 2 bytes.
    assert (KINDS[row[0]], *row[1:3], table.dtypes[row[3]]) == ("allgather", 1600, 41, "bfloat16")
    assert trace.group_ranks == {"7": tuple(range(8))}
    assert trace.counters.get("comm_unlinked", 0) == 0


def test_kernels_without_a_host_operation_are_counted_and_still_measured_w16():
    lone = kernel("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", 0, 10)
    del lone["args"]["External id"]
    trace = read([lone, kernel(GEMM, 5, 10)])
    assert (trace.counters["comm_unlinked"], trace.counters["kernels_unlinked"]) == (1, 1)
    measured = whole(trace)
    assert (measured.comm_ns, measured.hidden_ns, dict(measured.kinds)) == (10_000, 5_000, {})


@pytest.mark.parametrize(
    ("name", "taken", "given", "full"),
    [
        ("allreduce", 100, 100, 100),
        ("_reduce_scatter_base", 800, 100, 800),
        ("_allgather_base", 100, 800, 800),
        ("all_to_allv", 300, 500, 300),
        ("gather", 100, 0, 800),
        ("scatter", 0, 100, 800),
        ("broadcast", 100, 100, 100),
        ("barrier", 1, 1, 0),
    ],
)
def test_bytes_are_those_of_the_full_array(name, taken, given, full):
    generic = kernel("ncclDevKernel_Generic", 0, 5)
    said = {"Collective name": name, "In msg nelems": taken, "Out msg nelems": given, "dtype": "Float"}
    generic["args"] |= PARAMETERS | said
    assert read([generic]).intervals.bytes.tolist() == [full * 4]


@pytest.mark.parametrize("devices", [[], [{"id": 0, "name": "NVIDIA H100"}]])
def test_gloo_takes_the_kind_from_the_operator_and_the_interval_from_the_worker(devices):
    def op(name, ts, dur, **args):
        return event("cpu_op", name, ts, dur, 1, 100, **args)

    def gloo(name, ts, dur, thread=201):
        return event("user_annotation", name, ts, dur, 1, thread, Input_Dims=[[8, 4]], Input_type=["float"])

    trace = read(
        [
            op("c10d::allreduce_", 10, 1),
            op("c10d::_reduce_scatter_base_", 12, 1),
            op("c10d::_allgather_base_", 14, 1),
            gloo("gloo:all_reduce", 11, 9),
            gloo("gloo:all_reduce", 20, 10, 202),
            gloo("gloo:all_gather", 30, 10),
            op("aten::linear", 15, 10),
            op("aten::addmm", 17, 6),
            event("cpu_op", "aten::copy_", 32, 2, 1, 201),
        ],
        deviceProperties=devices,
        distributedInfo={"backend": "gloo", "rank": 1, "world_size": 2},
    )
    table = trace.intervals
    found = [
        (KINDS[k], int(b))
        for k, b, c in zip(table.kind, table.bytes, table.cls, strict=True)
        if c == IntervalClass.COMM
    ]
    assert found == [("allreduce", 128), ("reducescatter", 128), ("allgather", 256)]
    measured = whole(trace)
    # Compute is the operator with those nested in it, and not gloo's own copy.
    assert (measured.compute_ns, measured.comm_ns, measured.hidden_ns) == (10_000, 29_000, 10_000)
    assert (trace.platform, trace.rank, measured.copy_ns) == ("cpu", 1, None)


def test_nothing_of_the_host_is_left_once_a_device_worked(monkeypatch):
    monkeypatch.setattr(chrome_json, "BLOCK", 256)
    host = [event("cpu_op", "aten::linear", at, -1 if at == 3 else 1, 1, 100) for at in range(8)]
    trace = read([*host, kernel(GEMM, 10, 5), kernel(ALLREDUCE, 12, 5)])
    assert trace.intervals.names == (GEMM, ALLREDUCE)
    assert rows(trace, IntervalClass.COMPUTE) == [(GEMM, BASE_NS + 10_000, BASE_NS + 15_000)]
    assert trace.counters == {"events": 10, "comm_unlinked": 1}


PEER = "Memcpy PtoP (Device -> Device)"


def copy(name: str, ts: int, dur: int, external: int | None = None, cat: str = "gpu_memcpy", **args: object):
    given = args if external is None else {"External_id": external, **args}
    return event(cat, name, ts, dur, 0, 20, bytes=4096, **given)


def parameters(external: int):
    host = event("cpu_op", "record_param_comms", 1, 1, 4242, 4242)
    host["args"] = {"External id": external, **PARAMETERS}
    return host


@pytest.mark.parametrize("on_copy", [True, False])
def test_copies_that_a_collective_launched_are_communication(on_copy):
    """A collective by copy engines: a copy a peer, no kernel; and one copy that is the program's own."""
    copies = [copy(PEER, 10, 5, 9), copy("Memcpy DtoD (Device -> Device)", 12, 6, 9)]
    if on_copy:
        for row in copies:
            row["args"] |= PARAMETERS
    trace = read([*copies, copy(PEER, 30, 4, 11), kernel(GEMM, 0, 15), *([] if on_copy else [parameters(9)])])
    assert rows(trace, IntervalClass.COMM) == [
        (PEER, BASE_NS + 10_000, BASE_NS + 15_000),
        ("Memcpy DtoD (Device -> Device)", BASE_NS + 12_000, BASE_NS + 18_000),
    ]
    table = trace.intervals
    ours = table.cls == IntervalClass.COMM
    assert {KINDS[code] for code in table.kind[ours]} == {"allgather"}
    assert {table.groups[code] for code in table.group[ours]} == {"7"}
    # None of the copies is the whole collective, nor the only row of its number.
    assert (set(table.bytes[ours].tolist()), set(table.seq[ours].tolist())) == ({NULL}, {NULL})
    assert table.bytes[table.cls == IntervalClass.COPY].tolist() == [4096]
    assert trace.counters["comm_copies"] == 2
    assert not trace.either
    measured = whole(trace)
    assert (measured.comm_ns, measured.hidden_ns, measured.copy_ns) == (8000, 5000, 4000)


@pytest.mark.parametrize(
    ("row", "patterns", "communicates"),
    [
        (copy("Memcpy HtoD (Pageable -> Device)", 10, 5, 9), (), False),
        (copy("Memcpy DtoH (Device -> Pinned)", 20, 5, 9), (), False),
        (copy("CopyHostToDevice", 30, 5, 9), (), False),
        (copy("Memset (Device)", 40, 5, 9, cat="gpu_memset"), (), False),
        (copy(PEER, 10, 5), (), False),
        (copy(PEER, 20, 5, 12), (), False),
        (copy(PEER, 10, 5, 12), ("PtoP",), True),
        (copy("Memcpy DtoD (Device -> Device)", 20, 5), ("PtoP",), False),
    ],
)
def test_other_copies_are_communication_by_the_command_line_alone(row, patterns, communicates):
    trace = read([parameters(9), row, kernel(GEMM, 0, 5)], patterns=patterns)
    assert (len(rows(trace, IntervalClass.COMM)), trace.either) == (communicates, frozenset())
    assert "comm_copies" not in trace.counters


def test_with_symmetric_memory_a_copy_that_nothing_names_bounds_communication():
    symmetric = event("cpu_op", "symm_mem::_low_contention_all_gather", 0, 9, 4242, 4242)
    events = [symmetric, kernel(ALLREDUCE, 0, 5), kernel(GEMM, 0, 5)]
    assert not read(events).either  # kernels of symmetric memory have names
    assert not read([*events, copy("Memcpy HtoD (Pinned -> Device)", 10, 5, 12)]).either
    assert not read([*events, parameters(9), copy(PEER, 10, 5, 9)]).either
    trace = read([*events, copy(PEER, 10, 5, 12)])
    assert trace.either == {PEER}
    values, reasons = whole(trace).metrics()
    assert (values["comm_ms"], values["copy_ms"], values["compute_ms"]) == (None, None, 0.005)
    assert "may be communication (symmetric memory)" in reasons["comm_ms"]
    assert "between 0.005 and 0.01 ms" in reasons["comm_ms"]


def test_a_kernel_is_communication_by_its_operator_only_where_both_have_an_id():
    operator = event("cpu_op", "symm_mem::put_signal", 0, 9, 4242, 4242, External_id=8)
    unlinked = event("cpu_op", "c10d::allreduce_", 0, 9, 4242, 4242)
    work = [kernel(name, at, 5, External_id=ident) for name, at, ident in (("k1", 0, 8), ("k2", 5, None), (GEMM, 9, 8))]
    trace = read([operator, unlinked, *work])
    assert [name for name, *_ in rows(trace, IntervalClass.COMM)] == ["k1"]
    assert KINDS[trace.intervals.kind[0]] == "send"


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
