"""Many launches on four ranks: no hang and no abort (docs/dev/measuring.md, K4). Outside the gate: an hour on two
cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import record, train

pytestmark = [pytest.mark.dist, pytest.mark.slow]
LAUNCHES = 30


@pytest.mark.timeout(0)
@pytest.mark.parametrize("strategy", ["hsdp", "fsdp_tp"])
def test_launches_neither_hang_nor_abort(tmp_path: Path, strategy: str) -> None:
    for launch in range(LAUNCHES):
        folder = tmp_path / str(launch)
        train(folder, f"parallel={strategy}", "training.timeout_s=60", ranks=4, timeout_s=240, launcher="torchrun")
        for rank in range(4):
            steps = record(folder, rank).steps
            assert len(steps) == 8
            assert all(step.coverage.complete for step in steps)
