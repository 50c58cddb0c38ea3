"""`aorta record`: scripts that know nothing of AORTA are recorded, and do what they did."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.runs import ROOT, environment, finished, program, record, succeeded

SCRIPT = Path(__file__).with_name("untouched.py")
ON_FORKED = "tests.runner.untouched_on_forked_ranks"


def weights(done: subprocess.CompletedProcess[str]) -> list[str]:
    return sorted(line for line in done.stdout.splitlines() if line.startswith("weights"))


@cache
def plain(*words: str) -> subprocess.CompletedProcess[str]:
    with TemporaryDirectory() as folder:
        return program(ON_FORKED, f"{folder}/plain", *words)


def recorded(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run on two ranks; fails the test unless it ended and trained as without AORTA."""
    done = program(ON_FORKED, str(folder), *words)
    assert done.returncode == plain(*words).returncode, done.stderr
    assert weights(done) == weights(plain(*words))
    return done


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "forwards", "optimizers"),
    [
        ("plain", [1] * 7, [1] * 7),
        ("accumulation", [3] * 7, [1] * 7),
        ("scaler", [1] * 7, [1, 0, 1, 1, 1, 1, 1]),
        ("evaluation", [1] * 7, [1] * 7),
        ("break", [1] * 3, [1] * 3),
        ("gan", [2] * 7, [2] * 7),
    ],
)
def test_steps_and_collectives(tmp_path: Path, kind: str, forwards: list[int], optimizers: list[int]) -> None:
    recorded(tmp_path, kind)
    for rank in (0, 1):
        seen = record(tmp_path, rank)
        assert seen.footer is not None
        assert (seen.footer.reason, seen.footer.exit_code) == ("completed", 0)
        assert [step.global_step for step in seen.steps] == list(range(1, 1 + len(forwards)))
        all_reduces = [sum(one.kind == "allreduce" for one in step.collectives) for step in seen.steps]
        assert all_reduces == (forwards if kind != "gan" else [3] * 7)  # the critic sees two batches a backward pass
        assert all(step.coverage.complete for step in seen.steps)
        first = seen.steps[0].compute[0].block
        passes = [sum(one.block == first and one.phase == "forward" for one in step.compute) for step in seen.steps]
        assert passes == forwards
        assert [len(step.aux) for step in seen.steps] == optimizers
        assert all(
            step.lr == 0.01 and step.loss is None and "aorta record" in step.reasons["loss"] for step in seen.steps
        )
        assert not any("boundary" in step.reasons for step in seen.steps)


def aorta_record(folder: Path, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    own = environment(**{"PYTHONPATH": str(ROOT)} | extra)
    return finished([sys.executable, "-m", "aorta", "record", str(folder), "--", *words], own=own)


def test_one_process_that_hides_a_sitecustomize(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import sys; sys.own = 'mine'; there = __file__")
    (tmp_path / "script.py").write_text(
        f"import runpy, sys, sitecustomize; print(sys.own, sitecustomize.there)\n"
        f"sys.argv = ['x', 'plain', '4']; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    run = tmp_path / "run"
    path = f"{own}:{ROOT}"
    done = succeeded(aorta_record(run, sys.executable, str(tmp_path / "script.py"), PYTHONPATH=path))
    assert done.stdout.splitlines()[0] == f"mine {own}/sitecustomize.py"
    seen = record(run)
    assert (len(seen.steps), seen.header.world_size) == (3, 1)
    assert "3 steps recorded" in done.stderr
