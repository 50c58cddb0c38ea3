"""Wrong ways of measuring (docs/dev/measuring.md, section 3), each as a trace that shows whether AORTA falls for it."""

from __future__ import annotations

import io
import json
from typing import Any

from aorta.analysis.load.aorta_2025 import read_aorta_2025
from aorta.analysis.load.device_timelines import device_timelines
from aorta.analysis.load.interval_table import Trace
from aorta.analysis.load.kernel_classifier import NameClassifier
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


def test_w9_idle_time_before_the_first_and_after_the_last_interval_counts() -> None:
    assert measured(trace([row(COMPUTE, 20, 30), row(COPY, 40, 50)]), 0, 100).idle_ns == 80


def test_w10_overlapping_intervals_of_one_class_count_once() -> None:
    rows = [row(COMPUTE, 0, 60, stream=1), row(COMPUTE, 30, 90, stream=2), row(COMM, 10, 20), row(COMM, 10, 25)]
    found = measured(trace(rows), 0, 100)
    assert (found.compute_ns, found.comm_ns, found.hidden_ns) == (90, 15, 15)


def test_w14_nanoseconds_survive_where_float64_would_lose_them() -> None:
    # Above 2^53 a float64 holds even numbers only; above 2^60 multiples of 256.
    start = 2**60 + 1
    content = as_json()
    kernel = content["rocprofiler-sdk-tool"][0]["buffer_records"]["kernel_dispatch"][0]
    kernel |= {"start_timestamp": start, "end_timestamp": start + 1}
    (found,) = read_json(json_bytes(content), "t.json", CLASSIFIER)
    assert (start, start + 1) in zip(found.intervals.start_ns.tolist(), found.intervals.end_ns.tolist(), strict=True)


def test_w16_no_kernel_disappears_without_being_counted(tmp_path: Any) -> None:
    # The view `kernels` of this database lacks the dispatch that has no event; one kernel lies after the last step.
    path = write_rocpd(tmp_path / "out.db")
    (found,) = read_rocpd(path, str(path), CLASSIFIER)
    assert len(found.intervals) == len(KERNELS) + 1
    counters = facts_of(found).counters
    assert (counters["rows"], counters["unknown_kind"], counters["comm_unlinked"]) == (6, 1, 1)
    late = facts_of(trace([row(COMPUTE, 0, 5), row(COMPUTE, 50, 55)], steps=[(0, 0, 10)]))
    assert late.counters["outside_steps"] == 1
