"""Ways to issue collectives, messages and batches of them, and to wait for them: parts of the loop of `scenario`.

    parts(rank) -> each way, with what the backend launches for it and what the compute stream waits for

A part returns tensors that are 0 where what it read was right. Must not: wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce_coalesced

from tests.device_path.rig import ELEMENTS, Rig, exchanged

LATE_STEPS = 4
"""So long after its collective a handle is waited for."""
Way = Callable[..., list[torch.Tensor]]


class Launch(NamedTuple):
    """One kernel of a backend: its name there, which group's it is, and the rows that a record has of it: one of its
    name if none are given.
    """

    name: str
    group: int = 0
    kinds: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[str, ...]:
        return self.kinds or (self.name,)


class Part(NamedTuple):
    """One way to issue collectives, what the backend launches for it, and for which rows, by number, the compute stream
    waits so many steps later.
    """

    run: Callable[[Rig], list[torch.Tensor]]
    launches: tuple[Launch, ...]
    awaited: tuple[int, ...]
    steps_later: int


PARTS: list[Part] = []
ALLREDUCE, ALLGATHER, REDUCESCATTER = Launch("allreduce"), Launch("allgather"), Launch("reducescatter")
SEND, RECV = "send", "recv"


def part(*launches: Launch, awaited: Iterable[int] | None = None, later: int = 0, **words: Any) -> Callable[[Way], Way]:
    """The function is a part of the loop, called with these words; each of its rows is awaited once unless told."""
    rows = sum(len(launch.rows) for launch in launches)

    def kept(run: Way) -> Way:
        PARTS.append(Part(partial(run, **words), launches, tuple(range(rows) if awaited is None else awaited), later))
        return run

    return kept


def parts(rank: int) -> list[Part]:
    """All of them. Launches are said of rank 0; where it sends, rank 1 receives."""
    mirrored = {SEND: RECV, RECV: SEND} if rank else {}
    return [
        one._replace(launches=tuple(each._replace(name=mirrored.get(each.name, each.name)) for each in one.launches))
        for one in PARTS
    ]


def waited(works: Iterable[Any]) -> None:
    for work in works:
        work.wait()


@part(ALLREDUCE)
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


@part(ALLREDUCE, ALLREDUCE)
def one_after_another(rig: Rig) -> list[torch.Tensor]:
    """Who waits for the first of two does not wait for the second."""
    x, y = rig.tensor(), rig.tensor()
    first, second = dist.all_reduce(x, async_op=True), dist.all_reduce(y, async_op=True)
    first.wait()
    rig.work()
    second.wait()
    return [x - 3, y - 3]


@part(ALLREDUCE)
def synchronous(rig: Rig) -> list[torch.Tensor]:
    """Inside the computation: nothing hides it."""
    rig.work()
    x = rig.tensor()
    dist.all_reduce(x)
    y = x - 3
    rig.work()
    return [y]


@part(ALLREDUCE, awaited=())
def never_waited(rig: Rig) -> list[torch.Tensor]:
    """Fire and forget: the memory must not be given away before the device has passed."""
    rig.work()
    x = rig.tensor()
    dist.all_reduce(x, async_op=True)
    del x
    return [rig.tensor(0)]


@part(Launch("allreduce", 2), later=LATE_STEPS)
def waited_much_later(rig: Rig) -> list[torch.Tensor]:
    """A handle that is waited for when its step has long been read, and its marks have been given to others."""
    outs = []
    if len(rig.late) == LATE_STEPS:
        work, x = rig.late.pop(0)
        work.wait()
        outs.append(x - 3)
    x = rig.tensor()
    rig.late.append((dist.all_reduce(x, group=rig.groups.late, async_op=True), x))
    return outs


@part(ALLREDUCE, ALLREDUCE)
def other_ways_to_wait(rig: Rig) -> list[torch.Tensor]:
    """The calls of a handle that order streams as its wait does."""
    x, y = rig.tensor(), rig.tensor()
    first, second = dist.all_reduce(x, async_op=True), dist.all_reduce(y, async_op=True)
    first.synchronize()
    second.block_current_stream()
    return [x - 3, y - 3]


@part(Launch("allreduce_coalesced", kinds=("allreduce",)), awaited=(0, 0))
def one_handle_for_two(rig: Rig) -> list[torch.Tensor]:
    """A functional collective of two tensors: each waits for the one handle, which only C++ has."""
    first, second = all_reduce_coalesced([rig.tensor(), rig.tensor()], "sum", dist.group.WORLD)
    rig.work()
    return [first - 3, second - 3]


@part(ALLREDUCE, Launch(SEND), Launch(RECV), bound=True)
@part(*(Launch(name, 3) for name in ("allreduce", SEND, RECV)), bound=False)
def point_to_point(rig: Rig, *, bound: bool) -> list[torch.Tensor]:
    """A send and a receive by themselves, behind an all-reduce of their group, which theirs share a communicator with
    where the group is bound to a device.
    """
    group = rig.groups.world if bound else rig.groups.unbound
    x = rig.tensor()
    rig.work()
    there, back = rig.tensor(), rig.tensor(0)
    works = [dist.all_reduce(x, group=group, async_op=True), *exchanged(there, back, group)]
    rig.work()
    waited(works)
    return [back - (2 - rig.rank), x - 3]


@part(Launch(SEND), Launch(SEND))
def two_in_one_direction(rig: Rig) -> list[torch.Tensor]:
    """The second of two transfers to the same peer begins when the first has ended."""
    tensors = [rig.tensor(1 - rig.rank) for _ in range(2)]
    transfer = dist.irecv if rig.rank else dist.isend
    works = [transfer(tensor, 1 - rig.rank) for tensor in tensors]
    rig.work()
    waited(works)
    return [tensor - 1 for tensor in tensors]


@part(Launch("coalesced", kinds=("alltoall",) * 2), awaited=(1,), asynchronous=False, fast=False)
@part(Launch("coalesced", kinds=("alltoall",) * 2), awaited=(1,), asynchronous=True, fast=False)
@part(Launch("coalesced", kinds=("allgather",)), asynchronous=False, fast=True)
@part(Launch("coalesced", kinds=("allgather",)), asynchronous=True, fast=True)
def coalesced(rig: Rig, *, asynchronous: bool, fast: bool) -> list[torch.Tensor]:
    """Collected by the backend, and launched when the manager ends. `fast`: as one operator, whose own handle knows
    only that it was collected.
    """
    rig.work()
    sources = [rig.tensor() for _ in range(2)]
    results = [torch.empty(ELEMENTS * (rig.size if fast else 1), device=rig.device) for _ in range(2)]
    with dist._coalescing_manager(device=rig.device, async_ops=asynchronous) as waiting:
        for source, result in zip(sources, results, strict=True):
            if fast:
                dist.all_gather_into_tensor(result, source)
            else:
                dist.all_to_all_single(result, source, async_op=asynchronous)
    if asynchronous:
        if not fast:  # torch does not keep those of the one operator, whatever its handle says
            sources.clear()
        garbage = [rig.tensor(-5) for _ in range(2)]
        rig.work()
        waiting.wait()
        del garbage
    half = results[0].numel() // 2
    return [result[half:] - 2 for result in results] + [result[:half] - 1 for result in results]
