"""The user's own words, from a folder that is not the repository: train, trace, report."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT, finished, record, succeeded, train

pytestmark = pytest.mark.dist
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", str(ROOT / "train.py")]
REPORT = [sys.executable, str(ROOT / "analysis" / "overlap_report.py")]


@pytest.mark.spec("D40")
def test_torchrun_train_with_profiling_and_nothing_else(tmp_path: Path) -> None:
    succeeded(finished([*TORCHRUN, "profiling.enabled=true"], folder=tmp_path))
    kept = record(tmp_path / "artifacts")
    assert len(kept.steps) == 200
    assert kept.header.world_size == 1
    (trace,) = (tmp_path / "artifacts" / "torch_profiler" / "rank0").iterdir()
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"iteration#2", "iteration#3"} <= names
    assert {path.name for path in tmp_path.iterdir()} == {"artifacts"}


@pytest.mark.thorough
@pytest.mark.spec("D19", "D26")
def test_a_step_contains_its_marker_in_the_trace(tmp_path: Path) -> None:
    train(tmp_path, "profiling.enabled=true", "profiling.active=5", ranks=1)
    (path,) = (tmp_path / "torch_profiler" / "rank0").iterdir()
    trace = json.loads(path.read_text())
    begins_ns = {
        event["name"]: trace["baseTimeNanoseconds"] + round(event["ts"] * 1000)
        for event in trace["traceEvents"]
        if event.get("cat") == "user_annotation" and event["ph"] == "X"
    }
    steps = record(tmp_path).steps
    nearest = []
    for step in steps:
        begin_ns = begins_ns.get(f"iteration#{step.global_step}")
        if begin_ns is not None:
            nearest.append(min(steps, key=lambda other: abs(other.t_start_ns - begin_ns)) is step)
            times = [step.t_start_ns + at for part in step.active_segments for at in (part.start_ns, part.end_ns)]
            assert times == sorted(times)
            assert step.t_start_ns <= times[0] < times[-1] <= step.t_end_ns
    # Two clocks read one after the other: a machine busy with other things can put a step to sleep in between.
    assert len(nearest) == 5
    assert nearest.count(True) >= 3


@pytest.mark.thorough
@pytest.mark.spec("D22", "D42")
def test_report_of_two_labels_from_anywhere(tmp_path: Path) -> None:
    for label in ("cuda", "rocm"):
        shutil.copytree(ROOT / "tests" / "samples" / "two_gloo_ranks", tmp_path / "artifacts" / label)
    done = succeeded(finished([*REPORT, "--reference", "cuda", "--candidate", "rocm"], folder=tmp_path))
    assert done.stdout.startswith("[?] Not tested: ")
    folder = tmp_path / "reports" / "rocm-vs-cuda"
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary["datasets"]) == {"cuda", "rocm"}
    assert {"cuda_timeline.png", "rocm_timeline.png"} <= {path.name for path in folder.iterdir()}
