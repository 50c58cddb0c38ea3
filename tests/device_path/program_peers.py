"""One of three ranks sends to both others at once, in every mode and with both taps.

Enters: a folder. Leaves: `rank_<r>.json`: by mode and tap, kind, start and end
of each transfer in the record and on the device. Run by `test_rules`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from aorta.distributed.topology import Topology
from aorta.records.schema import InstrumentMode
from tests.device_path.launch import by_rank
from tests.device_path.rig import Groups, stream_id
from tests.device_path.scene import Scene
from tests.simulated.scenarios import unbound_group

MODES: tuple[InstrumentMode, ...] = ("dedicated", "observe")


def every_way(_topology: Topology, device: torch.device) -> dict[str, Any]:
    """What was sent, by mode."""
    unbound = unbound_group()
    transfer(torch.zeros(1, device=device), unbound)  # communicators' own streams, before an instrument takes any
    groups = Groups(*[unbound] * 6, {priority: stream_id(priority) for priority in (0, -1)})
    return {mode: sent(Scene(device, groups, mode)) for mode in MODES}


def sent(scene: Scene) -> dict[str, Any]:
    """The second rank, to which the first one sends first, receives last."""
    x = scene.tensor()
    with scene.looking() as instrument, scene.step(instrument):
        if scene.rank:
            torch.cuda._sleep((500_000, 100_000)[scene.rank - 1])
        transfer(x, scene.groups.unbound)
    return {"rows": [row[:3] for row in scene.rows()], "kernels": scene.kernels()}


def transfer(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """A group that is bound to no device has a communicator for each pair of ranks: their transfers overlap."""
    if dist.get_rank():
        works = [dist.irecv(x, 0, group=group)]
    else:
        works = [dist.isend(x, peer, group=group) for peer in (1, 2)]
    for work in works:
        work.wait()
    torch.accelerator.synchronize()


if __name__ == "__main__":
    by_rank(every_way)
