"""The user's own words, from a folder that is not the repository: train, trace, report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from tests.runs import HANGS_S, ROOT, SMALL, environment, record

pytestmark = pytest.mark.dist
REPORT = [sys.executable, str(ROOT / "analysis" / "overlap_report.py")]


def run(words: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=cwd, capture_output=True, text=True, env=environment(), timeout=HANGS_S, check=False
    )


def torchrun(*words: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", str(ROOT / "train.py"), *words]


@pytest.mark.spec("D40")
def test_torchrun_train_with_profiling_and_nothing_else(tmp_path: Path) -> None:
    done = run(torchrun("profiling.enabled=true"), tmp_path)
    assert done.returncode == 0, done.stderr
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
    done = run(torchrun(*SMALL, "profiling.enabled=true", "profiling.active=5"), tmp_path)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "artifacts" / "torch_profiler" / "rank0").iterdir()
    trace = json.loads(path.read_text())
    base_ns = trace["baseTimeNanoseconds"]
    marks = {e["name"]: e for e in trace["traceEvents"] if e.get("cat") == "user_annotation" and e["ph"] == "X"}
    apart_ns = []
    for step in record(tmp_path / "artifacts").steps:
        mark = marks.get(f"iteration#{step.global_step}")
        if mark is not None:
            begin_ns = base_ns + round(mark["ts"] * 1000)
            end_ns = begin_ns + round(mark["dur"] * 1000)
            apart_ns.append(max(abs(step.t_start_ns - begin_ns), step.t_end_ns - end_ns))
            times = [step.t_start_ns + at for part in step.active_segments for at in (part.start_ns, part.end_ns)]
            assert times == sorted(times)
            assert step.t_start_ns <= times[0] < times[-1] <= step.t_end_ns
    # Two clocks read one after the other: a machine busy with other things can put the step to sleep in between.
    assert len(apart_ns) == 5
    assert median(apart_ns) < 2e6


@pytest.mark.thorough
@pytest.mark.spec("D22", "D42")
def test_report_of_two_labels_from_anywhere(tmp_path: Path) -> None:
    for label in ("cuda", "rocm"):
        launched = torchrun(*SMALL, f"label={label}")
        launched[3:3] = ["--standalone", "--nproc_per_node", "2"]  # one rank hides nothing, so nothing could be tested
        done = run(launched, tmp_path)
        assert done.returncode == 0, done.stderr
    done = run([*REPORT, "--reference", "cuda", "--candidate", "rocm"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[?] Not tested: ")
    folder = tmp_path / "reports" / "rocm-vs-cuda"
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary["datasets"]) == {"cuda", "rocm"}
    assert {"cuda_timeline.png", "rocm_timeline.png"} <= {path.name for path in folder.iterdir()}


@pytest.mark.thorough
def test_older_words_run_the_same_job(tmp_path: Path) -> None:
    words = ["--config", "config/default.yaml", "--override", *SMALL, "training.max_steps=3", "--enable-rocm-metrics"]
    done = run(torchrun(*words), tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(record(tmp_path / "artifacts").steps) == 3
    assert "telemetry.rocm_smi: not sampled, as this run computes on cpu" in done.stderr
