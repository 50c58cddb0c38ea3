"""What tests of the device share: the skip, and ranks that have the device, to which each case of a test is given.

    on_devices(steps_of, tmp_path, {"ddp": ["parallel=ddp"]}) -> {"ddp": what each rank's
        `steps_of(topology, device, "parallel=ddp")` returned}

The function may stand in the test's own module: ranks import it. What it is given and returns is what JSON can hold.
Must not: import torch, so that a test file can be collected without the device.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import forked
from tests.runs import HANGS_S, ROOT, environment, finished, succeeded
from tests.simulated import load

needs_device = pytest.mark.skipif(
    not load.loaded(),
    reason=f"no simulated device: {load.VARIABLE}={load.VIRTUAL} was not set when this process started",
)


def ended(target: str | Path, *words: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Run a script or a module on as many ranks and devices; it may fail."""
    own = environment(AORTA_SIMULATED_DEVICES=str(max(ranks, 2)))
    return forked(target, *words, ranks=ranks, environment=own, timeout_s=HANGS_S)


def launched(target: str | Path, *words: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """The same; fails the test when a rank fails."""
    return succeeded(ended(target, *words, ranks=ranks))


def python(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """This interpreter with these words, in a process of its own that finds the device's `sitecustomize`."""
    return finished([sys.executable, *words], own=environment(PYTHONPATH=str(load.SITE), **variables), folder=ROOT)


def on_devices(
    work: Callable[..., Any],
    folder: Path,
    cases: Mapping[str, Sequence[Any]],
    ranks: int = 2,
    emulated_ranks: int | None = None,
) -> dict[str, list[Any]]:
    """What a function returns for each case on each rank: one case after another, in one launch and process group.

    Args:
        work: takes the rank's `Topology` and device, and what stands under the case's name.
        folder: gets `rank_<r>.json`.
        emulated_ranks: for which the one rank stands.
    """
    words = (str(folder), work.__module__, work.__name__, json.dumps(cases), json.dumps(emulated_ranks))
    launched("tests.simulated.programs", *words, ranks=ranks)
    told = [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(ranks)]
    return {name: [rank[name] for rank in told] for name in cases}


def main(folder: str, module: str, function: str, cases: str, emulated_ranks: str) -> None:
    """On each rank."""
    import torch

    from aorta.distributed.topology import process_group, read_topology

    topology, told = read_topology(), {}
    device = torch.device("cuda", topology.local_rank)
    torch.cuda.set_device(device)
    work = getattr(import_module(module), function)
    with process_group(topology, device, 300, json.loads(emulated_ranks)):
        for name, given in json.loads(cases).items():
            sys.stderr.write(f"{name}\n")  # which one it is, should it hang
            told[name] = work(topology, device, *given)
    Path(folder, f"rank_{topology.rank}.json").write_text(json.dumps(told, default=str))


if __name__ == "__main__":
    main(*sys.argv[1:])
