"""Ways to issue collectives and copies and to wait for them, each a part of the loop of `scenario`.

    parts(rank) -> each way, with what the backend launches for it

A part returns tensors that are 0 where what it read was right. Must not: wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce_coalesced

from tests.device_path.batch_patterns import (
    batched_point_to_point,
    coalesced,
    of_lists,
    point_to_point,
    two_in_one_direction,
)
from tests.device_path.rig import ELEMENTS, WIDTH, Rig
from tests.device_path.stream_patterns import (
    batched_on_a_strategys_stream,
    by_generic_streams,
    left_to_run,
    no_collective,
    offloaded,
    on_a_strategys_stream,
    two_behind_one_event,
    two_streams_of_one_group,
    waited_for_while_another_stream_is_current,
    waited_on_another_stream,
    within_the_device,
)

LATE_STEPS = 4
"""So long after its collective a handle is waited for."""


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


def synchronous(rig: Rig) -> list[torch.Tensor]:
    """Inside the computation: nothing hides it."""
    rig.work()
    x = rig.tensor(rig.rank + 1)
    dist.all_reduce(x)
    y = x - 3
    rig.work()
    return [y]


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
