"""Real launches as a user starts them, through the script: one a side, of a program of one's own. Those of train.py are
launched by the demo (`tests/test_package.py`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aorta.experiments.launch_journal import PLAN_JOURNAL
from aorta.read.record import load_run
from tests.libraries import stand_in
from tests.runs import ROOT, finished

pytestmark = pytest.mark.dist


def test_a_program_of_the_users_own_with_two_builds_of_a_library(tmp_path: Path) -> None:
    builds = {side: stand_in(tmp_path / side, 22703, side) for side in ("reference", "candidate")}
    program = f"{{torchrun}} --standalone --nproc_per_node 2 {ROOT}/docs/examples/ddp.py {{output}}"
    command = ["bash", str(ROOT / "scripts" / "ab.sh"), "--output", "o", "--launches", "1", "--command", program]
    reference, candidate = (f"env.LD_PRELOAD={library}" for library in builds.values())
    sides = ["--reference", reference, "--candidate", f"{candidate} env.NCCL_ALGO=Tree"]
    done = finished([*command, *sides], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (tmp_path / "o" / PLAN_JOURNAL).read_text().splitlines()]
    ends = [(event["launch"], event["left_behind"]) for event in events if event["event"] == "end"]
    assert ends == [("reference/00", 0), ("candidate/00", 0)]
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
