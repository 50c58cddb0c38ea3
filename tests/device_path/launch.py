"""Start ranks that have the simulated device, and read back the JSON that each left.

Must not: import torch, so that a test file can be collected without the device.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.ranks import forked
from tests.runs import HANGS_S, environment, succeeded

GRAIN_BYTES = 512
"""The smallest block that the simulated device allocates."""


def on_devices(
    module: str, folder: Path, *words: str, ranks: int = 2, timeout_s: float = HANGS_S, **variables: str
) -> list[Any]:
    """Run a module on as many ranks and devices; what each wrote to `rank_<r>.json` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    # `load.for_children` has put the device on the path.
    own = environment(PYTHONPATH=environment()["PYTHONPATH"], AORTA_SIMULATED_DEVICES=str(max(ranks, 2)), **variables)
    succeeded(forked(module, str(folder), *words, ranks=ranks, environment=own, timeout_s=timeout_s))
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(ranks)]
