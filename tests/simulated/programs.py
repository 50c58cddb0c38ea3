"""What tests of the device share: the skip, and functions that run on several ranks.

    scenario("ready_times", ranks=2) -> what `tests.simulated.scenarios.ready_times` returned on each rank

Must not: import torch, so that a test file can be collected without the device.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.runs import HANGS_S, Launcher, environment, finished, forked, succeeded, torchrun
from tests.simulated import load

SAYS = "scenario-result "


def _why_not() -> str:
    return f"this process has no simulated device: {load.VARIABLE}=virtual was not set when it started"


needs_device = pytest.mark.skipif(not load.loaded(), reason=_why_not())
needs_virtual_time = pytest.mark.skipif(
    not load.loaded() or os.environ.get(load.VARIABLE) != "virtual", reason=f"{_why_not()}; or its time is real"
)


def scenario(name: str, *words: str, ranks: int = 2, launcher: Launcher = "fork", **variables: str) -> list[Any]:
    """Run a function of `tests.simulated.scenarios` on each rank, in a process group; what each has returned."""
    own = environment(PYTHONPATH=_path(), AORTA_SIMULATED_DEVICES=str(max(ranks, 2)), **variables)
    module = "tests.simulated.scenarios"
    if launcher == "fork":
        done = forked(module, name, *words, ranks=ranks, environment=own, timeout_s=HANGS_S)
    else:
        done = finished(torchrun(ranks, "-m", module, name, *words), HANGS_S, own)
    lines = [line.removeprefix(SAYS) for line in succeeded(done).stdout.splitlines() if line.startswith(SAYS)]
    results = dict(json.loads(line) for line in lines)
    return [results[rank] for rank in range(ranks)]


def _path() -> str:
    return environment()["PYTHONPATH"]  # `load.for_children` has put the device on it
