"""Parts of the loop of `scenario` on streams of a strategy's own: collectives and copies there, and waits for them.

A part returns tensors that are 0 where what it read was right. Must not: wait for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.device_path.rig import ELEMENTS, Rig

HELD_UP_NS = 20_000_000
"""Of a stream that nothing waits for: long enough, also in real time, for other streams to run out of work."""


def no_collective(rig: Rig) -> list[torch.Tensor]:
    """The computing stream waits for something else of the strategy's: no stall."""
    compute = torch.cuda.current_stream()
    rig.comm.wait_stream(compute)
    with torch.cuda.stream(rig.comm):
        torch.cuda._sleep(30_000)
    compute.wait_stream(rig.comm)
    return []


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
