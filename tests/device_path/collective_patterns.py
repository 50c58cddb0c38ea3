"""Ways to issue collectives and copies and to wait for them, each a part of the loop of `scenario`.

    parts(rank) -> each way, with what the backend launches for it

A part returns tensors that are 0 where what it read was right. Must not: wait for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce_coalesced

from tests.device_path.rig import COPY_D2D, ELEMENTS, WIDTH, Rig
from tests.simulated import device as simulated

LATE_STEPS = 4
"""So long after its collective a handle is waited for."""
HELD_UP_NS = 20_000_000
"""Of a stream that nothing waits for: long enough, also in real time, for other streams to run out of work."""


class Launch(NamedTuple):
    """One kernel of a backend: its name there, which group's it is, and the rows that a record has of it."""

    name: str
    group: int
    kinds: tuple[str, ...]


class Awaited(NamedTuple):
    """A row of a part, by number, that the compute stream waits for so many steps later."""

    row: int
    steps_later: int = 0


def slow_producer(rig: Rig) -> list[torch.Tensor]:
    """An asynchronous all-reduce of what a long kernel writes, later on one rank; computation beside it; its wait."""
    x = rig.tensor(0)
    for _ in range(rig.rank + 4):
        rig.work()
    x.fill_(rig.rank + 1)
    work = dist.all_reduce(x, async_op=True)
    rig.work()
    work.wait()
    return [x - 3]


def one_after_another(rig: Rig) -> list[torch.Tensor]:
    """Who waits for the first of two does not wait for the second."""
    x, y = rig.tensor(rig.rank + 1), rig.tensor(rig.rank + 1)
    first, second = dist.all_reduce(x, async_op=True), dist.all_reduce(y, async_op=True)
    first.wait()
    rig.work()
    second.wait()
    return [x - 3, y - 3]


def no_collective(rig: Rig) -> list[torch.Tensor]:
    """The computing stream waits for something else of the strategy's: no stall."""
    compute = torch.cuda.current_stream()
    rig.comm.wait_stream(compute)
    with torch.cuda.stream(rig.comm):
        torch.cuda._sleep(30_000)
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
        gathered = torch.cuda.Event()
        gathered.record(rig.comm)
    rig.work()
    compute.wait_event(gathered)
    out = whole.view(rig.size, -1)[1 - rig.rank] - (2 - rig.rank)
    rig.comm.wait_stream(compute)
    with torch.cuda.stream(rig.comm):
        del whole
    return [out]


def two_behind_one_event(rig: Rig) -> list[torch.Tensor]:
    """The computing stream waits for one event, and so for two collectives of a strategy's stream."""
    compute = torch.cuda.current_stream()
    x, y = rig.tensor(rig.rank + 1), rig.tensor(rig.rank + 1)
    rig.comm.wait_stream(compute)
    with torch.cuda.stream(rig.comm):
        dist.all_reduce(x)
        dist.all_reduce(y)
    rig.work()
    compute.wait_stream(rig.comm)
    return [x - 3, y - 3]


def by_generic_streams(rig: Rig) -> list[torch.Tensor]:
    """The same, where the wait is that of an event, or of the streams and events that are not of `torch.cuda`."""
    compute = torch.cuda.current_stream()
    waits: list[Callable[[torch.cuda.Event, torch.Event], None]] = [
        lambda gathered, _generic: gathered.wait(compute),
        lambda gathered, _generic: torch.accelerator.current_stream().wait_event(gathered),
        lambda _gathered, _generic: torch.accelerator.current_stream().wait_stream(rig.comm),
        lambda _gathered, generic: generic.wait(stream=torch.accelerator.current_stream()),
    ]
    outs = []
    for wait in waits:
        shard, whole = rig.tensor(rig.rank + 1), torch.empty(ELEMENTS * rig.size, device=rig.device)
        rig.comm.wait_stream(compute)
        with torch.cuda.stream(rig.comm):
            dist.all_gather_into_tensor(whole, shard)
            gathered, generic = torch.cuda.Event(), torch.Event(device=rig.device)
            gathered.record(rig.comm)
            generic.record(rig.comm)
        wait(gathered, generic)
        outs.append(whole.view(rig.size, -1)[1 - rig.rank] - (2 - rig.rank))
        rig.work()
    return outs


