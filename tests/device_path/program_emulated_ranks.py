"""A rank of several, on an emulated fabric, and one process that stands for all of them: each on the simulated device.

Takes a folder, the number of ranks, and the cases as JSON (a name, and words of `train.py`). As many processes as ranks
emulate the fabric behind collectives of the device's backend, which take no time themselves; a single one is all ranks.
Writes `rank_<r>.json`: case -> steps. Run by `test_emulated_ranks`.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from aorta.config.fabric import EmulatedFabric
from aorta.distributed.topology import Topology, process_group, read_topology
from aorta.instrument.emulation.network import EmulatedNetwork
from aorta.instrument.emulation.stand_in import emulated_ranks
from aorta.records.schema import Step
from tests.device_path.program_overlap import MATH, SHAPE
from tests.device_path.witness import clipped, length
from tests.loop import Loop
from tests.simulated import device as simulated

WARM_UP, STEPS = 3, 3
FABRIC = EmulatedFabric(inter_latency_us=5.0, inter_bandwidth_gb_per_s=0.5)


def main() -> None:
    """Every case, one after another."""
    topology, ranks = read_topology(), int(sys.argv[2])
    device = torch.device("cuda", topology.local_rank)
    torch.cuda.set_device(device)
    alone = topology.world_size == 1
    told = {}
    with process_group(topology, device, 300, ranks if alone else None), ExitStack() as stack:
        simulated.real_delays(sleep_ns=0)
        fabric: EmulatedNetwork | None = EmulatedNetwork(FABRIC, topology.rank, ranks, None)
        if alone:
            assert fabric is not None
            stack.enter_context(emulated_ranks(fabric, device))
            fabric = None
        more = ["fabric=emulated", f"fabric.ranks={ranks}"] if alone else []
        for name, words in json.loads(sys.argv[3]).items():
            told[name] = seen([*words, *more], topology, device, fabric)
    Path(sys.argv[1], f"rank_{topology.rank}.json").write_text(json.dumps(told))


def seen(
    words: list[str], topology: Topology, device: torch.device, fabric: EmulatedNetwork | None
) -> list[dict[str, Any]]:
    """Each step of a case behind the warm-up."""
    simulated.lengths(**dict.fromkeys(simulated.CLASSES, (0, 0.0)), operators=dict.fromkeys(MATH, (23_000, 0.0)))
    simulated.costs(launch_ns=0)
    simulated.collective_lengths(default=(0, 0.0))
    lines: list[Step] = []
    one = Loop((*SHAPE, *words), topology, device, lines.append, fabric)
    for _ in range(WARM_UP):
        one.step()
    torch.accelerator.synchronize()
    simulated.reset()
    for _ in range(STEPS):
        one.step()
    one.finish()
    simulated.no_races()
    slept = [(row.start_ns, row.end_ns) for row in simulated.timeline(device.index, kind="sleep")]
    return [
        {
            "overlap": line.overlap,
            "complete": line.coverage.complete,
            "loss": line.loss,
            "rows": [(row.kind, row.bytes, row.start_ns, row.end_ns) for row in line.collectives],
            "slept_ns": length(clipped(slept, (line.start_mono_ns, line.end_mono_ns))),
        }
        for line in lines[WARM_UP:]
    ]


if __name__ == "__main__":
    main()
