"""What tests of the device share: the skip, and functions that run on several ranks.

    scenarios("contention")["contention"] -> what `tests.simulated.scenarios.contention` returned on each rank

Must not: import torch, so that a test file can be collected without the device.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.ranks import forked
from tests.runs import HANGS_S, environment, succeeded
from tests.simulated import load

SAYS = "scenario-result "


needs_device = pytest.mark.skipif(
    not load.loaded() or os.environ[load.VARIABLE] != "virtual",
    reason=f"no simulated device in virtual time: {load.VARIABLE}=virtual was not set when this process started",
)


def scenarios(*calls: str) -> dict[str, list[Any]]:
    """Run functions of `tests.simulated.scenarios` on two ranks, in one process group; what each rank answers.

    Args:
        calls: a function's name, and words for it.
    """
    own = environment(AORTA_SIMULATED_DEVICES="2")
    done = forked("tests.simulated.scenarios", *calls, ranks=2, environment=own, timeout_s=HANGS_S)
    lines = [line.removeprefix(SAYS) for line in succeeded(done).stdout.splitlines() if line.startswith(SAYS)]
    results = dict(json.loads(line) for line in lines)
    return {call: [results[rank][call] for rank in range(2)] for call in calls}
