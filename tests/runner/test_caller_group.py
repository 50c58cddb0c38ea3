"""aorta.record on two ranks whose process group came from no launcher."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import HANGS_S, ROOT, environment, record

pytestmark = pytest.mark.dist

SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import aorta

rank, meeting, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
model = DistributedDataParallel(torch.nn.Linear(2, 2))
for run in ("whole", "broken"):
    with aorta.record(f"{folder}/{run}", model=model) as recording:
        for step in range(3):
            if (run, step, rank) == ("broken", 2, 1):
                raise ValueError("bad batch")
            model(torch.ones(1, 2)).sum().backward()
            recording.step()
"""


def test_two_recordings_of_one_group_and_a_rank_that_fails(tmp_path: Path) -> None:
    words = [str(tmp_path / "meeting"), str(tmp_path)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), *words],
            cwd=ROOT,
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    errors = [process.communicate(timeout=HANGS_S)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [1, 1]
    assert "ValueError: bad batch" in errors[1]

    for rank in (0, 1):
        seen = record(tmp_path / "whole", rank)
        assert seen.footer is not None
        assert (seen.footer.reason, len(seen.steps)) == ("completed", 3)
        assert all(step.coverage.complete and step.coverage.seen >= 1 for step in seen.steps)
        assert seen.header.local_rank == rank
        assert seen.header.node_rank == 0
    ids = {record(tmp_path / run, rank).header.run_id for run in ("whole", "broken") for rank in (0, 1)}
    assert len(ids) == 2
    assert json.loads((tmp_path / "broken" / "run.json").read_text())["world_size"] == 2

    told, met = (record(tmp_path / "broken", rank).footer for rank in (1, 0))
    assert told is not None
    assert met is not None
    assert told.error == "rank 1: ValueError: bad batch"
    assert (met.reason, met.exit_code, met.steps_written) == ("error", 1, 2)
    assert (met.error or "").startswith("rank 0: RuntimeError")
