"""Start a sweep as a user would, and read back what it left."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aorta.sweep.journal import Sweep, read_sweep
from tests.config.conftest import door
from tests.runs import HANGS_S, ROOT, SMALL, environment

__all__ = ["door"]


def command(folder: Path, *words: str) -> list[str]:
    """A sweep of small runs below `folder`; later words win."""
    return [sys.executable, str(ROOT / "train.py"), "-m", *SMALL, f"training.output_dir={folder}", *words]


@pytest.fixture
def sweep(tmp_path: Path) -> Callable[..., tuple[subprocess.CompletedProcess[str], Sweep]]:
    """Runs one to its end; returns how it ended, and its journal."""

    def run(*words: str, name: str = "sweep") -> tuple[subprocess.CompletedProcess[str], Sweep]:
        done = subprocess.run(
            command(tmp_path, *words), capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=HANGS_S
        )
        assert (tmp_path / name / "sweep.jsonl").exists(), done.stderr
        return done, read_sweep(tmp_path / name)

    return run
