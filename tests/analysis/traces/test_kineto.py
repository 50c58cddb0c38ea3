"""Kineto traces with known answers by hand, the same trace in every layout, broken ones (docs/measuring.md, W7-W16)."""

from __future__ import annotations

import io
import json
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aorta.analysis.traces.kineto import chunks
from aorta.analysis.traces.kineto.times import from_digits, from_floats
from aorta.analysis.traces.measuring import device_timelines
from aorta.analysis.traces.table import KIND_CODE, NULL, Class
from aorta.errors import InputError
from aorta.timeline.classes import KINDS
from tests.analysis.traces.kineto_files import ALLREDUCE, BASE_NS, document, event, kernel, read, read_text, step
from tests.benchmarks.kineto_traces import Plan, rank_text

SAMPLES = Path(__file__).resolve().parents[4] / "shared" / "samples" / "kineto_gloo"
GEMM = "Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64"
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


def rows(trace, cls):
    table = trace.intervals
    return [
        (table.names[table.name[at]], int(table.start_ns[at]), int(table.end_ns[at]))
        for at in (table.cls == cls).nonzero()[0]
    ]


def whole(trace):
    (timeline,) = device_timelines(trace)
    return timeline.measure(timeline.whole)


def test_nanoseconds_of_a_trace_are_exact_with_and_without_a_base():
    based = read([kernel(GEMM, 4400494439461.467, 0.001)])
    assert rows(based, Class.COMPUTE) == [(GEMM, BASE_NS + 4400494439461467, BASE_NS + 4400494439461468)]
    assert based.clock == "REALTIME"
    # Without a base: microseconds from 1970. float64 cannot hold the digits; a neighbour would be 128 ns away (W14).
    events = [kernel(GEMM, "TS", 3.25), kernel(GEMM, 1682725898082230, 2)]
    text = json.dumps(document(events, baseTimeNanoseconds=None)).replace('"TS"', "1682725898082228.123")
    old = read_text(text)
    assert rows(old, Class.COMPUTE) == [
        (GEMM, 1682725898082228123, 1682725898082231373),
        (GEMM, 1682725898082230000, 1682725898082232000),
    ]
    assert (old.clock, old.resolution_ns) == ("REALTIME", 1)
    whole_us = read([kernel(GEMM, 1682725898082228, 3)], baseTimeNanoseconds=None)
    assert (whole_us.clock, whole_us.resolution_ns) == ("REALTIME", 1000)
    assert read([kernel(GEMM, 12.5, 3)], baseTimeNanoseconds=None).clock == "unknown"


@given(st.integers(-(2**43) * 1000 + 1, 2**43 * 1000 - 1))
def test_every_nanosecond_below_2_to_the_43_microseconds_survives_float64(ns):
    sign, size = "-" if ns < 0 else "", abs(ns)
    text = f"{sign}{size // 1000}.{size % 1000:03d}"
    assert from_floats([float(text)]).tolist() == [ns]
    assert from_digits(text.encode()) == ns


@given(st.integers(-(2**62) + 1, 2**62 - 1))
def test_digits_are_exact_at_any_size_and_in_any_notation(ns):
    sign, size = "-" if ns < 0 else "", abs(ns)
    text = f"{sign}{size // 1000}.{size % 1000:03d}"
    assert from_digits(text.encode()) == ns
    assert from_digits(f"{ns}e-3".encode()) == ns


@pytest.mark.parametrize("text", [b"null", b"1e400", b'"1"', b"1e18", b"", b"-", b"1.2.3"])
def test_digits_that_no_clock_shows_are_refused(text):
    assert from_digits(text) is None


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
    assert [name for name, *_ in rows(trace, Class.COMPUTE)] == [GEMM]
    assert trace.intervals.bytes[trace.intervals.cls == Class.COPY].tolist() == [4096, 16]
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
    ("name", "kind"),
    [
        (ALLREDUCE, "allreduce"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", "allreduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reducescatter"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "allgather"),
        ("ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_f32", "allreduce"),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", None),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", None),
        ("rcclGenericKernel<1, true>", None),
        ("mscclKernel_Sum_half_Simple", None),
        ("void vllm::cross_device_reduce_2stage<half, 8>(RankData*)", "allreduce"),
        ("void at::native::small_reduce_kernel<4>", False),
        ("triton_red_fused_all_reduce_1", False),
        (GEMM, False),
    ],
)
def test_communication_is_found_wherever_the_name_holds_it_w12(name, kind):
    table = read([kernel(name, 0, 5)]).intervals
    if kind is False:
        assert table.cls.tolist() == [Class.COMPUTE]
    else:
        assert (table.cls.tolist(), table.kind.tolist()) == ([Class.COMM], [KIND_CODE[kind] if kind else NULL])


