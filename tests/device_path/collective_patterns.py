"""Ways to issue collectives and copies and to wait for them, each a part of the loop of `scenario`.

    parts(rank) -> each way, with what the backend launches for it

A part returns tensors that are 0 where what it read was right. Must not: wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from tests.device_path.rig import ELEMENTS, WIDTH, Rig

LATE_STEPS = 4
"""So long after its collective a handle is waited for."""


class Launch(NamedTuple):
    """One kernel of a backend: its name there, which group's it is, and the rows that a record has of it."""

    name: str
    group: int
    kinds: tuple[str, ...]


def slow_producer(rig: Rig) -> list[torch.Tensor]:
    """An asynchronous all-reduce of what a long kernel writes, later on one rank; computation beside it; its wait."""
    x = rig.tensor(0)
    for _ in range(rig.rank + 4):
        rig.work()
    x.fill_(rig.rank + 1)
    work = dist.all_reduce(x, async_op=True)
    rig.work()
    assert work is not None
    work.wait()
    return [x - 3]


def one_after_another(rig: Rig) -> list[torch.Tensor]:
    """Who waits for the first of two does not wait for the second."""
    x, y = rig.tensor(rig.rank + 1), rig.tensor(rig.rank + 1)
    first, second = dist.all_reduce(x, async_op=True), dist.all_reduce(y, async_op=True)
    assert first is not None
    assert second is not None
    first.wait()
    rig.work()
    second.wait()
    return [x - 3, y - 3]


def no_collective(rig: Rig) -> list[torch.Tensor]:
    """The computing stream waits for something else of the strategy's: no stall."""
    compute = torch.cuda.current_stream()
    rig.comm.wait_stream(compute)
    with torch.cuda.stream(rig.comm):
        torch.cuda._sleep(30_000)  # type: ignore[no-untyped-call]
    compute.wait_stream(rig.comm)
    return []


def synchronous(rig: Rig) -> list[torch.Tensor]:
    """Inside the computation: nothing hides it."""
    rig.work()
    x = rig.tensor(rig.rank + 1)
    dist.all_reduce(x)
    y = x - 3
    rig.work()
    return [y]


def on_a_strategys_stream(rig: Rig) -> list[torch.Tensor]:
    """As FSDP does: a synchronous all-gather on a stream of its own, and the computing stream waits for an event."""
    compute = torch.cuda.current_stream()
    shard = rig.tensor(rig.rank + 1)
    rig.comm.wait_stream(compute)
    with torch.cuda.stream(rig.comm):
        whole = torch.empty(ELEMENTS * rig.size, device=rig.device)
        dist.all_gather_into_tensor(whole, shard)
        gathered = torch.cuda.Event()  # type: ignore[no-untyped-call]
        gathered.record(rig.comm)
    rig.work()
    compute.wait_event(gathered)
    out = whole.view(rig.size, -1)[1 - rig.rank] - (2 - rig.rank)
    rig.comm.wait_stream(compute)
    with torch.cuda.stream(rig.comm):
        del whole
    return [out]


