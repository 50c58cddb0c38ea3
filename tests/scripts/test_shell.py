"""Every shell script parses, is clean, is executable and begins by saying what it is for."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.scripts.conftest import ROOT

RUN = [
    *ROOT.glob("scripts/*.sh"),
    *ROOT.glob("scripts/*.sbatch"),
    ROOT / "scripts/check",
    ROOT / "scripts/fuzz",
    ROOT / "scripts/mutants",
    ROOT / "scripts/torch_versions",
    ROOT / ".ci/run",
]
SOURCED = [*ROOT.glob("scripts/lib/*.sh")]
names = [str(path.relative_to(ROOT)) for path in (*RUN, *SOURCED)]


@pytest.mark.parametrize("name", names)
def test_a_script_parses(name):
    assert subprocess.run(["bash", "-n", ROOT / name]).returncode == 0


def test_the_gate_looks_at_every_script():
    """With shellcheck, in a stage of its own."""
    (line,) = (line for line in (ROOT / "scripts/check").read_text().splitlines() if "stage shell " in line)
    patterns = [word for word in line.split() if "/" in word]
    assert {path for pattern in patterns for path in ROOT.glob(pattern)} == {*RUN, *SOURCED}


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.name)
def test_a_script_can_be_run_and_stops_at_the_first_error(path):
    lines = path.read_text().splitlines()
    assert os.access(path, os.X_OK)
    assert lines[0] == "#!/usr/bin/env bash"
    assert lines[1].startswith("# ")
    assert "set -euo pipefail" in lines
