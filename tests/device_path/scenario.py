"""Everything that may go wrong between streams, events and memory, in one small loop on two simulated devices.

    run(device, groups(device), "observe", native=False) -> what was found wrong, and what ran

The device's own timeline, its checker of races and its counters are the witnesses. It runs in virtual time, and the
checker knows orders, not moments: nothing in it depends on how fast a machine is. Must not: wait for the device inside
a step, or share a rule with the instrument.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from aorta.instrument.instrumentation import Instrumentation
from aorta.instrument.open_step import StepFacts
from aorta.records.clocks import read_clocks
from aorta.records.schema import InstrumentMode, Step
from tests.device_path.agreement import disagreements
from tests.simulated import device as simulated

ELEMENTS = 4096
WIDTH = 16
STEPS = 5
READ_AFTER = 3
"""So many steps are read before the next begins: what they marked with is then used again."""
HANGS_S = 60.0
LATE_STEPS = 4
"""So long after its collective a handle is waited for."""


class Groups(NamedTuple):
    """Of all ranks each: what most parts use, a second one, and one whose handles are all waited for late.

    `streams`: by priority the one that the pool hands out next, when the groups have theirs.
    """

    world: dist.ProcessGroup
    other: dist.ProcessGroup
    late: dist.ProcessGroup
    streams: dict[int, int]

    def begin(self) -> None:
        """Each loop has the same streams of the pool, and none of the groups' own; with the same lengths."""
        for priority, first in self.streams.items():
            while stream_id(priority) != first:
                pass
        lengths()


def groups(device: torch.device) -> Groups:
    """Made once a process, with all their streams."""
    assert dist.group.WORLD is not None
    made = [dist.group.WORLD, dist.new_group(), dist.new_group()]
    x, peer = torch.zeros(1, device=device), 1 - dist.get_rank()
    works = [dist.all_reduce(x, group=group, async_op=True) for group in made]
    works += [dist.isend(x, peer), dist.irecv(torch.zeros(1, device=device), peer)]
    for work in works:
        assert work is not None
        work.wait()
    torch.accelerator.synchronize()
    return Groups(made[0], made[1], made[2], {priority: stream_id(priority) for priority in (0, -1)})


def stream_id(priority: int) -> int:
    """Of one that is new, or comes again."""
    return int(torch.Stream("cuda", priority=priority).stream_id)


class Launch(NamedTuple):
    """One kernel of a backend: its name there, which group's it is, and the rows that a record has of it."""

    name: str
    group: int
    kinds: tuple[str, ...]


class Block(nn.Module):
    """The only computation that takes time, forward and backward."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


@dataclass
class Rig:
    """One rank's model, streams and groups; what the parts below work with. `reference`: the model's own gradient."""

    device: torch.device
    rank: int
    size: int
    groups: Groups
    model: nn.Sequential = field(init=False)
    comm: torch.cuda.Stream = field(init=False)
    late: list[tuple[dist.Work, torch.Tensor]] = field(default_factory=list)
    futures: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.comm = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        self.model = nn.Sequential(Block(self.device), Block(self.device))
        self.state, self.late_state = (torch.empty(ELEMENTS, pin_memory=True) for _ in range(2))
        self.weights = self.tensor(1)
        self.input = torch.full((WIDTH, WIDTH), self.rank + 1.0, device=self.device)
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(self._reduce)  # type: ignore[no-untyped-call]

    def tensor(self, value: float) -> torch.Tensor:
        return torch.full((ELEMENTS,), float(value), device=self.device)

    def work(self) -> None:
        """A kernel of the model."""
        with torch.no_grad():
            self.model[0](self.input)

    def _reduce(self, parameter: torch.Tensor) -> None:
        """As DDP's reducer does: only the future is kept, and waited for behind the last node."""
        if not self.futures:
            torch.autograd.Variable._execution_engine.queue_callback(self._reduced)
        work = dist.all_reduce(parameter.grad, async_op=True)
        assert work is not None
        self.futures.append(work.get_future())

    def _reduced(self) -> None:
        for future in self.futures:
            future.wait()
        self.futures.clear()


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


def lengths() -> None:
    """Only the model's mathematics and collectives take time, and the host runs ahead of both."""
    simulated.defaults()
    simulated.costs(launch_ns=0)
    classes = dict.fromkeys(simulated.CLASSES, (0, 0.0))
    simulated.lengths(**classes, operators={"aten::mm": (40_000, 0.0)})
    # Another bandwidth in each direction: 16 KiB in 36, 48 and 6 us.
    simulated.lengths(copy_h2d=(4_000, 2_000.0), copy_d2h=(16_000, 2_000.0), copy_d2d=(2_000, 250.0))
    simulated.collective_lengths(default=(90_000, 0.5), send=(60_000, 0.5), recv=(60_000, 0.5))


def caught_up(instrument: Instrumentation, lines: list[Step], number: int) -> bool:
    """Read until so many steps are written; polling is no order to the checker of races."""
    deadline = time.monotonic() + HANGS_S
    while len(lines) < number and time.monotonic() < deadline:
        instrument.recorder.catch_up()
        time.sleep(0.0005)  # the device's threads want the processor
    return len(lines) == number


