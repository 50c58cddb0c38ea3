"""Several ranks train on the simulated device in virtual time, whose collectives take what a network makes of them.

Each case leaves a run folder.

Enters: a folder and the cases as JSON. Leaves: a run folder a case. Nothing here predicts. Run by `test_whatif`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from aorta.config.schema import EmulatedFabric
from aorta.distributed.topology import Topology
from aorta.instrument.emulation.network import EmulatedNetwork
from aorta.records.schema import Step
from aorta.timeline.classes import KINDS
from tests.analysis.builders import footer, header, write_manifest, write_rank
from tests.device_path.launch import by_rank
from tests.device_path.program_overlap import MATH, SHAPE
from tests.loop import Loop
from tests.simulated import device as simulated

WARM_UP, STEPS = 3, 6
SIZES = 0, 1 << 30
"""Bytes of two collectives, by which the network's formula is known: it is linear in them."""


@dataclass(frozen=True)
class Case:
    """One way to train: `words` of train.py beside `SHAPE`, and settings of the network."""

    name: str
    words: tuple[str, ...]
    fabric: dict[str, Any] = field(default_factory=dict)


def main() -> None:
    """Every case, one after another."""
    folder, cases = Path(sys.argv[1]), [Case(**case) for case in json.loads(sys.argv[2])]
    by_rank(lambda *rank: [train(folder / case.name, case, *rank) for case in cases])


def train(folder: Path, case: Case, topology: Topology, device: torch.device) -> None:
    """One case, and its record."""
    # Only the mathematics of blocks takes time: what else runs on the computing stream is no computation of the model.
    simulated.lengths(**dict.fromkeys(simulated.CLASSES, (0, 0.0)), operators=dict.fromkeys(MATH, (23_000, 0.0)))
    simulated.costs(launch_ns=0)
    fabric = EmulatedFabric(**case.fabric)
    lines: list[Step] = []
    network, ranks = EmulatedNetwork(fabric, topology.rank, topology.world_size, None), range(topology.world_size)
    for kind in KINDS:
        least, most = (network.cost_ns(kind, size, ranks, None) for size in SIZES)
        simulated.collective_lengths(**{kind: (least, (most - least) / SIZES[1])})
    one = Loop((*SHAPE, *case.words), topology, device, lines.append)
    for _ in range(WARM_UP + STEPS):
        one.step()
        torch.accelerator.synchronize()  # a step's end is then the device's: nothing of it is left for the next
    groups = {name: list(seen.ranks) for name, seen in one.instrument.groups.items()}
    one.finish()
    folder.mkdir(parents=True, exist_ok=True)
    strategy = case.words[0].partition("=")[2]
    head = header(
        topology.rank,
        topology.world_size,
        parallel=strategy,
        timer="device_event",
        platform="cuda",
        device=str(device),
        backend="nccl",
        warmup_steps=WARM_UP,
    )
    steps = [msgspec.structs.replace(line, warmup=number < WARM_UP) for number, line in enumerate(lines)]
    write_rank(folder, head, steps, footer(len(steps), topology.world_size, groups=groups))
    if topology.rank == 0:
        config = {"workload": {"name": "ranking"}, "fabric": asdict(fabric) | {"algorithm": "ring", "sharing": "group"}}
        write_manifest(folder, config, world_size=topology.world_size, platform="cuda")


if __name__ == "__main__":
    main()
