"""A rank that fails while its device holds a collective which can never end, because a peer is dead (a program).

Enters: how it ends. Leaves: an exit code; a rank that hangs is found by who started it. Run by `test_process_group`.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from aorta.distributed.topology import process_group, read_topology
from tests.simulated import device as simulated


class RealError(Exception):
    pass


def main(how: str) -> None:
    """`raises`: an error of the program's own. `dies`: the other rank is gone, and the device says so at the next
    synchronisation.
    """
    topology = read_topology()
    device = torch.device("cuda", topology.local_rank)
    torch.cuda.set_device(device)
    with process_group(topology, device, 300):
        x = torch.ones(8, device=device)
        dist.all_reduce(x)
        torch.cuda.synchronize()
        if how == "dies":
            if topology.rank == 1:
                os._exit(0)
            dist.all_reduce(x)
            torch.cuda.synchronize()
        simulated.dead_peer()
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        assert simulated.pending(), "the collective has ended"
        raise RealError("what really happened")


if __name__ == "__main__":
    main(*sys.argv[1:])