Shape = list[tuple[str, int, int]]
"""Names, starts and ends of all that took time; the device's first moment is 0."""


def shape_of(device: int) -> Shape:
    """What ran. Which stream it was on is the instrument's choice; when it ran is not."""
    rows = [row for row in simulated.timeline(device) if row.end_ns > row.start_ns]
    origin_ns = rows[0].start_ns
    return sorted((row.name, row.start_ns - origin_ns, row.end_ns - origin_ns) for row in rows)


def first_difference(ran: Shape, shape: Shape) -> str:
    """In words."""
    pairs = zip(ran, shape, strict=False)
    return next((f"{one} in place of {other}" for one, other in pairs if one != other), f"{len(ran)} of {len(shape)}")


def run(
    device: torch.device,
    groups: Groups,
    mode: InstrumentMode,
    *,
    native: bool,
    make: Callable[..., Instrumentation] = Instrumentation,
    shape: Shape | None = None,
) -> tuple[list[str], Shape]:
    """The loop, `STEPS` times, under one instrument.

    Args:
        make: makes the instrument. shape: what ran when nothing looked on; None: this is that run.

    Returns:
        What was wrong, in words, and what ran.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    groups.begin()
    rig, lines, zeros, wrong = Rig(device, rank, size, groups), list[Step](), list[torch.Tensor](), list[str]()
    todo = parts(rank)
    torch.accelerator.synchronize()
    simulated.reset()
    with make(device, mode, rank, size, read_clocks(), lines.append, native=native) as instrument:
        if native != (instrument.recorder.quiet_interceptor is not None):
            wrong.append("it is not the tap that was asked for")
        instrument.watch([("first", rig.model[0]), ("second", rig.model[1])])
        instrument.watch_backward(rig.model)
        before = dict(simulated.counters(device.index).host_synchronisations)
        for number in range(STEPS):
            with instrument.recorder.step(StepFacts(0, number, number, 0.0, warmup=False)):
                for part, _ in todo:
                    zeros += [out.abs().max() for out in part(rig)]
            if number == READ_AFTER and not caught_up(instrument, lines, number + 1):
                wrong.append(f"{len(lines)} of {number + 1} steps can be read")
        if (after := dict(simulated.counters(device.index).host_synchronisations)) != before:
            wrong.append(f"the host synchronised: {before} before, {after} after")
        for work, _ in rig.late:
            work.wait()
        instrument.recorder.finish()
    wrong += [f"race: {simulated.describe(race)}" for race in simulated.races()]
    if bad := [number for number, zero in enumerate(zeros) if float(zero) != 0]:
        wrong.append(f"wrong values: {bad} of {len(zeros)}")
    ran = shape_of(device.index)
    if shape is not None and ran != shape:
        wrong.append(f"the device's own times changed: {first_difference(ran, shape)}")
    if mode != "off":
        if len(lines) != STEPS:
            wrong.append(f"{len(lines)} steps in the record")
        launches = [launch for _, own in todo for launch in own]
        names = [group.group_name for group in rig.groups[:3]]
        wrong += disagreements(lines, device.index, [(one.name, names[one.group], one.kinds) for one in launches])
    return wrong, ran


class Use(NamedTuple):
    """Of memory and events, by a loop whose device has passed before each part. `events`: created in steady state."""

    peak_bytes: int
    live_bytes: int
    events: int


def use(
    device: torch.device,
    groups: Groups,
    mode: InstrumentMode,
    *,
    native: bool,
    make: Callable[..., Instrumentation] = Instrumentation,
) -> Use:
    """What the loop needs: the device is waited for behind every part, so that it does not depend on its speed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups.begin()
    # Of the loop before this one: cycles, and what the backend keeps until its next call.
    gc.collect()
    torch.accelerator.synchronize()
    work = dist.all_reduce(torch.zeros(1, device=device), async_op=True)
    assert work is not None
    work.wait()
    del work
    torch.accelerator.synchronize()
    simulated.reset()
    live = simulated.counters(device.index).live_bytes
    rig, lines = Rig(device, rank, size, groups), list[Step]()
    todo = [part for part, _ in parts(rank)]
    with make(device, mode, rank, size, read_clocks(), lines.append, native=native) as instrument:
        instrument.watch([("first", rig.model[0]), ("second", rig.model[1])])
        instrument.watch_backward(rig.model)
        for number in range(2 * STEPS):
            if number == STEPS:
                events = simulated.counters(device.index).events_created
                torch.cuda.reset_peak_memory_stats()
            with instrument.recorder.step(StepFacts(0, number, number, 0.0, warmup=False)):
                for part in todo:
                    part(rig)
                    torch.accelerator.synchronize()
            caught_up(instrument, lines, number + 1)
        counters = simulated.counters(device.index)
        for work, _ in rig.late:
            work.wait()
        instrument.recorder.finish()
    return Use(counters.peak_bytes - live, counters.live_bytes - live, counters.events_created - events)
