"""Every shell script parses, is clean, is executable and begins by saying what it is for."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from tests.scripts.conftest import ROOT

RUN = [*ROOT.glob("scripts/*.sh"), *ROOT.glob("scripts/*.sbatch"), ROOT / "scripts/check", ROOT / ".ci/run"]
SOURCED = [*ROOT.glob("scripts/lib/*.sh")]
names = [str(path.relative_to(ROOT)) for path in (*RUN, *SOURCED)]


@pytest.mark.parametrize("name", names)
def test_a_script_parses(name):
    assert subprocess.run(["bash", "-n", ROOT / name]).returncode == 0


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_scripts_are_clean():
    command = ["shellcheck", "--external-sources", "--source-path=SCRIPTDIR", *names]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.name)
def test_a_script_can_be_run_and_stops_at_the_first_error(path):
    lines = path.read_text().splitlines()
    assert os.access(path, os.X_OK)
    assert lines[0] == "#!/usr/bin/env bash"
    assert lines[1].startswith("# ")
    assert "set -euo pipefail" in lines
