"""Forked ranks begin as those of torchrun do, and one that fails ends the others."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import forked
from tests.runs import HANGS_S, Launcher, environment, program, succeeded

pytestmark = [pytest.mark.dist, pytest.mark.thorough]
FAILING = """
import os, time
from pathlib import Path

ready = Path(__file__).with_name("ready")
if os.environ["RANK"] == "0":
    print(os.getpid(), flush=True)
    ready.touch()
    time.sleep(600)
while not ready.exists():
    time.sleep(0.01)
"""


@pytest.mark.parametrize(("how", "code"), [("raise ValueError('made to fail')", 1), ("os.kill(os.getpid(), 9)", -9)])
def test_a_rank_that_fails_ends_the_others(tmp_path: Path, how: str, code: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILING + how)
    done = forked(script, ranks=2, environment=environment(), timeout_s=HANGS_S)
    assert done.returncode == code
    assert f"rank 1 failed; exit codes by rank: [-15, {code}]" in done.stderr
    assert ("ValueError: made to fail" in done.stderr) is ("ValueError" in how)
    with pytest.raises(ProcessLookupError):
        os.killpg(int(done.stdout), 0)


def test_a_forked_rank_begins_as_one_of_torchrun_does(tmp_path: Path) -> None:
    launchers: tuple[Launcher, ...] = ("fork", "torchrun")
    ranks: dict[str, list[dict[str, Any]]] = {}
    for launcher in launchers:
        (tmp_path / launcher).mkdir()
        succeeded(program("tests.program_environment", str(tmp_path / launcher), launcher=launcher))
        ranks[launcher] = [json.loads((tmp_path / launcher / f"{rank}.json").read_text()) for rank in (0, 1)]
    for by_fork, by_torchrun in zip(ranks["fork"], ranks["torchrun"], strict=True):
        assert by_fork["same"] == by_torchrun["same"]
        assert by_fork["modules"] > by_torchrun["modules"]  # what the fork saves
