"""Start ranks that have the simulated device, and read back the JSON that each wrote.

Must not: import torch, so that a test file can be collected without the device.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.ranks import forked
from tests.runs import HANGS_S, environment, succeeded


def launched(target: str | Path, *words: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Run a script or a module on as many ranks and devices. Fails the test when a rank fails."""
    # `load.for_children` has put the device on the path.
    own = environment(PYTHONPATH=environment()["PYTHONPATH"], AORTA_SIMULATED_DEVICES=str(max(ranks, 2)))
    return succeeded(forked(target, *words, ranks=ranks, environment=own, timeout_s=HANGS_S))


def on_devices(module: str, folder: Path, *words: str, ranks: int = 2) -> list[Any]:
    """What each rank of a module wrote to `rank_<r>.json` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    launched(module, str(folder), *words, ranks=ranks)
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(ranks)]
