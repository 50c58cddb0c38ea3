"""Real launches as a user starts them: a plan of one a side through the script, and `aorta tune` up to its verdict."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from aorta.analysis.load.records import load_run
from aorta.experiments.journal import read_plan_history
from tests.runs import HANGS_S, ROOT, SMALL, environment

pytestmark = pytest.mark.dist


def test_a_plan_of_one_launch_a_side(tmp_path: Path) -> None:
    words = ["--output", "a plan", "--launches", "1", "--no-report", "--seed", "11", "--torchrun", "--max-restarts 0"]
    sides = ["--reference", "parallel.overlap=true", "--candidate", "parallel.overlap=false fabric=emulated"]
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "ab.sh"), *words, *sides, *SMALL, "training.device=cpu"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert done.returncode == 0, done.stderr
    plan = tmp_path / "a plan"
    for side, overlap, fabric in (("reference", True, "none"), ("candidate", False, "emulated")):
        run = load_run(plan / side / "00")
        assert (run.health.world_size, len(run.ranks[0].steps)) == (2, 8)
        manifest = json.loads((plan / side / "00" / "run.json").read_text())
        assert manifest["config"]["parallel"]["overlap"] is overlap
        assert manifest["config"]["fabric"]["kind"] == fabric
        assert manifest["config"]["training"]["seed"] == 11
        assert manifest["command"][-1] == "label=null"
    ends = read_plan_history(plan).ended
    assert [(end.launch, end.left_behind) for end in ends] == [("reference/00", 0), ("candidate/00", 0)]
    assert {path.name for path in tmp_path.iterdir()} == {"a plan"}


def ab(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aorta", "ab", "--output", "o", "--launches", "1", *words],
        cwd=folder,
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
    )


@pytest.mark.thorough
def test_a_program_of_the_users_own(tmp_path: Path) -> None:
    program = f"{{torchrun}} --standalone --nproc_per_node 2 {ROOT}/docs/examples/ddp.py {{output}}"
    done = ab(tmp_path, "--command", program, "--candidate-env", "NCCL_ALGO=Tree")
    assert done.returncode == 0, done.stderr
    for side, algorithm in (("reference", None), ("candidate", "Tree")):
        run = load_run(tmp_path / "o" / side / "00")
        assert (run.health.world_size, len(run.ranks[0].steps)) == (2, 12)
        manifest = json.loads((tmp_path / "o" / side / "00" / "run.json").read_text())
        assert manifest["environment"].get("NCCL_ALGO") == algorithm
    assert "aorta report o --all" in done.stdout
    assert (tmp_path / "reports" / "o" / "summary.json").is_file()


def test_a_program_that_leaves_no_record_has_failed(tmp_path: Path) -> None:
    done = ab(tmp_path, "--command", "true {output}")
    assert done.returncode == 5
    assert "exit code 0, but no readable run.json in" in done.stderr
    assert "the program has to give {output} of its command to aorta.record" in done.stderr


LAUNCHES = 4
"""A side; the fewest from which a verdict on one candidate can come."""
BASE = (
    *SMALL,
    *("training.device=cpu", "parallel=ddp", "parallel.bucket_cap_mb=0.02"),
    *("fabric=emulated", "fabric.inter_latency_us=10000"),  # a dozen buckets in a row, far beyond this machine's noise
)


def tune(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aorta", "tune", "--output", "t", "--launches", str(LAUNCHES), *words, *BASE],
        cwd=folder,
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
    )


@pytest.mark.alone
@pytest.mark.thorough
def test_larger_buckets_are_recommended_on_a_network_of_long_latency(tmp_path: Path) -> None:
    done = tune(tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "t" / "tune.json").read_text())
    tried, *others = found["proposals"]
    assert tried["tried"]
    assert not any(each["tried"] for each in others)
    assert tried["comparison"]["verdict"] == "improvement"
    assert tried["comparison"]["launch_order"]["sequence"] == "RCCRRCCR"
    assert tried["predicted_from"] in {"refine-1", "refine-2"}
    recordings = 1 + len(list((tmp_path / "t").glob("refine-*")))  # one where the best one stays the best
    assert found["launches"] == {
        "recordings": recordings,
        "per_side": LAUNCHES,
        "total": recordings + 2 * LAUNCHES,
    }
    # Larger buckets above all; whether another change goes with them is what a noisy base run was predicted from.
    words = found["recommendation"]["overrides"]
    bucket = dict(word.split("=", 1) for word in words)["parallel.bucket_cap_mb"]
    assert float(bucket) > 0.02
    manifest = json.loads((tmp_path / "t" / "launches" / "candidate-1" / "00" / "run.json").read_text())
    assert f"{manifest['config']['parallel']['bucket_cap_mb']:g}" == bucket
    assert f"\nrecommendation: {' '.join(words)}\n" in done.stdout

    # The same command again launches nothing.
    again = tune(tmp_path)
    assert again.returncode == 0, again.stderr
    assert "done in" not in again.stderr
    assert json.loads((tmp_path / "t" / "tune.json").read_text()) == found
