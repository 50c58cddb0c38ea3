"""Ranks that have the simulated device: how a test starts them and reads the JSON that each wrote; what they share."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from aorta.distributed.topology import Topology, process_group, read_topology
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


def by_rank(work: Callable[[Topology, torch.device], Any]) -> None:
    """Call `work` in the default process group; what it returns is `rank_<r>.json` in the folder named first."""
    topology = read_topology()
    device = torch.device("cuda", topology.local_rank)
    torch.cuda.set_device(device)
    with process_group(topology, device, 300):
        told = work(topology, device)
    Path(sys.argv[1], f"rank_{topology.rank}.json").write_text(json.dumps(told))