def test_patterns_of_the_command_line_add_to_the_built_in_ones():
    events = [kernel("my_ring_kernel<8>", 0, 5), kernel(ALLREDUCE, 9, 5)]
    assert read(events).intervals.cls.tolist() == [Class.COMPUTE, Class.COMM]
    assert read(events, patterns=["ring_k"]).intervals.cls.tolist() == [Class.COMM, Class.COMM]
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
        events = [generic]
    else:
        events = [generic, host]
    trace = read(events)
    table = trace.intervals
    assert [KINDS[code] for code in table.kind] == ["allgather"]
    # The full array of an all-gather is what came out of it: 800 numbers of 2 bytes.
    assert (table.bytes.tolist(), table.seq.tolist(), [table.dtypes[c] for c in table.dtype]) == (
        [1600],
        [41],
        ["bfloat16"],
    )
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
    arguments = PARAMETERS | {
        "Collective name": name,
        "In msg nelems": taken,
        "Out msg nelems": given,
        "dtype": "Float",
    }
    generic = kernel("ncclDevKernel_Generic", 0, 5)
    generic["args"] |= arguments
    assert read([generic]).intervals.bytes.tolist() == [full * 4]


def test_two_devices_of_one_trace_stay_two_w15():
    # Merged, device 1's compute would hide all of device 0's communication.
    trace = read([kernel(ALLREDUCE, 0, 10, 0, 20), kernel(GEMM, 0, 10, 1, 7), kernel(GEMM, 8, 4, 0, 7)])
    ratios = {each.device: each.measure((BASE_NS, BASE_NS + 12_000)).overlap_ratio for each in device_timelines(trace)}
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
    first, second = (
        timeline.measure((BASE_NS + start * 1000, BASE_NS + end * 1000)) for start, end in ((10, 20), (20, 30))
    )
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
    assert {int(code) for code in expected.intervals.cls} == {Class.COMPUTE, Class.COMM, Class.COPY}
    loaded = json.loads(rank_text(plan, 0))
    texts = [
        json.dumps(loaded),
        json.dumps(loaded, separators=(",", ":")),
        json.dumps(loaded, indent=4),
        json.dumps(loaded, sort_keys=True),
        json.dumps({"traceEvents": loaded["traceEvents"], **loaded}),
        "\n\t " + rank_text(plan, 0) + "\n\n",
        rank_text(Plan(megabytes=0.2, steps=2, compact=True), 0),
    ]
    for block in (4 << 20, 4096, 1500):
        monkeypatch.setattr(chunks, "BLOCK", block)
        for place, text in enumerate(texts[:-1]):
            trace = read_text(text)
            for name in ("start_ns", "end_ns", "cls", "kind", "bytes", "seq", "step", "stream", "device"):
                assert getattr(trace.intervals, name).tolist() == getattr(expected.intervals, name).tolist(), (
                    place,
                    name,
                )
            assert trace.counters == expected.counters


def test_events_are_cut_between_events_whatever_strings_and_values_hold(monkeypatch):
    monkeypatch.setattr(chunks, "BLOCK", 256)
    tricky = ['},{"ph"', '"},{', "]}", '],"traceName":"x"}', "\\", '\\"},{\\"', "},\n  {", "é}, {", '"traceEvents":[']
    random_ = random.Random(3)
    events = []
    for number in range(300):
        made = kernel(random_.choice(tricky) + str(number), number * 10, 5)
        made["args"]["nested"] = [{"a": random_.choice(tricky)}, {"b": [{}, {"c": {}}]}, {}]
        events.append(made)
    facts = {"note": '"traceEvents": [', "more": [{"x": "},{"}, {"y": 1}]}
    for text in (
        json.dumps(document(events, **facts)),
        json.dumps(document(events, **facts), indent=1),
        json.dumps({**document(events), "after": [{"x": 1}, {"y": ["},{", "]"]}]}),
        json.dumps(events),
    ):
        trace = read_text(text)
        assert len(trace.intervals) == 300
        assert sorted(trace.intervals.names) == sorted(made["name"] for made in events)


