"""A repository and a machine to run the shell scripts in: nothing of the real machine's PATH gets in.

`repo` is a copy of `scripts/` in a folder with a blank in its name; `sh` runs a script there with stand-ins on PATH.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
STANDINS = Path(__file__).parent / "standins"
SYSTEM = [
    *("bash", "sh", "env", "cat", "chmod", "cmp", "date", "dirname", "find", "grep", "head", "mkdir", "readlink"),
    *("rm", "sed", "sleep", "sort", "tr", "wc"),
]


@dataclass
class Result:
    """What one script left: exit code, words, and each call of the stand-in for torchrun."""

    code: int
    out: str
    err: str
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def argv(self) -> list[str]:
        (call,) = self.calls
        return call["argv"]


@dataclass
class Shell:
    """Runs scripts of one repository in one environment."""

    repo: Path
    bin: Path
    home: Path

    def program(self, name: str, text: str) -> None:
        """Put a shell program on PATH."""
        (self.bin / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.bin / name).chmod(0o755)

    def standin(self, name: str, file: str) -> None:
        """Put a Python stand-in on PATH."""
        self.program(name, f'exec "{sys.executable}" -S -E "{STANDINS / file}" "$@"')

    def __call__(self, script: str | Path, *arguments: str, cwd: Path | None = None, **environment: str) -> Result:
        record = self.home / "record.jsonl"
        record.unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", str(self.repo / "scripts" / script), *arguments],
            cwd=cwd or self.home,
            env={"PATH": str(self.bin), "HOME": str(self.home), "RECORD": str(record), **environment},
            capture_output=True,
            text=True,
            timeout=600,
        )
        calls = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
        return Result(done.returncode, done.stdout, done.stderr, calls)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    repo = tmp_path / "a repository"
    shutil.copytree(ROOT / "scripts", repo / "scripts")
    (repo / "config").mkdir()
    for name in ("config/default.yaml", "train.py", "pyproject.toml", "constraints.txt"):
        (repo / name).write_text("")
    return repo


@pytest.fixture
def sh(tmp_path: Path, repo: Path) -> Shell:
    shell = Shell(repo, tmp_path / "bin", tmp_path / "the caller's")
    shell.bin.mkdir()
    shell.home.mkdir()
    for name in SYSTEM:
        found = shutil.which(name)
        assert found, f"these tests need {name} on PATH ({os.environ['PATH']})"
        (shell.bin / name).symlink_to(found)
    shell.standin("torchrun", "torchrun.py")
    return shell


@pytest.fixture
def launch(sh):
    """A launcher or a capture with one process and one trace, on a machine with both tracers."""
    for tool in ("rocprofv3", "nsys"):
        sh.standin(tool, f"{tool}.py")
    return lambda script, *words, **own: sh(script, *words, **{"NPROC": "1", "STANDIN_TRACES": "1"} | own)


def ready(sh, repo, extras="dev"):
    """What setup.sh leaves behind, with stand-ins for every program of the environment."""
    folder = repo / ".venv/bin"
    folder.mkdir(parents=True)
    for name in ("python", "torchrun", "ruff", "mypy", "lint-imports"):
        sh.standin(name, "torchrun.py")
        (sh.bin / name).rename(folder / name)
    script = (repo / "scripts/setup.sh").read_text()
    (repo / f".venv/{extras}.stamp").write_text(f"{repo}\n{script}")  # pyproject.toml and constraints.txt are empty
    return folder / "python"
