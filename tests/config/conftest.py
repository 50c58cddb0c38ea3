"""The door of this room: the command line of `train.py`, run inside the test process."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from aorta.config.resolve import Resolved
from aorta.train_command import compose as main
from tests.composed import composed

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


class Door:
    """Types a command line; the run behind the door only notes what it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *words: str) -> Answer:
        GlobalHydra.instance().clear()
        jobs: list[Resolved] = []

        def run(resolved: Resolved) -> int:
            jobs.append(resolved)
            return 0

        self._monkeypatch.setattr(sys, "argv", ["train.py", *words])
        self._capsys.readouterr()
        try:
            code = main(run, ROOT / "config")
        except SystemExit as end:  # Hydra ends the process itself after --help
            code = int(str(end.code))
        said = self._capsys.readouterr()
        return Answer(code, said.out, said.err, jobs)

    def shown(self, *words: str) -> dict[str, object]:
        """What `--cfg job` prints."""
        answer = self(*words, "--cfg", "job")
        assert answer.code == 0, answer.err
        shown = OmegaConf.to_container(OmegaConf.create(answer.out))
        assert isinstance(shown, dict)
        return {str(key): value for key, value in shown.items()}


@pytest.fixture(name="composed")
def composed_fixture():
    """Composes the default configuration with some words, without a command line."""
    return composed


@pytest.fixture
def door(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # the door sets it; this puts it back
    monkeypatch.chdir(tmp_path)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield Door(monkeypatch, capsys)
    # A configuration that does not build on ours gets Hydra's own logging.
    root.handlers[:] = handlers
    root.setLevel(level)
    GlobalHydra.instance().clear()
