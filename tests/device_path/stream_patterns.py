"""Parts of the loop of `scenario` on streams of a strategy's own: collectives and copies there, and waits for them; and
what is in no step of the record.

A part returns tensors that are 0 where what it read was right. Must not: wait for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.device_path.collective_patterns import ALLGATHER, ALLREDUCE, Launch, part, waited
from tests.device_path.rig import ELEMENTS, Rig, exchanged

HELD_UP_NS = 20_000_000
"""Of a stream that nothing waits for: long enough, also in real time, for other streams to run out of work."""


@part()
def no_collective(rig: Rig) -> list[torch.Tensor]:
    """The computing stream waits for something else of the strategy's: no stall."""
    with rig.communicating():
        torch.cuda._sleep(30_000)
    torch.cuda.current_stream().wait_stream(rig.comm)
    return []


@part(ALLREDUCE, ALLREDUCE)
def two_behind_one_event(rig: Rig) -> list[torch.Tensor]:
    """The computing stream waits for one event, and so for two collectives of a strategy's stream."""
    x, y = rig.tensor(), rig.tensor()
    with rig.communicating():
        dist.all_reduce(x)
        dist.all_reduce(y)
    rig.work()
    torch.cuda.current_stream().wait_stream(rig.comm)
    return [x - 3, y - 3]


@part(*[ALLGATHER] * 6)
def on_a_strategys_stream(rig: Rig) -> list[torch.Tensor]:
    """As FSDP does: a synchronous all-gather on a stream of its own, for which the computing stream waits by an event,
    or by the streams and events that are not of `torch.cuda`, or while another stream is the current one.
    """
    compute = torch.cuda.current_stream()

    def from_elsewhere(_done: torch.cuda.Event, _generic: torch.Event) -> None:
        with torch.cuda.stream(rig.comm):
            compute.wait_stream(rig.comm)

    waits: list[Callable[[torch.cuda.Event, torch.Event], None]] = [
        lambda done, _generic: compute.wait_event(done),
        lambda done, _generic: done.wait(compute),
        lambda done, _generic: torch.accelerator.current_stream().wait_event(done),
        lambda _done, _generic: torch.accelerator.current_stream().wait_stream(rig.comm),
        lambda _done, generic: generic.wait(stream=torch.accelerator.current_stream()),
        from_elsewhere,
    ]
    outs = []
    for wait in waits:
        shard = rig.tensor()
        with rig.communicating():
            whole = torch.empty(ELEMENTS * rig.size, device=rig.device)
            dist.all_gather_into_tensor(whole, shard)
            done, generic = torch.cuda.Event(), torch.Event(device=rig.device)
            done.record(rig.comm)
            generic.record(rig.comm)
        rig.work()
        wait(done, generic)
        outs.append(whole.view(rig.size, -1)[1 - rig.rank] - (2 - rig.rank))  # the other rank's, less its value
        with rig.communicating():
            del whole
    return outs


@part(ALLREDUCE, awaited=(0, 0))  # the second time for the stream that had waited
def waited_on_another_stream(rig: Rig) -> list[torch.Tensor]:
    """Twice: the wait of a stream that does not compute orders that stream alone, and is no stall."""
    compute = torch.cuda.current_stream()
    rig.work()
    x = rig.tensor()
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


@part(Launch("coalesced", kinds=("alltoall", "broadcast") * 2), awaited=(3,))
def batched_on_a_strategys_stream(rig: Rig) -> list[torch.Tensor]:
    """A synchronous batch on a strategy's stream, which the computing stream then waits for."""
    tensors = [rig.tensor() for _ in range(2)]
    with rig.communicating(), dist._coalescing_manager(device=rig.device, async_ops=False):
        for tensor in tensors:
            dist.all_to_all_single(torch.empty_like(tensor), tensor)
            dist.broadcast(tensor, 0)
    rig.work()
    torch.cuda.current_stream().wait_stream(rig.comm)
    return [tensor - 1 for tensor in tensors]


@part()
def offloaded(rig: Rig) -> list[torch.Tensor]:
    """An optimizer's state in page-locked memory: there and back on a stream of the strategy's, beside computation."""
    compute = torch.cuda.current_stream()
    gradient = rig.tensor()
    with rig.communicating():
        rig.state.copy_(gradient, non_blocking=True)
        gradient.record_stream(rig.comm)
    rig.work()
    with torch.cuda.stream(rig.comm):
        back = rig.state.to(rig.device, non_blocking=True)
    compute.wait_stream(rig.comm)
    back.record_stream(compute)
    return [back - (rig.rank + 1)]


@part()
def within_the_device(rig: Rig) -> list[torch.Tensor]:
    """Bytes that move, beside a conversion and a transposition, which are kernels."""
    x = rig.tensor(3)
    rows = x.view(64, -1)
    return [x.clone() - 3, x.to(torch.float64) - 3, rows.t().contiguous() - 3]


@part()
def left_to_run(rig: Rig) -> list[torch.Tensor]:
    """The last one: a copy that the next step may find still running, issued behind a kernel."""
    with rig.communicating():
        torch.cuda._sleep(50_000)
        rig.late_state.copy_(rig.weights, non_blocking=True)
    return []


def between_steps(rig: Rig) -> list[torch.Tensor]:
    """Every kind of call where no step is open: nothing of it may be recorded, or keep a mark."""
    group, peer = rig.groups.between, 1 - rig.rank
    tensors = [rig.tensor() for _ in range(4)]
    there, back = ([rig.tensor(value) for _ in range(2)] for value in (None, 0))
    dist.all_reduce(tensors[0], group=group)
    works = [dist.all_reduce(tensors[1], group=group, async_op=True)]
    with dist._coalescing_manager(group, device=rig.device, async_ops=False):
        dist.all_reduce(tensors[2], group=group)
    with rig.communicating():
        dist.all_reduce(tensors[3], group=group)
    torch.cuda.current_stream().wait_stream(rig.comm)
    operations = [dist.P2POp(dist.isend, there[0], peer, group), dist.P2POp(dist.irecv, back[0], peer, group)]
    works += [*dist.batch_isend_irecv(operations), *exchanged(there[1], back[1], group)]
    waited(works)
    return [*(tensor - 3 for tensor in tensors), *(tensor - (2 - rig.rank) for tensor in back)]


def left_by_a_failed_step(rig: Rig) -> None:
    """An all-reduce behind a long kernel, of a tensor that its caller drops; the step then fails."""
    with torch.cuda.stream(rig.held_up):
        torch.cuda._sleep(HELD_UP_NS)
        dist.all_reduce(rig.tensor(), group=rig.groups.failed, async_op=True)
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
        garbage = [rig.tensor(-5) for _ in range(3)]
        del garbage
