"""What several ranks do on the simulated device, and what they then say of it (`programs.scenarios`).

Times are in microseconds since the scenario began on this rank: all ranks begin at the same virtual moment.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from aorta.distributed.topology import process_group, read_topology
from tests.simulated import device
from tests.simulated.programs import SAYS

US = 1_000


def begin() -> int:
    """All ranks at one virtual moment, with lengths that are easy to add: 100 us each kernel and collective."""
    dist.barrier()
    device.defaults()
    device.costs(launch_ns=0)
    device.lengths(elementwise=(100 * US, 0), matmul=(100 * US, 0), memset=(0, 0))
    device.collective_lengths(default=(100 * US, 0))
    device.reset()
    start_ns = device.host_ns()
    # Hosts may be apart after the barrier; the later one is where both go on.
    latest = torch.tensor(start_ns)
    dist.all_reduce(latest, op=dist.ReduceOp.MAX)
    device.advance_host(int(latest) - start_ns)
    return int(latest)


def rows(origin_ns: int, kind: str = "collective") -> list[tuple[str, float, float]]:
    """Name, start and end of what ran."""
    torch.cuda.synchronize()
    return [
        (row.name, (row.start_ns - origin_ns) / US, (row.end_ns - origin_ns) / US) for row in device.timeline(kind=kind)
    ]


def tensor(value: float = 1.0) -> torch.Tensor:
    return torch.full((1024,), value, device="cuda")


def contention(rank: int) -> Any:
    """Kernels beside all-reduces of 100 us, at two thirds of their speed where one runs.

    Rank 1 is ready 60 us later than rank 0: there the first all-reduce runs from 0 to 160, on rank 1 from 60 to 160.
    """
    x, y = tensor(rank + 1.0), tensor()
    side, then = torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda.synchronize()
    origin = begin()
    device.contention(1.5)
    with torch.cuda.stream(side):
        torch.cuda._sleep(rank * 60 * US)
        dist.all_reduce(x)
    torch.cuda._sleep(200 * US)
    torch.cuda._sleep(30 * US)
    then.record()
    side.wait_event(then)  # the second one is issued when the stream's threads may be done with what was before
    with torch.cuda.stream(side):
        dist.all_reduce(x)
    y.mul_(2)
    torch.cuda.synchronize()
    device.contention(1.0)
    torch.cuda._sleep(7 * US)
    return {"rows": rows(origin), "kernels": rows(origin, "sleep"), "ops": rows(origin, "op"), "value": x[0].item()}


def one_communicator_from_two_streams(rank: int) -> Any:
    """Two collectives on two streams of the caller's: the second waits for the first."""
    x, y = tensor(1.0), tensor(2.0)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    origin = begin()
    dist.all_reduce(x)
    with torch.cuda.stream(side):
        dist.all_reduce(y)
    found = rows(origin)
    return {"rows": found, "values": [x[0].item(), y[0].item()], "why": [wait.why for wait in device.waits()]}


def two_groups_side_by_side(rank: int) -> Any:
    """Communicators of two groups do not wait for each other."""
    other = dist.new_group([0, 1])
    x, y = tensor(1.0), tensor(2.0)
    torch.cuda.synchronize()
    origin = begin()
    works = [dist.all_reduce(x, async_op=True), dist.all_reduce(y, group=other, async_op=True)]
    for work in works:
        work.wait()
    return {"rows": rows(origin)}


def point_to_point(rank: int, mode: str) -> Any:
    """An all-reduce, and a send and a receive between the same two ranks, unbatched; rank 1 is ready 200 us later.

    `eager`: the group is bound to a device. `lazy`: it is not.
    """
    group = dist.group.WORLD if mode == "eager" else unbound_group()
    x, y, z = tensor(rank + 1.0), tensor(0.0), tensor(rank + 1.0)
    torch.cuda.synchronize()
    origin = begin()
    torch.cuda._sleep(rank * 200 * US)
    peer = 1 - rank
    works = [dist.all_reduce(z, group=group, async_op=True)]
    if rank == 0:
        works += [dist.isend(x, peer, group=group), dist.irecv(y, peer, group=group)]
    else:
        works += [dist.irecv(y, peer, group=group), dist.isend(x, peer, group=group)]
    for work in works:
        work.wait()
    y.mul_(10)
    found = rows(origin)
    sequences = [row.seq for row in device.timeline(kind="collective") if row.name != "allreduce"]
    return {"rows": found, "values": [y[0].item(), z[0].item()], "sequences": sequences}


def unbound_group() -> dist.ProcessGroup:
    """A group of all ranks that is bound to no device, as all are where `init_process_group` is given none."""
    world = dist.group.WORLD
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        group = dist.new_group()
    finally:
        world.bound_device_id = bound
    assert group.bound_device_id is None
    return group


def coalesced(rank: int) -> Any:
    """What is coalesced is launched at the end, as one, and counted once."""
    tensors = [tensor(rank + 1.0 + i) for i in range(3)]
    outs = [torch.empty(2048, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()
    origin = begin()
    group = dist.group.WORLD
    before = group._get_sequence_number_for_group()
    with dist._coalescing_manager(async_ops=True) as manager:  # the fast path: one operator
        for one in tensors:
            dist.all_reduce(one)
    manager.wait()
    middle = group._get_sequence_number_for_group()
    with dist._coalescing_manager(device=torch.device("cuda", rank)):  # NCCL's own grouping, synchronous
        for out, one in zip(outs, tensors, strict=False):
            dist.all_gather_into_tensor(out, one)
    after = group._get_sequence_number_for_group()
    values = [one[0].item() for one in tensors] + [out[1500].item() for out in outs]
    return {"rows": rows(origin), "values": values, "counted": [middle - before, after - middle]}


def failing(rank: int, how: str) -> Any:
    """A collective that fails, and a peer that is dead."""
    x = tensor()
    torch.cuda.synchronize()
    said = ""
    if how == "issue":
        if rank == 0:
            device.fail_next_collective(message="refused", at_issue=True)
            try:
                dist.all_reduce(x)
            except dist.DistBackendError as error:
                said = str(error)
        dist.all_reduce(x)  # the group goes on
        return {"said": said, "value": x[0].item()}
    if how == "device":
        device.fail_next_collective(message="link down")
    else:
        device.dead_peer()
    work = dist.all_reduce(x, async_op=True)
    try:
        work.wait(timedelta(seconds=2))
    except dist.DistBackendError as error:
        said = str(error)
    again = ""
    try:
        dist.all_reduce(x)
    except dist.DistBackendError as error:
        again = str(error)
    group = dist.group.WORLD
    group._get_backend(torch.device("cuda")).abort()
    torch.cuda.synchronize()  # the kernel was taken off the device
    return {"said": said, "again": again}


def main(*calls: str) -> None:
    """Scenarios, with their words, one after another in the process group that a run on a card has."""
    topology = read_topology()
    cuda = torch.device("cuda", topology.local_rank)
    torch.cuda.set_device(cuda)
    results: dict[str, Any] = {}
    with process_group(topology, cuda, 300):
        for call in calls:
            name, *words = call.split()
            function: Callable[..., Any] = globals()[name]
            results[call] = function(topology.rank, *words)
    sys.stdout.write(SAYS + json.dumps((topology.rank, results)) + "\n")  # one write: ranks share a file


if __name__ == "__main__":
    main(*sys.argv[1:])
