"""A machine whose only programs are stand-ins: `program(name, text)` puts a shell script on PATH."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("cat", "echo", "sleep"):
        found = shutil.which(name)
        assert found
        (folder / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(folder))

    def put(name: str, text: str) -> Path:
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
        return folder / name

    return put
