"""Every shell script parses, is looked at by the gate, is executable and begins by saying what it is for."""

from __future__ import annotations

import os
import subprocess

from tests.scripts.conftest import ROOT

RUN = [
    *ROOT.glob("scripts/*.sh"),
    *ROOT.glob("scripts/*.sbatch"),
    *(ROOT / "scripts" / name for name in ("check", "fuzz", "torch_versions")),
    ROOT / ".ci/run",
]
SOURCED = [*ROOT.glob("scripts/lib/*.sh")]


def test_the_gate_looks_at_every_script():
    """With shellcheck, in a stage of its own."""
    (line,) = (line for line in (ROOT / "scripts/check").read_text().splitlines() if "stage shell " in line)
    patterns = [word for word in line.split() if "/" in word]
    assert {path for pattern in patterns for path in ROOT.glob(pattern)} == {*RUN, *SOURCED}


def test_every_script_parses_can_be_run_and_stops_at_the_first_error():
    assert [path for path in (*RUN, *SOURCED) if subprocess.run(["bash", "-n", path]).returncode] == []
    wrong = []
    for path in RUN:
        first, second, *lines = path.read_text().splitlines()
        begins_well = first == "#!/usr/bin/env bash" and second.startswith("# ")
        if not (begins_well and os.access(path, os.X_OK) and "set -euo pipefail" in lines):
            wrong.append(path)
    assert wrong == []
