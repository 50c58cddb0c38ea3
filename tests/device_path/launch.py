"""Ranks that have the simulated device: how a test starts them, and reads the JSON that a function left on each.

    on_devices(steps_of, tmp_path, {"name": "ddp"}) -> what `steps_of(topology, device, {"name": "ddp"})` returned

The function may stand in the test's own module: ranks import it. What it is given and returns is what JSON can hold.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from aorta.distributed.topology import process_group, read_topology
from tests.ranks import forked
from tests.runs import HANGS_S, environment, succeeded


def launched(target: str | Path, *words: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Run a script or a module on as many ranks and devices. Fails the test when a rank fails."""
    # `load.for_children` has put the device on the path.
    own = environment(PYTHONPATH=environment()["PYTHONPATH"], AORTA_SIMULATED_DEVICES=str(max(ranks, 2)))
    return succeeded(forked(target, *words, ranks=ranks, environment=own, timeout_s=HANGS_S))


def on_devices(
    work: Callable[..., Any], folder: Path, *given: Any, ranks: int = 2, emulated_ranks: int | None = None
) -> list[Any]:
    """What a function returns on each rank, in the default process group.

    Args:
        work: takes the rank's `Topology` and device, and `given`.
        folder: gets `rank_<r>.json`.
        emulated_ranks: for which the one rank stands.
    """
    words = (str(folder), work.__module__, work.__name__, json.dumps(given), json.dumps(emulated_ranks))
    launched("tests.device_path.launch", *words, ranks=ranks)
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(ranks)]


def main(folder: str, module: str, name: str, given: str, emulated_ranks: str) -> None:
    """On each rank."""
    topology = read_topology()
    device = torch.device("cuda", topology.local_rank)
    torch.cuda.set_device(device)
    with process_group(topology, device, 300, json.loads(emulated_ranks)):
        told = getattr(import_module(module), name)(topology, device, *json.loads(given))
    Path(folder, f"rank_{topology.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
