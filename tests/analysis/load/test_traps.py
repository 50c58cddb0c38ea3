"""Wrong ways of measuring (docs/dev/measuring.md, section 3), each as a trace that shows whether AORTA falls for it."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from aorta.analysis.load.aorta_2025 import read_aorta_2025
from aorta.analysis.load.collective_costs import costs, parts_of
from aorta.analysis.load.device_timelines import device_timelines
from aorta.analysis.load.interval_table import IntervalClass, Trace
from aorta.analysis.load.kernel_classifier import NameClassifier
from aorta.analysis.load.kineto.kineto_reader import read_kineto
from aorta.analysis.load.rocpd import read_rocpd
from aorta.analysis.load.rocprof_json import read_json
from aorta.analysis.load.trace_health import facts_of
from aorta.timeline.overlap import Overlap
from tests.analysis.load.rocprof_files import KERNELS, as_json, json_bytes, write_rocpd
from tests.analysis.load.tables import COMM, COMPUTE, COPY, row, trace
from tests.analysis.load.test_aorta_2025 import a_range, line

CLASSIFIER = NameClassifier()


def measured(given: Trace, start: int, end: int) -> Overlap:
    (timeline,) = device_timelines(given)
    return timeline.measure((start, end))


def test_w7_nested_and_abutting_ranges_of_one_stream_lose_no_time() -> None:
    # The first AORTA ended the stream at the end of the inner range: it saw 4 of these 10 ms.
    ranges = [a_range("compute", 0.0, 8.0), a_range("compute", 2.0, 4.0), a_range("compute", 8.0, 10.0)]
    text = json.dumps(line(0, 12.0, ranges)).encode() + b"\n"
    found = measured(read_aorta_2025(io.BytesIO(text), "rank_00_metrics.jsonl"), 0, 12_000_000)
    assert found.compute_ns == 10_000_000


def test_w8_all_gather_is_communication() -> None:
    found = measured(trace([row(COMM, 0, 30, kind="allgather"), row(COMM, 50, 60, kind="allreduce")]), 0, 100)
    assert found.comm_ns == 40
    assert found.kinds["allgather"].total_ns == 30


def test_w9_idle_time_before_the_first_and_after_the_last_interval_counts() -> None:
    assert measured(trace([row(COMPUTE, 20, 30), row(COPY, 40, 50)]), 0, 100).idle_ns == 80


def test_w10_overlapping_intervals_of_one_class_count_once() -> None:
    rows = [row(COMPUTE, 0, 60, stream=1), row(COMPUTE, 30, 90, stream=2), row(COMM, 10, 20), row(COMM, 10, 25)]
    found = measured(trace(rows), 0, 100)
    assert (found.compute_ns, found.comm_ns, found.hidden_ns) == (90, 15, 15)


def test_w11_ranks_are_matched_by_number_whatever_their_clocks_say() -> None:
    def of_rank(rank: int, shift: int, length: int) -> Trace:
        one = row(COMM, shift, shift + length, kind="allreduce", group="w", seq=5, size=1000, rank=rank)
        return trace([one], groups={"w": (0, 1)})

    (cost,) = costs([*parts_of(of_rank(0, 0, 300)), *parts_of(of_rank(1, 10**15, 200))])
    assert cost.transfer_ms == pytest.approx(0.0002)


@pytest.mark.parametrize(
    "name",
    [
        "void ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)",
        "rcclGenericKernel<1, false>",
        "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)",
        "mscclKernel_Sum_float_Simple",
        "void vllm::cross_device_reduce_2stage<__half, 8>(...)",
        "ncclSymkDevKernel_AllGather_LL",
    ],
)
def test_w12_communication_is_found_wherever_its_word_stands_in_the_name(name: str) -> None:
    content = as_json()
    for symbol in content["rocprofiler-sdk-tool"][0]["kernel_symbols"]:
        if "Generic" in symbol["formatted_kernel_name"]:
            symbol["formatted_kernel_name"] = name
    (found,) = read_json(json_bytes(content), "t.json", CLASSIFIER)
    assert found.intervals.cls.tolist().count(IntervalClass.COMM) == 2


def kineto(events: list[dict[str, Any]]) -> Trace:
    content = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "GPU"}], "traceEvents": events}
    return read_kineto(io.BytesIO(json.dumps(content).encode()), "rank0.json", CLASSIFIER)


def event(cat: str, name: str, ts: float, dur: float, device: int = 0, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": device, "tid": 7, "ts": ts, "dur": dur, "args": args}


def test_w13_rows_with_a_stream_that_ran_on_no_device_are_no_work() -> None:
    found = kineto(
        [
            event("kernel", "gemm", 100.0, 50.0, device=0, stream=7, correlation=1),
            event("gpu_user_annotation", "nccl:all_reduce", 100.0, 900.0, stream=7),
            event("cpu_op", "triton_poi_fused_0", 100.0, 800.0, stream=7),
        ]
    )
    (timeline,) = device_timelines(found)
    assert timeline.lanes["compute"].start.tolist() == [timeline.whole[0]]
    assert timeline.whole[1] - timeline.whole[0] == 50_000


def test_w14_nanoseconds_survive_where_float64_would_lose_them() -> None:
    # Above 2^53 a float64 holds even numbers only; above 2^60 multiples of 256.
    start = 2**60 + 1
    content = as_json()
    kernel = content["rocprofiler-sdk-tool"][0]["buffer_records"]["kernel_dispatch"][0]
    kernel |= {"start_timestamp": start, "end_timestamp": start + 1}
    (found,) = read_json(json_bytes(content), "t.json", CLASSIFIER)
    assert (start, start + 1) in zip(found.intervals.start_ns.tolist(), found.intervals.end_ns.tolist(), strict=True)


def test_w15_two_devices_of_one_trace_stay_two() -> None:
    rows = [row(COMPUTE, 0, 100, device=0), row(COMM, 0, 100, device=1, kind="allreduce")]
    given = trace(rows)
    found = [(each.device, each.measure((0, 100))) for each in device_timelines(given)]
    assert [(device, one.compute_ns, one.comm_ns, one.hidden_ns) for device, one in found] == [
        (0, 100, 0, 0),
        (1, 0, 100, 0),
    ]
    assert facts_of(given).devices == {0: (0, 1)}


def test_w16_no_kernel_disappears_without_being_counted(tmp_path: Any) -> None:
    # The view `kernels` of this database lacks the dispatch that has no event; one kernel lies after the last step.
    path = write_rocpd(tmp_path / "out.db")
    (found,) = read_rocpd(path, str(path), CLASSIFIER)
    assert len(found.intervals) == len(KERNELS) + 1
    counters = facts_of(found).counters
    assert (counters["rows"], counters["unknown_kind"], counters["comm_unlinked"]) == (6, 1, 1)
    late = facts_of(trace([row(COMPUTE, 0, 5), row(COMPUTE, 50, 55)], steps=[(0, 0, 10)]))
    assert late.counters["outside_steps"] == 1
