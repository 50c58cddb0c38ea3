"""The user's own words, from a folder that is not the repository: train, trace, report."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT, finished, record, succeeded

pytestmark = pytest.mark.dist
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", str(ROOT / "train.py")]
REPORT = [sys.executable, str(ROOT / "analysis" / "overlap_report.py")]


@pytest.mark.spec("D40")
def test_torchrun_train_with_profiling_and_nothing_else(tmp_path: Path) -> None:
    done = succeeded(finished([*TORCHRUN, "profiling.enabled=true"], folder=tmp_path))
    kept = record(tmp_path / "artifacts")
    assert len(kept.steps) == 200
    assert kept.header.world_size == 1
    (trace,) = (tmp_path / "artifacts" / "torch_profiler" / "rank0").iterdir()
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"iteration#2", "iteration#3"} <= names
    assert {path.name for path in tmp_path.iterdir()} == {"artifacts"}
    assert [line.partition("Next: ")[2] for line in done.stderr.splitlines() if "Next: " in line] == [
        "aorta report artifacts",
        f"https://ui.perfetto.dev, Open trace file: {trace.relative_to(tmp_path)}",
    ]


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
