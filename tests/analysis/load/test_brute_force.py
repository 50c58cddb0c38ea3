"""The same traces measured by brute force and by HolisticTraceAnalysis (where `AORTA_HTA_PYTHON` names a Python that
has it): equal to the last digit on whole microseconds, and the brute-force answer on nanoseconds, which it rounds.
"""

from __future__ import annotations

import json
import os
import subprocess
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from aorta.analysis.load.device_timelines import device_timelines
from aorta.analysis.load.trace_files import find_units, read_unit
from aorta.timeline.overlap import Overlap
from benchmarks import kineto_with_hta
from benchmarks.kineto_traces import Plan, rank_text, write_traces


def measured(folder: Path) -> list[Overlap]:
    """Each file's one device, from the first kernel to the end of the last."""
    found = []
    for unit in find_units(str(folder))[0]:
        for trace in read_unit(unit):
            (timeline,) = device_timelines(trace)
            found.append(timeline.measure(timeline.whole))
    return found


def brute_force(text: str, unit_ns: int) -> tuple[int, int, int, int]:
    """Compute, communication, hidden and idle, by marking every unit of time between the first and the last kernel."""
    rows = []
    for event in json.loads(text, parse_float=Decimal)["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy"):
            start, length = (int(event[key] * 1000) for key in ("ts", "dur"))
            kind = 2 if "nccl" in event["name"] else 4 if event["cat"] == "gpu_memcpy" else 1
            rows.append((start // unit_ns, (start + length) // unit_ns, kind))
    first, last = min(row[0] for row in rows), max(row[1] for row in rows)
    line = np.zeros(last - first, np.uint8)
    for start, end, kind in rows:
        line[start - first : end - first] |= kind
    compute, comm = (line & 1) > 0, (line & 2) > 0
    return tuple(int(mask.sum()) * unit_ns for mask in (compute, comm, compute & comm, line == 0))  # type: ignore[return-value]


@pytest.mark.parametrize("whole_microseconds", [True, False])
def test_a_trace_measures_what_marking_every_nanosecond_measures(tmp_path, whole_microseconds):
    plan = Plan(ranks=2, megabytes=0.15, steps=2, whole_microseconds=whole_microseconds)
    list(write_traces(plan, tmp_path))
    for rank, overlap in enumerate(measured(tmp_path)):
        expected = brute_force(rank_text(plan, rank), 1)
        assert (overlap.compute_ns, overlap.comm_ns, overlap.hidden_ns, overlap.idle_ns) == expected
        assert 0 < overlap.hidden_ns < overlap.comm_ns
        assert overlap.idle_ns > 0


@pytest.fixture
def hta_python() -> str:
    found = os.environ.get("AORTA_HTA_PYTHON")
    if not found:
        pytest.skip("AORTA_HTA_PYTHON names no Python with HolisticTraceAnalysis")
    return found


def with_hta(python: str, folder: Path) -> dict[str, list[float]]:
    command = [python, kineto_with_hta.__file__, str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    found: dict[str, list[float]] = json.loads(done.stdout.strip().splitlines()[-1])["measured"]
    return found


def test_whole_microseconds_give_what_holistic_trace_analysis_gives_to_the_last_digit(tmp_path, hta_python):
    list(write_traces(Plan(ranks=2, megabytes=0.4, steps=3, whole_microseconds=True, plain=True), tmp_path))
    theirs = with_hta(hta_python, tmp_path)
    for rank, mine in enumerate(measured(tmp_path)):
        assert mine.compute_ns == theirs["compute_us"][rank] * 1000
        assert mine.idle_ns == theirs["idle_us"][rank] * 1000
        assert mine.window_ns == theirs["window_us"][rank] * 1000
        assert round(100 * mine.hidden_ns / mine.comm_ns, 2) == theirs["overlap_percent"][rank]


def test_nanoseconds_are_kept_where_holistic_trace_analysis_rounds(tmp_path, hta_python):
    plan = Plan(ranks=1, megabytes=0.4, steps=3, plain=True)
    list(write_traces(plan, tmp_path))
    theirs = with_hta(hta_python, tmp_path)
    (mine,) = measured(tmp_path)
    assert (mine.compute_ns, mine.idle_ns) == brute_force(rank_text(plan, 0), 1)[::3]
    assert mine.compute_ns != theirs["compute_us"][0] * 1000
