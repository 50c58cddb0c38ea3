"""Real launches as a user starts them: plans of one launch a side, through the script and of a program of one's own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from aorta.experiments.launch_folder import PLAN_JOURNAL
from aorta.read.record import load_run
from tests.libraries import stand_in
from tests.runs import ROOT, SMALL, environment, finished, losses

pytestmark = pytest.mark.dist


def test_a_plan_of_one_launch_a_side(tmp_path: Path) -> None:
    words = [
        "--output",
        "a plan",
        "--launches",
        "1",
        "--no-report",
        "--torchrun",
        "--max-restarts 0",
    ]
    sides = [
        "training.seed=11",
        "--reference",
        "parallel.overlap=true",
        "--candidate",
        "parallel.overlap=false fabric=emulated fabric.sharing=link",
    ]
    script = str(ROOT / "scripts" / "ab.sh")
    done = finished(["bash", script, *words, *sides, *SMALL, "training.device=cpu"], folder=tmp_path)
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
    assert losses(plan / "candidate" / "00") == losses(plan / "reference" / "00")  # only times are emulated
    note = run.health.notes[0]
    assert note.startswith("EMULATED FABRIC: ")
    assert "groups of a rank share its links" in note
    events = [json.loads(line) for line in (plan / PLAN_JOURNAL).read_text().splitlines()]
    ends = [(event["launch"], event["left_behind"]) for event in events if event["event"] == "end"]
    assert ends == [("reference/00", 0), ("candidate/00", 0)]
    assert {path.name for path in tmp_path.iterdir()} == {"a plan"}


@pytest.mark.thorough
def test_a_program_of_the_users_own_with_two_builds_of_a_library(tmp_path: Path) -> None:
    builds = {side: stand_in(tmp_path / side, 22703, side) for side in ("reference", "candidate")}
    program = f"{{torchrun}} --standalone --nproc_per_node 2 {ROOT}/docs/examples/ddp.py {{output}}"
    command = [sys.executable, "-m", "aorta", "ab", "--output", "o", "--launches", "1", "--command", program]
    own = environment(PYTHONPATH=str(ROOT))
    reference, candidate = (f"env.LD_PRELOAD={library}" for library in builds.values())
    sides = ["--reference", reference, "--candidate", f"{candidate} env.NCCL_ALGO=Tree"]
    done = finished([*command, *sides], own=own, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for side, algorithm in (("reference", None), ("candidate", "Tree")):
        run = load_run(tmp_path / "o" / side / "00")
        assert (run.health.world_size, len(run.ranks[0].steps)) == (2, 12)
        manifest = json.loads((tmp_path / "o" / side / "00" / "run.json").read_text())
        assert manifest["environment"].get("NCCL_ALGO") == algorithm
        assert manifest["collective_library"]["path"] == str(builds[side])
        assert manifest["collective_library_differences"] == {}
    assert "aorta report o --all" in done.stdout
    found = json.loads((tmp_path / "reports" / "o" / "summary.json").read_text())["comparison"]
    differ = [each["key"] for each in found["manifest_differences"]]
    assert differ == ["collective_library", "environment.LD_PRELOAD", "environment.NCCL_ALGO"]
    assert found["losses"]["sentence"] == "bit-equal in all 24 rank-steps"
