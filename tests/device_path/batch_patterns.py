"""Parts of the loop of `scenario` with messages, lists and batches, which the backend launches together.

A part returns tensors that are 0 where what it read was right. Must not: wait for the device.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.device_path.rig import COPY_D2D, ELEMENTS, Rig
from tests.simulated import device as simulated


def point_to_point(rig: Rig, *, bound: bool) -> list[torch.Tensor]:
    """A send and a receive by themselves, behind an all-reduce of their group, which theirs share a communicator with
    where the group is bound to a device.
    """
    peer, group = 1 - rig.rank, rig.groups.world if bound else rig.groups.unbound
    x = rig.tensor(rig.rank + 1)
    rig.work()
    there, back = rig.tensor(rig.rank + 1), rig.tensor(0)
    works = [dist.all_reduce(x, group=group, async_op=True)]
    if rig.rank:
        works += [dist.irecv(back, peer, group=group), dist.isend(there, peer, group=group)]
    else:
        works += [dist.isend(there, peer, group=group), dist.irecv(back, peer, group=group)]
    rig.work()
    for work in works:
        work.wait()
    return [back - (2 - rig.rank), x - 3]


def of_lists(rig: Rig) -> list[torch.Tensor]:
    """Lists of tensors of one size: the backend stacks each in a tensor of its own, which only its handle keeps. The
    memory is asked for at once, by somebody who writes to it.

    The backend's copies to and from it are part of what the record has for the collective. Here they take no time, so
    that it is as long as the kernel.
    """
    simulated.lengths(copy_d2d=(0, 0.0))

    def tensor(value: float) -> torch.Tensor:
        return torch.full((ELEMENTS // 8,), value, device=rig.device)

    def garbage() -> torch.Tensor:
        return torch.full((rig.size * ELEMENTS // 8,), -5.0, device=rig.device)

    sources = [tensor(rig.rank + 1.0) for _ in range(rig.size)]
    part, parts = tensor(0.0), [tensor(0.0) for _ in range(rig.size)]
    rig.work()
    works = [dist.reduce_scatter(part, sources, async_op=True)]
    first = garbage()
    works.append(dist.all_gather(parts, sources[0], async_op=True))
    del sources
    second = garbage()
    for work in works:
        work.wait()
    del first, second
    simulated.lengths(copy_d2d=COPY_D2D)
    return [part - 3, *(one - (rank + 1) for rank, one in enumerate(parts))]


def two_in_one_direction(rig: Rig) -> list[torch.Tensor]:
    """The second of two transfers to the same peer begins when the first has ended."""
    peer = 1 - rig.rank
    tensors = [rig.tensor(1 - rig.rank) for _ in range(2)]
    transfer = dist.irecv if rig.rank else dist.isend
    works = [transfer(tensor, peer) for tensor in tensors]
    rig.work()
    for work in works:
        work.wait()
    return [tensor - 1 for tensor in tensors]


def batched_point_to_point(rig: Rig) -> list[torch.Tensor]:
    """Collected by the backend and launched together."""
    peer = 1 - rig.rank
    rig.work()
    there, back = rig.tensor(rig.rank + 1), rig.tensor(0)
    operations = [dist.P2POp(dist.isend, there, peer), dist.P2POp(dist.irecv, back, peer)]
    works = dist.batch_isend_irecv(operations)
    del there, operations
    garbage = rig.tensor(-5.0)
    rig.work()
    for work in works:
        work.wait()
    del garbage
    return [back - (2 - rig.rank)]


def coalesced(rig: Rig, *, asynchronous: bool, fast: bool) -> list[torch.Tensor]:
    """Collected by the backend, and launched when the manager ends. `fast`: as one operator, whose own handle knows
    only that it was collected.
    """
    rig.work()
    sources = [rig.tensor(rig.rank + 1) for _ in range(2)]
    results = [torch.empty(ELEMENTS * (rig.size if fast else 1), device=rig.device) for _ in range(2)]
    manager = dist.distributed_c10d._coalescing_manager(device=rig.device, async_ops=asynchronous)
    with manager as waiting:
        for source, result in zip(sources, results, strict=True):
            if fast:
                dist.all_gather_into_tensor(result, source)
            else:
                dist.all_to_all_single(result, source, async_op=asynchronous)
    if asynchronous:
        if not fast:  # torch does not keep those of the one operator, whatever its handle says
            sources.clear()
        garbage = [rig.tensor(-5.0) for _ in range(2)]
        rig.work()
        waiting.wait()
        del garbage
    half = results[0].numel() // 2
    return [result[half:] - 2 for result in results] + [result[:half] - 1 for result in results]


def between_steps(rig: Rig) -> list[torch.Tensor]:
    """Every kind of call where no step is open: nothing of it may be recorded, or keep a mark."""
    group, peer, compute = rig.groups.between, 1 - rig.rank, torch.cuda.current_stream()
    tensors = [rig.tensor(rig.rank + 1) for _ in range(4)]
    there, back = ([rig.tensor(value) for _ in range(2)] for value in (rig.rank + 1, 0))
    dist.all_reduce(tensors[0], group=group)
    works = [dist.all_reduce(tensors[1], group=group, async_op=True)]
    with dist.distributed_c10d._coalescing_manager(group, device=rig.device, async_ops=False):
        dist.all_reduce(tensors[2], group=group)
    rig.comm.wait_stream(compute)
    with torch.cuda.stream(rig.comm):
        dist.all_reduce(tensors[3], group=group)
    compute.wait_stream(rig.comm)
    operations = [dist.P2POp(dist.isend, there[0], peer, group), dist.P2POp(dist.irecv, back[0], peer, group)]
    works += dist.batch_isend_irecv(operations)
    transfers = [dist.isend, dist.irecv]
    for transfer in transfers if rig.rank else reversed(transfers):
        works.append(transfer(there[1] if transfer is dist.isend else back[1], peer, group))
    for work in works:
        work.wait()
    return [*(tensor - 3 for tensor in tensors), *(tensor - (2 - rig.rank) for tensor in back)]