def two_streams_of_one_group(rig: Rig) -> list[torch.Tensor]:
    """A reduce-scatter on a stream of the strategy's while an all-reduce of the same group is under way elsewhere."""
    compute = torch.cuda.current_stream()
    x, parts = rig.tensor(rig.rank + 1), rig.tensor(rig.rank + 1)
    first = dist.all_reduce(x, async_op=True)
    rig.work()
    with torch.cuda.stream(rig.comm):
        rig.comm.wait_stream(compute)
        part = torch.empty(ELEMENTS // rig.size, device=rig.device)
        dist.reduce_scatter_tensor(part, parts)
    rig.work()
    compute.wait_stream(rig.comm)
    assert first is not None
    first.wait()
    return [x - 3, part - 3]


def by_its_future(rig: Rig) -> list[torch.Tensor]:
    """As DDP does, in a backward pass: handles are dropped, and only the futures are waited for."""
    rig.model.zero_grad()
    output = rig.model(rig.input)
    output.backward(torch.ones_like(output))
    first, second = (parameter.grad for parameter in rig.model.parameters())
    assert first is not None
    assert second is not None
    # Of rank r: (r + 1) * 16 * 16 and (r + 1) * 16 * 16 in each place; the sum over both ranks is three times that.
    return [first - 3 * WIDTH**2, second - 3 * WIDTH**2]


def dropped_tensors(rig: Rig) -> list[torch.Tensor]:
    """The caller keeps nothing of the input, and the allocator is asked for the same size at once."""
    rig.work()
    x = rig.tensor(rig.rank + 1)
    whole = torch.empty(ELEMENTS * rig.size, device=rig.device)
    work = dist.all_gather_into_tensor(whole, x, async_op=True)
    del x
    garbage = [rig.tensor(-5.0) for _ in range(3)]
    assert work is not None
    work.wait()
    del garbage
    return [whole.view(rig.size, -1)[1 - rig.rank] - (2 - rig.rank)]


def never_waited(rig: Rig) -> list[torch.Tensor]:
    """Fire and forget: the memory must not be given away before the device has passed."""
    rig.work()
    x = rig.tensor(rig.rank + 1)
    dist.all_reduce(x, async_op=True)
    del x
    return [rig.tensor(0.0)]


def waited_much_later(rig: Rig) -> list[torch.Tensor]:
    """A handle that is waited for when its step has long been read, and its marks have been given to others."""
    outs = []
    if len(rig.late) == LATE_STEPS:
        work, x = rig.late.pop(0)
        work.wait()
        outs.append(x - 3)
    x = rig.tensor(rig.rank + 1)
    late = dist.all_reduce(x, group=rig.groups.late, async_op=True)
    assert late is not None
    rig.late.append((late, x))
    return outs


def waited_on_another_stream(rig: Rig) -> list[torch.Tensor]:
    """Twice: the wait of a stream that does not compute orders that stream alone, and is no stall."""
    compute = torch.cuda.current_stream()
    rig.work()
    x = rig.tensor(rig.rank + 1)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    with torch.cuda.stream(rig.comm):
        work.wait()
        y = x - 3
        y.record_stream(compute)
    rig.work()
    work.wait()
    z = x - 3
    compute.wait_stream(rig.comm)
    return [y, z]


def opposite_directions(rig: Rig) -> list[torch.Tensor]:
    """Sends and receives by themselves, in opposite orders: they must be able to run side by side."""
    peer = 1 - rig.rank
    rig.work()
    there, back = rig.tensor(rig.rank + 1), rig.tensor(0)
    if rig.rank:
        works = [dist.irecv(back, peer), dist.isend(there, peer)]
    else:
        works = [dist.isend(there, peer), dist.irecv(back, peer)]
    rig.work()
    for work in works:
        assert work is not None
        work.wait()
    return [back - (2 - rig.rank)]


def one_way(rig: Rig) -> list[torch.Tensor]:
    """Both ranks send first: who serves a send before a receive waits for ever."""
    peer = 1 - rig.rank
    there, back = rig.tensor(rig.rank + 1), rig.tensor(0)
    works = [dist.isend(there, peer), dist.irecv(back, peer)]
    for work in works:
        assert work is not None
        work.wait()
    return [back - (2 - rig.rank)]


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


def another_group(rig: Rig) -> list[torch.Tensor]:
    """Two groups at once, the second one's ready later."""
    rig.work()
    x, y = rig.tensor(rig.rank + 1), rig.tensor(rig.rank + 1)
    works = [dist.all_reduce(x, async_op=True)]
    rig.work()
    works.append(dist.all_reduce(y, group=rig.groups.other, async_op=True))
    rig.work()
    for work in works:
        assert work is not None
        work.wait()
    return [x - 3, y - 3]


def offloaded(rig: Rig) -> list[torch.Tensor]:
    """An optimizer's state in page-locked memory: there and back on a stream of the strategy's, beside computation."""
    compute = torch.cuda.current_stream()
    gradient = rig.tensor(rig.rank + 1)
    rig.comm.wait_stream(compute)
    with torch.cuda.stream(rig.comm):
        rig.state.copy_(gradient, non_blocking=True)
        gradient.record_stream(rig.comm)
    rig.work()
    with torch.cuda.stream(rig.comm):
        back = rig.state.to(rig.device, non_blocking=True)
    compute.wait_stream(rig.comm)
    back.record_stream(compute)
    return [back - (rig.rank + 1)]


def left_to_run(rig: Rig) -> list[torch.Tensor]:
    """A copy that the next step may find still running, issued behind a kernel."""
    rig.comm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(rig.comm):
        torch.cuda._sleep(50_000)  # type: ignore[no-untyped-call]
        rig.late_state.copy_(rig.weights, non_blocking=True)
    return []


def within_the_device(rig: Rig) -> list[torch.Tensor]:
    """Bytes that move, beside a conversion and a transposition, which are kernels."""
    x = rig.tensor(3)
    rows = x.view(64, -1)
    return [x.clone() - 3, x.to(torch.float64) - 3, rows.t().contiguous() - 3]


Part = Callable[[Rig], list[torch.Tensor]]
ALLREDUCE = Launch("allreduce", 0, ("allreduce",))
ALLGATHER = Launch("allgather", 0, ("allgather",))
SEND, RECV = Launch("send", 0, ("send",)), Launch("recv", 0, ("recv",))
TO_ALL = Launch("coalesced", 0, ("alltoall", "alltoall"))
GATHERED = Launch("coalesced", 0, ("allgather",))


def parts(rank: int) -> list[tuple[Part, tuple[Launch, ...]]]:
    """Each with what the backend launches for it, in the order of the calls on this rank."""
    return [
        (slow_producer, (ALLREDUCE,)),
        (one_after_another, (ALLREDUCE, ALLREDUCE)),
        (no_collective, ()),
        (synchronous, (ALLREDUCE,)),
        (on_a_strategys_stream, (ALLGATHER,)),
        (two_streams_of_one_group, (ALLREDUCE, Launch("reducescatter", 0, ("reducescatter",)))),
        (by_its_future, (ALLREDUCE, ALLREDUCE)),
        (dropped_tensors, (ALLGATHER,)),
        (never_waited, (ALLREDUCE,)),
        (waited_on_another_stream, (ALLREDUCE,)),
        (opposite_directions, (RECV, SEND) if rank else (SEND, RECV)),
        (one_way, (SEND, RECV)),
        (batched_point_to_point, (Launch("coalesced", 0, ("send", "recv")),)),
        (lambda rig: coalesced(rig, asynchronous=False, fast=False), (TO_ALL,)),
        (lambda rig: coalesced(rig, asynchronous=True, fast=False), (TO_ALL,)),
        (lambda rig: coalesced(rig, asynchronous=False, fast=True), (GATHERED,)),
        (lambda rig: coalesced(rig, asynchronous=True, fast=True), (GATHERED,)),
        (another_group, (ALLREDUCE, Launch("allreduce", 1, ("allreduce",)))),
        (offloaded, ()),
        (within_the_device, ()),
        (waited_much_later, (Launch("allreduce", 2, ("allreduce",)),)),
        (left_to_run, ()),
    ]
