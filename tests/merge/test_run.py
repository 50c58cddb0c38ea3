"""A real run with a skewed clock: what it measured, what its traces say, and what the merge makes of both."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.merge.traces import load, problems
from tests.runs import ROOT, finished, once, record, train

pytestmark = [pytest.mark.dist, pytest.mark.thorough]
OFFSET_NS, DRIFT_PPM = 123_456_789, 80.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One launch for all of this file."""
    skew = (f"clock.fake_offset_ns={OFFSET_NS}", f"clock.fake_drift_ppm={DRIFT_PPM}")
    words = ("training.max_steps=12", "profiling.enabled=true", *skew)
    return once(tmp_path_factory, "skewed", lambda folder: train(folder, *words))


def trace_of(folder: Path, rank: int) -> dict[str, Any]:
    (path,) = [path for path in (folder / "torch_profiler").rglob("*.json") if f"rank{rank}" in str(path)]
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def merge(folder: Path, target: Path, *words: str) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "analysis" / "merge_traces.py")
    return finished([sys.executable, script, str(folder), "-o", str(target), "--check", *words])


@pytest.mark.spec("C12")
def test_C12_a_run_measures_the_skew_of_its_ranks(folder):
    sync = json.loads((folder / "clock_sync.json").read_text())
    one = sync["ranks"][1]
    since = one["injected"]["since_ns"]
    for sample in (one["start"], one["end"]):
        true = OFFSET_NS + DRIFT_PPM * 1e-6 * (sample["at_ns"] - OFFSET_NS - since)
        assert abs(sample["offset_ns"] - true) <= sample["bound_ns"] + 1
    assert abs(one["drift_ppm"] - DRIFT_PPM) <= one["drift_bound_ppm"]
    # It encloses the steps, and lies in none of them.
    for rank in (0, 1):
        steps = record(folder, rank).steps
        shown = OFFSET_NS if rank else 0
        measured = sync["ranks"][rank]
        assert measured["start"]["at_ns"] - shown < steps[0].t_start_ns
        assert measured["end"]["at_ns"] - shown > steps[-1].t_end_ns


@pytest.mark.spec("C15")
def test_C15_manifest_and_traces_say_of_the_clock_what_was_measured_at_the_start(folder):
    sync = json.loads((folder / "clock_sync.json").read_text())
    start = sync["ranks"][1]["start"]
    assert json.loads((folder / "run.json").read_text())["clock_sync"]["ranks"][1]["start"] == start
    own = trace_of(folder, 1)["clock_sync"]
    assert (own["reference_rank"], own["clock"], own["run_id"]) == (0, "CLOCK_REALTIME", sync["run_id"])
    assert [(mine["rank"], mine["start"], mine["end"]) for mine in own["ranks"]] == [(1, start, None)]


@pytest.mark.spec("C17")
def test_C17_collectives_are_named_in_the_trace_with_their_numbers(folder):
    for rank in (0, 1):
        events = trace_of(folder, rank)["traceEvents"]
        labels = {e["name"] for e in events if e["ph"] == "X" and e["name"].startswith("comm:")}
        steps = {int(m[1]) for e in events if (m := re.fullmatch(r"iteration#(\d+)", e["name"]))}
        rows = [row for s in record(folder, rank).steps if s.global_step in steps for row in s.collectives]
        assert labels == {f"comm:{row.kind}#{row.seq} group={row.group}" for row in rows}
        assert labels


@pytest.mark.spec("C16")
def test_C16_raw_the_merged_trace_breaks_causality_and_aligned_it_does_not(folder, tmp_path):
    raw = merge(folder, tmp_path / "raw.json", "--align", "none")
    assert raw.returncode == 1, raw.stderr
    assert "ends before rank 1 begins" in raw.stdout
    aligned = merge(folder, tmp_path / "merged.json.gz")
    assert aligned.returncode == 0, aligned.stderr
    merged = load(tmp_path / "merged.json.gz")
    assert problems(merged) == []
    found = merged["aorta"]["causality"]
    assert found["pairs"] > 0
    assert (found["violations"], found["unknown_bounds"]) == (0, 0)
    for rank in (0, 1):
        shown = sum(event["ph"] == "X" for event in trace_of(folder, rank)["traceEvents"])
        assert merged["aorta"]["events"][str(rank)]["X"] == shown
        # Kineto's clock and the record's are the same within a step.
        longest_us = max(step.end_mono_ns - step.start_mono_ns for step in record(folder, rank).steps) / 1e3
        assert merged["aorta"]["trace_to_record_us"][str(rank)] < longest_us
