"""Everything that may go wrong between streams, events and memory, in one small loop on two simulated devices.

Enters: an instrument's mode and which tap. Leaves: a list of what was found wrong, empty when all is right. The
device's own timeline, its checker of races and its counters are the witnesses. Must not: pass because of timing; it
runs in virtual time, and the checker knows orders, not moments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from aorta.instrument.instrument import Instrument
from aorta.instrument.reading import StepFacts
from aorta.telemetry.clock import read_clocks
from aorta.telemetry.schema import InstrumentMode, Step
from tests.device_path.witness import truth_of
from tests.simulated import device as simulated

ELEMENTS = 4096
COMPUTE_NS = 40_000
STEPS = 6
WARM_UP = 2


@dataclass
class Rig:
    """One rank's streams and groups; `part` runs each of the parts below."""

    device: torch.device
    rank: int
    size: int
    other: dist.ProcessGroup
    comm: torch.cuda.Stream = field(init=False)
    late: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.comm = torch.cuda.Stream(self.device, priority=-1)

    def tensor(self, value: float) -> torch.Tensor:
        return torch.full((ELEMENTS,), value, device=self.device)

    def work(self) -> None:
        """A kernel of the model."""
        torch.cuda._sleep(COMPUTE_NS)


def slow_producer(rig: Rig) -> list[torch.Tensor]:
    """An asynchronous all-reduce of what a long kernel writes, computation beside it, and its wait."""
    x = rig.tensor(0)
    rig.work()
    x.fill_(rig.rank + 1)
    work = dist.all_reduce(x, async_op=True)
    rig.work()
    assert work is not None
    work.wait()
    return [x - 3]


def synchronous(rig: Rig) -> list[torch.Tensor]:
    """Inside the computation: nothing hides it."""
    rig.work()
    x = rig.tensor(rig.rank + 1)
    dist.all_reduce(x)
    y = x - 3
    rig.work()
    return [y]


def on_a_strategys_stream(rig: Rig) -> list[torch.Tensor]:
    """As FSDP does: a synchronous all-gather on a stream of its own, and an event that the computing stream waits for."""
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


