"""The scripts of docs/examples on two gloo ranks: what they leave, and that the three lines change nothing."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.profiling.windows import files_below, numbers, read
from tests.runs import ROOT, program, record, succeeded

pytestmark = [pytest.mark.dist, pytest.mark.thorough]

EXAMPLES = ROOT / "docs" / "examples"
LOSS = re.compile(r"rank (\d+) step (\d+) loss ([0-9.e-]+)")
MARK = "# AORTA, "


def run(script: Path, *words: str) -> dict[tuple[int, int], float]:
    """Run on two ranks; the loss each rank printed, by rank and step."""
    done = succeeded(program(script, *words))
    return {(int(rank), int(step)): float(loss) for rank, step, loss in LOSS.findall(done.stdout)}


def without_the_lines(script: Path, target: Path) -> Path:
    """The same script with its marked lines taken out."""
    lines = script.read_text().splitlines()
    marked = [line for line in lines if MARK in line]
    assert sum("line" in line.rpartition(MARK)[2] for line in marked) == 3
    kept = [re.sub(r"with .*", "if True:", line) if "with aorta" in line else line for line in lines]
    target.write_text("\n".join(line for line in kept if MARK not in line))
    assert "aorta" not in target.read_text().partition("def main")[2].partition("__main__")[0]
    return target


@pytest.mark.parametrize(("name", "micro_batches"), [("ddp", 1), ("fsdp2", 2)])
def test_example(tmp_path, name, micro_batches):
    folder = tmp_path / "run"
    losses = run(EXAMPLES / f"{name}.py", str(folder))
    assert losses == run(without_the_lines(EXAMPLES / f"{name}.py", tmp_path / "plain.py"))
    assert len(losses) == 2 * len(record(folder).steps) >= 16
    blocks = json.loads((folder / "run.json").read_text())["plan"]["blocks"]
    assert len(blocks) >= 5
    for rank in (0, 1):
        seen = record(folder, rank)
        assert (seen.problems, seen.footer.reason, seen.header.world_size) == ([], "completed", 2)
        assert [step.global_step for step in seen.steps] == list(range(len(seen.steps)))
        assert all(step.coverage.complete and step.coverage.seen > 0 for step in seen.steps)
        assert all(step.overlap["overlap_ratio"] is not None for step in seen.steps)
        passes = Counter((span.block, span.phase) for span in seen.steps[-1].compute)
        assert passes == {(block, phase): micro_batches for block in blocks for phase in ("forward", "backward")}
    noted = [(losses[0, step], 1e-3) if name == "ddp" else (None, None) for step in range(len(losses) // 2)]
    assert [(step.loss, step.lr) for step in record(folder).steps] == noted


@pytest.mark.spec("A1", "A5")
def test_the_profiled_example(tmp_path):
    run(EXAMPLES / "profiled.py", str(tmp_path / "traces"))
    names = [f"rank-{rank}-coord-0-{rank}-trace.tar.gz" for rank in (0, 1)]
    assert files_below(tmp_path / "traces") == [f"step_{step}/{name}" for step in (12, 6) for name in names]
    for name in names:
        assert numbers(read(tmp_path / "traces" / "step_12" / name)) == [10, 11]
