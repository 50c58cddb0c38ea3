"""Real launches: one a side, of the smallest training, through the script; what differs is what was asked for."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from aorta.analysis.load.records import load_run
from aorta.experiments.journal import read_plan_history
from tests.runs import HANGS_S, ROOT, SMALL, environment

pytestmark = pytest.mark.dist


def test_a_plan_of_one_launch_a_side(tmp_path: Path) -> None:
    words = ["--output", "a plan", "--launches", "1", "--seed", "11", "--torchrun", "--max-restarts 0"]
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