def waited_for_while_another_stream_is_current(rig: Rig) -> list[torch.Tensor]:
    """The computing stream is made to wait where the strategy's own stream is the current one."""
    compute = torch.cuda.current_stream()
    x = rig.tensor(rig.rank + 1)
    rig.comm.wait_stream(compute)
    with torch.cuda.stream(rig.comm):
        dist.all_reduce(x)
        compute.wait_stream(rig.comm)
    rig.work()
    return [x - 3]


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
    first.wait()
    return [x - 3, part - 3]


def by_its_future(rig: Rig) -> list[torch.Tensor]:
    """As DDP does, in a backward pass: handles are dropped, and only the futures are waited for."""
    rig.model.zero_grad()
    output = rig.model(rig.input)
    output.backward(torch.ones_like(output))
    first, second = (parameter.grad for parameter in rig.model.parameters())
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
    rig.late.append((late, x))
    return outs


def waited_on_another_stream(rig: Rig) -> list[torch.Tensor]:
    """Twice: the wait of a stream that does not compute orders that stream alone, and is no stall."""
    compute = torch.cuda.current_stream()
    rig.work()
    x = rig.tensor(rig.rank + 1)
    work = dist.all_reduce(x, async_op=True)
    with torch.cuda.stream(rig.comm):
        work.wait()
        y = x - 3
        y.record_stream(compute)
    rig.work()
    work.wait()
    z = x - 3
    compute.wait_stream(rig.comm)
    return [y, z]


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


def batched_on_a_strategys_stream(rig: Rig) -> list[torch.Tensor]:
    """A synchronous batch on a strategy's stream, which the computing stream then waits for."""
    compute = torch.cuda.current_stream()
    tensors = [rig.tensor(rig.rank + 1) for _ in range(2)]
    rig.comm.wait_stream(compute)
    with (
        torch.cuda.stream(rig.comm),
        dist.distributed_c10d._coalescing_manager(device=rig.device, async_ops=False),
    ):
        for tensor in tensors:
            dist.all_to_all_single(torch.empty_like(tensor), tensor)
            dist.broadcast(tensor, 0)
    rig.work()
    compute.wait_stream(rig.comm)
    return [tensor - 1 for tensor in tensors]


def other_ways_to_wait(rig: Rig) -> list[torch.Tensor]:
    """The calls of a handle that order streams as its wait does."""
    x, y = rig.tensor(rig.rank + 1), rig.tensor(rig.rank + 1)
    first, second = dist.all_reduce(x, async_op=True), dist.all_reduce(y, async_op=True)
    first.synchronize()
    second.block_current_stream()
    return [x - 3, y - 3]


def one_handle_for_two(rig: Rig) -> list[torch.Tensor]:
    """A functional collective of two tensors: each waits for the one handle, which only C++ has."""
    tensors = [rig.tensor(rig.rank + 1) for _ in range(2)]
    first, second = all_reduce_coalesced(tensors, "sum", dist.group.WORLD)
    rig.work()
    return [first - 3, second - 3]


def another_group(rig: Rig) -> list[torch.Tensor]:
    """Two groups at once, the second one's ready later."""
    rig.work()
    x, y = rig.tensor(rig.rank + 1), rig.tensor(rig.rank + 1)
    works = [dist.all_reduce(x, async_op=True)]
    rig.work()
    works.append(dist.all_reduce(y, group=rig.groups.other, async_op=True))
    rig.work()
    for work in works:
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
        torch.cuda._sleep(50_000)
        rig.late_state.copy_(rig.weights, non_blocking=True)
    return []


def within_the_device(rig: Rig) -> list[torch.Tensor]:
    """Bytes that move, beside a conversion and a transposition, which are kernels."""
    x = rig.tensor(3)
    rows = x.view(64, -1)
    return [x.clone() - 3, x.to(torch.float64) - 3, rows.t().contiguous() - 3]


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


def left_by_a_failed_step(rig: Rig) -> None:
    """An all-reduce behind a long kernel, of a tensor that its caller drops; the step then fails."""
    with torch.cuda.stream(rig.held_up):
        torch.cuda._sleep(HELD_UP_NS)
        dist.all_reduce(rig.tensor(rig.rank + 1), group=rig.groups.failed, async_op=True)
    raise InterruptedError