def two_streams_of_one_group(rig: Rig) -> list[torch.Tensor]:
    """A reduce-scatter on a stream of the strategy's while an all-reduce of the same group is under way elsewhere."""
    compute = torch.cuda.current_stream()
    x, parts = rig.tensor(rig.rank + 1), rig.tensor(rig.rank + 1)
    rig.comm.wait_stream(compute)
    first = dist.all_reduce(x, async_op=True)
    with torch.cuda.stream(rig.comm):
        part = torch.empty(ELEMENTS // rig.size, device=rig.device)
        dist.reduce_scatter_tensor(part, parts)
    rig.work()
    compute.wait_stream(rig.comm)
    assert first is not None
    first.wait()
    return [x - 3, part - 3]


def by_its_future(rig: Rig) -> list[torch.Tensor]:
    """As DDP does: the handle is dropped, and only the future is waited for."""
    x = rig.tensor(0)
    rig.work()
    x.fill_(rig.rank + 1)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    future = work.get_future()
    del work
    rig.work()
    future.wait()
    return [future.value()[0] - 3]


def dropped_tensors(rig: Rig) -> list[torch.Tensor]:
    """The caller keeps nothing, and the allocator is asked for the same size at once."""
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
    if len(rig.late) > WARM_UP:
        work, x, value = rig.late.pop(0)
        work.wait()
        outs.append(x - value)
    x = rig.tensor(rig.rank + 1)
    rig.late.append((dist.all_reduce(x, async_op=True), x, 3))
    return outs


def opposite_directions(rig: Rig) -> list[torch.Tensor]:
    """Sends and receives by themselves: they must be able to run side by side."""
    peer = 1 - rig.rank
    there, back = rig.tensor(rig.rank + 1), rig.tensor(0)
    works = [dist.isend(there, peer), dist.irecv(back, peer)]
    if rig.rank:
        works.reverse()
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
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return [back - (2 - rig.rank)]


def coalesced(rig: Rig, *, asynchronous: bool) -> list[torch.Tensor]:
    """All-gathers collected by the backend: `all_to_all` has no fast path, so each is launched when the manager ends."""
    rig.work()
    pairs = [(rig.tensor(rig.rank + 1), rig.tensor(0)) for _ in range(2)]
    manager = dist.distributed_c10d._coalescing_manager(device=rig.device, async_ops=asynchronous)
    with manager as waiting:
        for source, result in pairs:
            dist.all_to_all_single(result, source, async_op=asynchronous)
    if asynchronous:
        rig.work()
        waiting.wait()
    half = ELEMENTS // 2
    return [result[half:] - 2 for _, result in pairs] + [result[:half] - 1 for _, result in pairs]


def another_group(rig: Rig) -> list[torch.Tensor]:
    """Two groups at once."""
    rig.work()
    x, y = rig.tensor(rig.rank + 1), rig.tensor(rig.rank + 1)
    works = [dist.all_reduce(x, async_op=True), dist.all_reduce(y, group=rig.other, async_op=True)]
    rig.work()
    for work in works:
        assert work is not None
        work.wait()
    return [x - 3, y - 3]


PARTS: tuple[Callable[[Rig], list[torch.Tensor]], ...] = (
    slow_producer,
    synchronous,
    on_a_strategys_stream,
    two_streams_of_one_group,
    by_its_future,
    dropped_tensors,
    never_waited,
    waited_much_later,
    opposite_directions,
    batched_point_to_point,
    lambda rig: coalesced(rig, asynchronous=False),
    lambda rig: coalesced(rig, asynchronous=True),
    another_group,
)


@dataclass
class Found:
    """What one run of the loop showed. `wrong`: in words."""

    wrong: list[str]
    peak_bytes: int
    events: list[int]
    lines: list[Step]


def run(device: torch.device, other: dist.ProcessGroup, mode: InstrumentMode, *, native: bool) -> Found:
    """The loop, `STEPS` times, under one instrument."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rig, lines, wrong, events = Rig(device, rank, size, other), list[Step](), list[str](), list[int]()
    torch.accelerator.synchronize()
    simulated.reset()
    zeros: list[torch.Tensor] = []
    with Instrument(device, mode, rank, size, read_clocks(), lines.append, native=native) as instrument:
        for number in range(STEPS):
            if number == WARM_UP:
                torch.cuda.reset_peak_memory_stats()
                syncs = simulated.counters()["host_synchronisations"]
            with instrument.recorder.step(StepFacts(0, number, number, 0.0, warmup=number < WARM_UP)):
                for part in PARTS:
                    zeros += [out.abs().max() for out in part(rig)]
            events.append(simulated.counters()["events_created"])
        peak = torch.cuda.max_memory_allocated()
        if simulated.counters()["host_synchronisations"] != syncs:
            wrong.append("the host synchronised")
        instrument.recorder.finish()
    for work, _, _ in rig.late:
        work.wait()
    wrong += [f"race: {race}" for race in simulated.races()]
    if any(float(zero) != 0 for zero in zeros):
        wrong.append("wrong values")
    if mode != "off":
        wrong += disagreements(lines, device)
    return Found(wrong, peak, events, lines)


def disagreements(lines: list[Step], device: torch.device) -> list[str]:
    """Where the record differs from the device's own timeline."""
    rows, waits = simulated.timeline(), simulated.waits()
    compute = torch.cuda.current_stream().stream_id
    queues: dict[Any, list[Any]] = {}
    for row in rows:
        if row.device == device.index and row.kind == "collective":
            queues.setdefault(row.group, []).append(row)
    wrong = []
    for line in lines:
        if not line.coverage.complete:
            wrong.append(f"coverage: {line.coverage.reason}")
        window = (line.start_mono_ns, line.end_mono_ns)
        truth = truth_of(window, rows, waits, compute, device.index)
        stall = line.overlap["compute_stall_ms"]
        if stall is None or abs(stall * 1e6 - truth.stall_ns) > 1:
            wrong.append(f"stalled {stall} ms, the device {truth.stall_ns} ns")
    return wrong
