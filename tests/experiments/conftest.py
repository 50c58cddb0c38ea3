"""Plans with a stand-in for an interpreter, called or started."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aorta.experiments.plan_command import main
from tests.runs import ROOT, environment

FAKE = Path(__file__).with_name("fake_torchrun.py")


@dataclass
class Bench:
    """`home` is where the command runs, `python` the stand-in."""

    home: Path
    python: Path
    capsys: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch

    def program(self, name: str) -> Path:
        """The stand-in under another name, which it tells in its record as FAKE_NAME."""
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/sh\nFAKE_NAME="{name}" exec "{sys.executable}" "{FAKE}" "$@"\n')
        path.chmod(0o755)
        return path

    def acts(self, **acts: dict[str, Any]) -> None:
        """What launches do: `reference_00={"fail": 1}`."""
        self.monkeypatch.setenv("FAKE_ACTS", json.dumps({name.replace("_", "/"): act for name, act in acts.items()}))

    def __call__(self, *words: str) -> tuple[int, str, str]:
        """The command in this process: exit code, stdout, stderr."""
        code = main([*self._always(words), *words])
        return code, *self.capsys.readouterr()

    def start(self, *words: str, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
        """The command in a process of its own."""
        command = [sys.executable, "-m", "aorta", "ab", *self._always(words), *words]
        return subprocess.Popen(
            command,
            cwd=self.home,
            env=environment(PYTHONPATH=str(ROOT)),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )

    def _always(self, words: tuple[str, ...]) -> list[str]:
        asked = [] if any(word.startswith("python=") for word in words) else [f"python={self.python}"]
        return ["--output", "plan", *asked, *([] if "--report" in words else ["--no-report"])]

    @property
    def calls(self) -> list[dict[str, Any]]:
        """What the stand-in was called with."""
        path = self.home / "record.jsonl"
        if not path.exists():
            return []
        *lines, _unfinished = path.read_text().split("\n")  # it may be at its next one
        return [json.loads(line) for line in lines]

    @property
    def launched(self) -> list[str]:
        """Names of the launches, in the order they were started."""
        return [call["name"] for call in self.calls if call["call"] == "launch"]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Lines of the plan's journal, without one that a kill cut short."""
        path = self.home / "plan" / "journal.jsonl"
        found = []
        for line in path.read_text().splitlines() if path.exists() else []:
            with suppress(ValueError):
                found.append(json.loads(line))
        return [event for event in found if event["event"] == kind]


@pytest.fixture
def bench(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAKE_RECORD", str(tmp_path / "record.jsonl"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as runner processes have it: plans of two environments do not mix
    for name in ("FAKE_ACTS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    made = Bench(tmp_path, tmp_path / "fake", capsys, monkeypatch)
    made.program("fake")
    return made
