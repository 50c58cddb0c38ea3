"""Two ranks that hang on the simulated device, by a named fault; rank 0 takes the evidence while they do (a program).

Enters: a folder, and the fault of rank 1. Leaves: `evidence.json`, of the progress files, and a dump of each rank, in
the shape of NCCL's Flight Recorder, whose states are the device's own account. Run by `test_hang`.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import nn

import aorta
from aorta.autopsy.processes import progress_evidence
from aorta.distributed.topology import read_topology
from tests.autopsy.test_flight_recorder import dump, entry
from tests.simulated import device as simulated

STEPS = 4
ELEMENTS = 8
LONG_NS = 600_000_000_000
SETTLES_S = 1.0
"""After the last launch, for streams to come to where they stay."""


class Issued(NamedTuple):
    """An all-reduce of all ranks: torch's number, and when the host issued it."""

    sequence: int
    issued_ns: int


def main() -> None:
    """Train; hang in the last step; leave the evidence, and end at once."""
    folder, fault = Path(sys.argv[1]), sys.argv[2]
    topology = read_topology()
    device = torch.device("cuda", topology.local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    model = nn.Linear(ELEMENTS, ELEMENTS).to(device)
    issued: list[Issued] = []
    threading.Thread(target=leave, args=(folder, topology.rank, device, fault, issued), daemon=True).start()
    all_reduce(torch.ones(ELEMENTS, device=device), issued)  # before AORTA counts
    with aorta.record(folder / "run", model=model, watchdog_timeout_s=0) as recording:
        for step in range(STEPS):
            y = model(torch.ones(ELEMENTS, device=device)).detach()
            if step == STEPS - 1:
                hang_before(fault, topology.rank)
            all_reduce(y, issued)
            if step == STEPS - 1:
                time.sleep(600)
            torch.cuda.synchronize()
            recording.step()


def hang_before(fault: str, rank: int) -> None:
    """What rank 1, or each, does in place of joining in order."""
    if fault == "stuck_inside":
        simulated.dead_peer()
    elif rank == 1 and fault == "never_enqueued":
        time.sleep(600)
    elif rank == 1:  # a kernel before it on its stream does not end
        simulated.real_delays(sleep_ns=LONG_NS)
        torch.cuda._sleep(LONG_NS)  # type: ignore[no-untyped-call]


def all_reduce(y: torch.Tensor, issued: list[Issued]) -> None:
    """One that NCCL's ring would have a row of."""
    issued_ns = simulated.host_ns()
    dist.all_reduce(y)
    group: Any = dist.group.WORLD
    issued.append(Issued(int(group._get_backend(y.device)._get_sequence_number_for_group()), issued_ns))


def leave(folder: Path, rank: int, device: torch.device, fault: str, issued: list[Issued]) -> None:
    """Once both hosts are where they stay, and nothing moves, write the evidence and end."""
    last = STEPS if (fault, rank) == ("never_enqueued", 1) else 1 + STEPS
    meet(folder, rank, "issued", lambda: len(issued) == last)
    time.sleep(SETTLES_S)
    queues = [queue for (on, _), queue in simulated.pending().items() if on == device.index]
    rows = [
        entry(
            one.sequence - 1,
            state(f"allreduce {one.sequence} of group 0", queues),
            time_created_ns=one.issued_ns,
            input_sizes=[[ELEMENTS]],
            output_sizes=[[ELEMENTS]],
        )
        for one in issued
    ]
    (folder / f"trace_{rank}").write_bytes(pickle.dumps(dump(rows)))
    if rank == 0:
        evidence = progress_evidence(folder / "run", saved=False)
        (folder / "evidence.json").write_bytes(msgspec.json.encode(evidence))
    meet(folder, rank, "written")
    os._exit(0)


def state(kernel: str, queues: list[list[str]]) -> str:
    """What a kernel is for NCCL's ring: the first of its stream's queue has started."""
    if any(queue[0] == kernel for queue in queues):
        return "started"
    return "scheduled" if any(kernel in queue for queue in queues) else "completed"


def meet(folder: Path, rank: int, what: str, has_arrived: Callable[[], bool] = lambda: True) -> None:
    """Wait until both ranks have arrived."""
    while not has_arrived():
        time.sleep(0.05)
    (folder / f"{what}_{rank}").touch()
    while len(list(folder.glob(f"{what}_*"))) < 2:
        time.sleep(0.05)


if __name__ == "__main__":
    main()
