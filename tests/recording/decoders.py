"""Run on every rank: decoders on strategies, each from the same seed, in one launch.

Arguments: a folder, then names of `WAYS`. Leaves `rank_<r>.json`: name -> losses, gradient norms, coverage, kinds of
collectives and their groups; and of those with shared experts and their references `<name>.pt`, every parameter as a
whole after the training.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.tensor import DTensor

from aorta.distributed.topology import Topology, process_group, read_topology
from aorta.records.schema import Step
from tests.loop import Loop
from tests.trained_ways import DECODERS, TINY, Way

STEPS = 2
"""The second loss rests on the first update, and what was prefetched in the first step."""
SHARED_EXPERTS = [
    Way("moe", "fsdp_ep"),
    Way("moe", "fsdp_ep", ("parallel.ep_size=4",)),  # nothing left to shard
    Way("moe", "fsdp_ep", ("parallel.ep_size=1",)),  # nothing to share
    Way("moe", "fsdp_ep", ("workload.num_experts=2", "parallel.overlap=false")),  # one on a rank: each is cut
]
REFERENCES = [Way("moe", "ddp"), Way("moe", "ddp", ("workload.num_experts=2",))]
"""Of the same samples, on four ranks too."""
WAYS = list(dict.fromkeys((*DECODERS, *SHARED_EXPERTS, *REFERENCES)))


def main(folder: str, *names: str) -> None:
    """Train."""
    topology, device = read_topology(), torch.device("cpu")
    ways = [way for way in WAYS if way.name in names]
    with process_group(topology, device, 120.0):
        told = {way.name: trained(way, topology, device, folder) for way in ways}
    Path(folder, f"rank_{topology.rank}.json").write_text(json.dumps(told))


def trained(way: Way, topology: Topology, device: torch.device, folder: str) -> dict[str, Any]:
    lines: list[Step] = []
    own = ("training.gradient_accumulation=2", "training.device=cpu")
    loop = Loop((*TINY, *way.words, *own), topology, device, lines.append)
    for _ in range(STEPS):
        loop.step()
    loop.finish()
    if way in (*SHARED_EXPERTS, *REFERENCES):
        whole = {name.removeprefix("module."): full(p.detach()) for name, p in loop.model.named_parameters()}
        if topology.rank == 0:
            torch.save(whole, Path(folder, f"{way.name}.pt"))
    return {
        "losses": [line.loss for line in lines],
        "grad_norms": [line.grad_norm for line in lines],
        "coverage": [msgspec.to_builtins(line.coverage) for line in lines],
        "collectives": dict(Counter(row.kind for line in lines for row in line.collectives)),
        "groups": {name: group.ranks for name, group in loop.instrument.groups.items()},
        "blocks": sorted({span.block for line in lines for span in line.compute}),
    }


def full(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that may be distributed over ranks; collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


if __name__ == "__main__":
    main(*sys.argv[1:])