GOOD = json.dumps(document([kernel(GEMM, number * 10, 5) for number in range(40)]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "traceEvents"),
        ("{}", "traceEvents"),
        ('{"traceEvents": 3}', "traceEvents"),
        ('{"traceEvents": []}', "none of them work"),
        (GOOD[:-300], "cut off"),
        (GOOD[: GOOD.index("traceEvents") + 5], "traceEvents"),
        (GOOD + "}", "follows the events"),
        (GOOD.replace('"dur": 5', '"dur": NaN', 1), "malformed"),
        (GOOD.replace('"dur": 5', '"dur": 1e999', 1), "out of range"),
        (GOOD.replace('"ts": 10,', '"ts": [10],', 1), "Expected"),
        (GOOD.replace('"name": "Cijk', '"name": {}, "x": "Cijk', 1), "Expected"),
        (GOOD.replace('"args": {', '"args": ' + "[" * 100_000, 1), "nested too deeply"),
        (GOOD.replace(str(BASE_NS), str(2**80), 1), "traceEvents|no clock"),
        (GOOD.replace(str(BASE_NS), str(2**62), 1), "no clock"),
        (json.dumps([1, 2, 3]), "Expected"),
        (GOOD.encode().replace(b"Cijk", b"\xff\xfe", 1), "utf-8|UTF-8|malformed"),
    ],
)
@pytest.mark.parametrize("block", [1 << 20, 700])
def test_a_broken_trace_is_an_error_that_says_where(text, words, block, monkeypatch):
    monkeypatch.setattr(chunks, "BLOCK", block)
    with pytest.raises(InputError, match=rf"(?s)^t\.json: .*({words})") as caught:
        read_text(text)
    assert caught.value.exit_code == 2
    assert len(str(caught.value)) < 1000


def test_a_trace_without_a_place_to_cut_is_not_held_in_memory(monkeypatch):
    monkeypatch.setattr(chunks, "BLOCK", 1 << 12)
    monkeypatch.setattr(chunks, "LIMIT", 1 << 16)
    for text in ('{"traceEvents": [' + " " * (1 << 18), '{"x": "' + "a" * (1 << 18)):
        with pytest.raises(InputError, match=r"t\.json: "):
            read_text(text)


@settings(max_examples=100)
@given(st.data())
def test_a_damaged_trace_is_read_or_refused_and_nothing_else(data):
    text = bytearray(GOOD.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        trace = read_text(bytes(text))
    except InputError:
        return
    for timeline in device_timelines(trace):
        timeline.measure(timeline.whole)


def test_gloo_takes_the_kind_from_the_operator_and_the_interval_from_the_worker():
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
        deviceProperties=[],
        distributedInfo={"backend": "gloo", "rank": 1, "world_size": 2},
    )
    table = trace.intervals
    found = [(KINDS[k], int(b)) for k, b, c in zip(table.kind, table.bytes, table.cls, strict=True) if c == Class.COMM]
    assert found == [("allreduce", 128), ("reducescatter", 128), ("allgather", 256)]
    measured = whole(trace)
    # Compute is the innermost operator, not the one round it, and not gloo's own copy.
    assert (measured.compute_ns, measured.comm_ns, measured.hidden_ns) == (6_000, 29_000, 6_000)
    assert (trace.platform, trace.ranks, measured.copy_ns) == ("cpu", (1,), None)


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="the samples are not beside the checkout")
def test_every_collective_of_a_real_gloo_trace_is_found_with_its_kind():
    trace = read_text((SAMPLES / "gloo_0.json").read_bytes())
    table = trace.intervals
    found = [KINDS[kind] for kind in table.kind[table.cls == Class.COMM]]
    expected = {"allreduce": 2, "reducescatter": 3, "allgather": 2, "alltoall": 2}
    expected |= dict.fromkeys(("barrier", "broadcast", "reduce", "send"), 1)
    assert {kind: found.count(kind) for kind in set(found)} == expected
    assert trace.counters.get("comm_unlinked", 0) == 0


def test_no_time_of_a_large_trace_is_lost_between_pieces(monkeypatch):
    """Every kernel of the text, found by a regular expression, is in the table, to the nanosecond."""
    monkeypatch.setattr(chunks, "BLOCK", 5000)
    text = rank_text(Plan(megabytes=0.15, steps=2), 0)
    pattern = re.compile(r'"cat": "(?:kernel|gpu_memcpy)".*?"ts": (\d+)\.(\d{3}), "dur": (\d+)\.(\d{3})', re.DOTALL)
    expected = [(int(a + b), int(a + b) + int(c + d)) for a, b, c, d in pattern.findall(text)]
    table = read_text(text).intervals
    seen = zip((table.start_ns - BASE_NS).tolist(), (table.end_ns - BASE_NS).tolist(), strict=True)
    assert list(seen) == expected
    assert len(expected) > 50


def test_the_reader_takes_any_stream_that_reads_short():
    class Short(io.BytesIO):
        def readinto(self, buffer):
            return super().readinto(memoryview(buffer)[:37])

    from aorta.analysis.traces.kineto.reader import read_kineto
    from aorta.analysis.traces.names import NameClassifier
    from aorta.analysis.traces.opening import Peekable

    assert len(read_kineto(Peekable(Short(GOOD.encode())), "t.json", NameClassifier()).intervals) == 40
