"""What the programs of this folder share: a rank, its device and process group, and what it leaves."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from aorta.distributed.topology import Topology, process_group, read_topology


def by_rank(work: Callable[[Topology, torch.device], Any]) -> None:
    """Call `work` in the default process group; what it returns is `rank_<r>.json` in the folder named first."""
    topology = read_topology()
    device = torch.device("cuda", topology.local_rank)
    torch.cuda.set_device(device)
    with process_group(topology, device, 300):
        told = work(topology, device)
    Path(sys.argv[1], f"rank_{topology.rank}.json").write_text(json.dumps(told))
