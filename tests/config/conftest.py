"""The door of this room: the command line of `train.py`, run inside the test process."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from aorta.config.resolve import Resolved
from aorta.train_command import compose as main

ROOT = Path(__file__).parents[2]


@dataclass
class Answer:
    """What one command line came to: exit code, words, and what would have run."""

    code: int
    out: str
    err: str
    jobs: list[Resolved]

    @property
    def job(self) -> Resolved:
        assert self.code == 0, self.err
        (job,) = self.jobs
        return job


@pytest.fixture
def door(monkeypatch, capsys, tmp_path):
    """Types a command line; the run behind the door only notes what it was given."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # the door sets it; this puts it back
    monkeypatch.chdir(tmp_path)

    def typed(*words: str) -> Answer:
        GlobalHydra.instance().clear()
        jobs: list[Resolved] = []
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        capsys.readouterr()
        try:
            code = main(lambda resolved: jobs.append(resolved) or 0, ROOT / "config")
        except SystemExit as end:  # Hydra ends the process itself after --help
            code = int(str(end.code))
        return Answer(code, *capsys.readouterr(), jobs)

    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield typed
    # A configuration that does not build on ours gets Hydra's own logging.
    root.handlers[:] = handlers
    root.setLevel(level)
    GlobalHydra.instance().clear()