def behind_a_failed_step(rig: Rig) -> None:
    """While that all-reduce runs: marks are taken and dropped, and memory like its tensor's is asked for."""
    compute = torch.cuda.current_stream()
    for _ in range(8):
        compute.wait_stream(rig.comm)
    while not compute.query():
        time.sleep(0.0005)
    dist.all_reduce(rig.tensor(1), group=rig.groups.failed, async_op=True)
    with torch.cuda.stream(rig.held_up):
        garbage = [rig.tensor(-5.0) for _ in range(3)]
        del garbage


Way = Callable[[Rig], list[torch.Tensor]]
ALLREDUCE = Launch("allreduce", 0, ("allreduce",))
ALLGATHER = Launch("allgather", 0, ("allgather",))
SEND, RECV = Launch("send", 0, ("send",)), Launch("recv", 0, ("recv",))
TO_ALL = Launch("coalesced", 0, ("alltoall", "alltoall"))
MIXED = Launch("coalesced", 0, ("alltoall", "broadcast") * 2)
GATHERED = Launch("coalesced", 0, ("allgather",))
FIRST, SECOND = Awaited(0), Awaited(1)


class Part(NamedTuple):
    """One way to issue collectives, what the backend launches for it, and what the compute stream waits for."""

    run: Way
    launches: tuple[Launch, ...] = ()
    awaited: tuple[Awaited, ...] = ()


def parts(rank: int) -> list[Part]:
    """All of them, each in the order of its calls on this rank."""
    messages = (RECV, SEND) if rank else (SEND, RECV)
    unbound = tuple(one._replace(group=3) for one in (ALLREDUCE, *messages))
    return [
        Part(slow_producer, (ALLREDUCE,), (FIRST,)),
        Part(one_after_another, (ALLREDUCE, ALLREDUCE), (FIRST, SECOND)),
        Part(no_collective),
        Part(synchronous, (ALLREDUCE,), (FIRST,)),
        Part(on_a_strategys_stream, (ALLGATHER,), (FIRST,)),
        Part(by_generic_streams, (ALLGATHER,) * 4, tuple(map(Awaited, range(4)))),
        Part(two_behind_one_event, (ALLREDUCE, ALLREDUCE), (FIRST, SECOND)),
        Part(waited_for_while_another_stream_is_current, (ALLREDUCE,), (FIRST,)),
        Part(two_streams_of_one_group, (ALLREDUCE, Launch("reducescatter", 0, ("reducescatter",))), (FIRST, SECOND)),
        Part(by_its_future, (ALLREDUCE, ALLREDUCE), (FIRST, SECOND)),
        Part(dropped_tensors, (ALLGATHER,), (FIRST,)),
        Part(never_waited, (ALLREDUCE,)),
        Part(waited_on_another_stream, (ALLREDUCE,), (FIRST, FIRST)),  # and for the stream that had waited
        Part(lambda rig: point_to_point(rig, bound=True), (ALLREDUCE, *messages), tuple(map(Awaited, range(3)))),
        Part(lambda rig: point_to_point(rig, bound=False), unbound, tuple(map(Awaited, range(3)))),
        Part(of_lists, (Launch("reducescatter", 0, ("reducescatter",)), ALLGATHER), (FIRST, SECOND)),
        Part(two_in_one_direction, (RECV, RECV) if rank else (SEND, SEND), (FIRST, SECOND)),
        Part(batched_point_to_point, (Launch("coalesced", 0, ("send", "recv")),), (SECOND,)),
        Part(lambda rig: coalesced(rig, asynchronous=False, fast=False), (TO_ALL,), (SECOND,)),
        Part(lambda rig: coalesced(rig, asynchronous=True, fast=False), (TO_ALL,), (SECOND,)),
        Part(lambda rig: coalesced(rig, asynchronous=False, fast=True), (GATHERED,), (FIRST,)),
        Part(lambda rig: coalesced(rig, asynchronous=True, fast=True), (GATHERED,), (FIRST,)),
        Part(batched_on_a_strategys_stream, (MIXED,), (Awaited(3),)),
        Part(other_ways_to_wait, (ALLREDUCE, ALLREDUCE), (FIRST, SECOND)),
        Part(one_handle_for_two, (Launch("allreduce_coalesced", 0, ("allreduce",)),), (FIRST, FIRST)),
        Part(another_group, (ALLREDUCE, Launch("allreduce", 1, ("allreduce",))), (FIRST, SECOND)),
        Part(offloaded),
        Part(within_the_device),
        Part(waited_much_later, (Launch("allreduce", 2, ("allreduce",)),), (Awaited(0, LATE_STEPS),)),
        Part(left_to_run),
    ]
