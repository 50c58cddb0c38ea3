"""One process that stands for all ranks of an emulated fabric, on the simulated device.

Takes a folder, the number of ranks, and the cases as JSON (a name, and words of `train.py`). Writes
`rank_<r>.json`: case -> steps. Run by `test_emulated_ranks`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from aorta.config.fabric import EmulatedFabric
from aorta.distributed.topology import Topology, process_group, read_topology
from aorta.instrument.dispatcher import all_groups
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
    fabric = EmulatedNetwork(FABRIC, topology.rank, ranks, None)
    told = {}
    with process_group(topology, device, 300, ranks):
        simulated.real_delays(sleep_ns=0)
        with emulated_ranks(fabric, device):
            for name, words in json.loads(sys.argv[3]).items():
                more = "fabric=emulated", f"fabric.ranks={ranks}"
                told[name] = seen([*words, *more], topology, device, fabric)
    Path(sys.argv[1], f"rank_{topology.rank}.json").write_text(json.dumps(told))


def seen(words: list[str], topology: Topology, device: torch.device, fabric: EmulatedNetwork) -> list[dict[str, Any]]:
    """Each step of a case behind the warm-up."""
    simulated.lengths(**dict.fromkeys(simulated.CLASSES, (0, 0.0)), operators=dict.fromkeys(MATH, (23_000, 0.0)))
    simulated.costs(launch_ns=0)
    simulated.collective_lengths(default=(0, 0.0))
    lines: list[Step] = []
    one = Loop((*SHAPE, *words), topology, device, lines.append)
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
            "rows": [
                (
                    row.kind,
                    row.bytes,
                    row.start_ns,
                    row.end_ns,
                    fabric.cost_ns(row.kind, row.bytes, ranks_of(row.group), 0),
                )
                for row in line.collectives
            ],
            "slept_ns": length(clipped(slept, (line.start_mono_ns, line.end_mono_ns))),
        }
        for line in lines[WARM_UP:]
    ]


def ranks_of(name: str) -> tuple[int, ...]:
    """The ranks of a process group."""
    return tuple(dist.get_process_group_ranks(next(group for group in all_groups() if group.group_name == name)))


if __name__ == "__main__":
    main()
