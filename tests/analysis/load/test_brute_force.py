"""Overlap of a trace against marking every nanosecond that a kernel ran."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from aorta.analysis.load.trace_files import find_units, read_unit
from aorta.analysis.load.trace_tables import device_timelines
from aorta.timeline.overlap import Overlap
from benchmarks.kineto_traces import Plan, rank_text, write_traces


def measured(folder: Path) -> list[Overlap]:
    """Each file's one device, from the first kernel to the end of the last."""
    found = []
    for unit in find_units(str(folder))[0]:
        for trace in read_unit(unit):
            (timeline,) = device_timelines(trace)
            found += timeline.measure(timeline.whole)
    return found


def brute_force(text: str) -> tuple[int, int, int, int]:
    """Compute, communication, hidden and idle, by marking every nanosecond between the first and the last kernel."""
    rows = []
    for event in json.loads(text, parse_float=Decimal)["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy"):
            start, length = (int(event[key] * 1000) for key in ("ts", "dur"))
            kind = 2 if "nccl" in event["name"] else 4 if event["cat"] == "gpu_memcpy" else 1
            rows.append((start, start + length, kind))
    first, last = min(row[0] for row in rows), max(row[1] for row in rows)
    line = np.zeros(last - first, np.uint8)
    for start, end, kind in rows:
        line[start - first : end - first] |= kind
    compute, comm = (line & 1) > 0, (line & 2) > 0
    return tuple(int(mask.sum()) for mask in (compute, comm, compute & comm, line == 0))  # type: ignore[return-value]


@pytest.mark.parametrize("whole_microseconds", [True, False])
def test_a_trace_measures_what_marking_every_nanosecond_measures(tmp_path, whole_microseconds):
    plan = Plan(ranks=2, megabytes=0.15, steps=2, whole_microseconds=whole_microseconds)
    list(write_traces(plan, tmp_path))
    for rank, overlap in enumerate(measured(tmp_path)):
        expected = brute_force(rank_text(plan, rank))
        assert (overlap.compute_ns, overlap.comm_ns, overlap.hidden_ns, overlap.idle_ns) == expected
        assert 0 < overlap.hidden_ns < overlap.comm_ns
        assert overlap.idle_ns > 0
