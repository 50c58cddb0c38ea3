"""Small scenes of the device path that need one of their own: what `test_rules` asks for beside the loop of `scenario`.

Each is a function of two ranks and answers with what JSON can hold. Enters: the device, a mode. Must not:
depend on how fast a machine is; it runs in virtual time.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from aorta.instrument.device_streams import DeviceStreams, StreamOrder, StreamWaits
from aorta.instrument.emulation import emulated_link
from aorta.instrument.instrumentation import Instrumentation
from aorta.instrument.native.build import load
from aorta.instrument.native.native_interceptor import NativeDeviceClock
from aorta.records.clocks import read_clocks
from aorta.records.schema import InstrumentMode, Step
from aorta.records.step_line import StepFacts
from tests.device_path.collective_patterns import between_steps
from tests.device_path.rig import ELEMENTS, Block, Groups, Rig, lengths
from tests.device_path.scenario import caught_up
from tests.device_path.witness import truth_of
from tests.simulated import device as simulated
from tests.simulated.load import native as simulator

NOT_AT_ONCE_NS = 1_000
HANDLES = 8


@dataclass
class Scene:
    """A device, and an instrument that looks at it."""

    device: torch.device
    groups: Groups
    mode: InstrumentMode
    dedicated_async: bool = False
    lines: list[Step] = field(default_factory=list)
    number: int = 0

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @contextmanager
    def looking(self, *, native: bool = True) -> Iterator[Instrumentation]:
        """Everything is read at the end."""
        self.groups.begin()
        torch.accelerator.synchronize(self.device)
        simulated.reset()
        with Instrumentation(
            self.device,
            self.mode,
            self.rank,
            dist.get_world_size(),
            read_clocks(),
            self.lines.append,
            native=native,
            dedicated_async=self.dedicated_async,
        ) as instrument:
            yield instrument
            instrument.recorder.finish()

    def step(self, instrument: Instrumentation) -> Any:
        """The next one."""
        self.number += 1
        return instrument.recorder.step(StepFacts(0, self.number, self.number, 0.0, warmup=False))

    def tensor(self, value: float = 1.0) -> torch.Tensor:
        return torch.full((ELEMENTS,), value, device=self.device)

    def rows(self) -> list[tuple[str, int | None, int | None, str | None]]:
        """Kind, start and end on the host's clock, and who noticed the end, of all collectives in the record."""
        return [
            (
                row.kind,
                None if row.start_ns is None else row.start_ns + line.start_mono_ns,
                None if row.end_ns is None else row.end_ns + line.start_mono_ns,
                row.end_source,
            )
            for line in self.lines
            for row in line.collectives
        ]

    def kernels(self) -> list[tuple[str, int, int]]:
        """The same of the device."""
        rows = simulated.timeline(self.device.index, kind="collective")
        return [(row.name, row.start_ns, row.end_ns) for row in rows]


def capture(scene: Scene) -> Any:
    """Two collectives, a block's passes and waits, while a graph is captured."""
    block = Block(scene.device)
    side = torch.cuda.Stream()
    with scene.looking() as instrument:
        instrument.watch([("block", block)])
        instrument.watch_backward(block)
        x, inputs = scene.tensor(), torch.ones(16, 16, device=scene.device)
        block(inputs).sum().backward()
        with scene.step(instrument):
            dist.all_reduce(x)
            graph = simulated.begin_capture()
            torch.cuda.current_stream().wait_stream(side)
            for _ in range(2):
                dist.all_reduce(x)
            block(inputs).sum().backward()
            x.clone()
            simulated.end_capture(graph)
            with instrument.recorder.aux("behind"):
                dist.all_reduce(x)
        with scene.step(instrument):
            block(inputs).sum().backward()
            dist.all_reduce(x)
    return [
        (line.coverage.complete, line.coverage.reason, len(line.compute), len(line.copies or ()))
        for line in scene.lines
    ]


def capture_over_steps(scene: Scene) -> Any:
    """A graph that is captured over the ends of steps, while earlier steps and tensors wait for the device."""
    with scene.looking() as instrument:
        x = scene.tensor()
        with scene.step(instrument):
            dist.all_reduce(scene.tensor(), async_op=True)
            dist.all_reduce(x)  # behind it, so that the step ends behind both
        with scene.step(instrument):
            dist.all_reduce(x)
            graph = simulated.begin_capture()
        with scene.step(instrument):
            x.add_(1)  # a captured collective would leave all later steps unknown
        with scene.step(instrument):
            simulated.end_capture(graph)
            dist.all_reduce(x)
        with scene.step(instrument):
            dist.all_reduce(x)
    # The host is not ahead of an idle device: its marks bound the time.
    most_ms = [(line.bounds or {}).get("comm_ms", (0, line.overlap["comm_ms"]))[1] for line in scene.lines]
    return [
        (line.coverage.complete, line.coverage.reason, most) for line, most in zip(scene.lines, most_ms, strict=True)
    ]


def another_device_is_current(scene: Scene) -> Any:
    """The model's is not the current one."""
    block = Block(scene.device)
    inputs = torch.ones(16, 16, device=scene.device)
    with torch.cuda.device(1 - scene.device.index):
        with scene.looking() as instrument:
            instrument.watch([("block", block)])
            with scene.step(instrument):
                x = scene.tensor(scene.rank + 1.0)
                block(inputs)
                work = dist.all_reduce(x, async_op=True)
                block(inputs)
                work.wait()
                y = x - 3
        stray = len(simulated.timeline(1 - scene.device.index))
    (line,) = scene.lines
    return {
        "rows": [row[1:3] for row in scene.rows()],
        "kernels": [kernel[1:] for kernel in scene.kernels()],
        "compute": [(one.start_ns + line.start_mono_ns, one.end_ns + line.start_mono_ns) for one in line.compute],
        "math": [(row.start_ns, row.end_ns) for row in simulated.timeline(scene.device.index, name="aten::mm")],
        "zero": float(y.abs().max()),
        "stray": stray,
        "races": len(simulated.races()),
    }


def every_form(scene: Scene) -> Any:
    """Every collective of c10d in each of its forms, with callers that keep nothing but the handle and the result, and
    others that ask for the memory at once.
    """
    zeros = []
    with scene.looking() as instrument, scene.step(instrument):
        simulated.lengths(copy_d2d=(0, 0.0))  # the backend's own copies are part of what the record has
        for name, form in FORMS.items():
            for asynchronous in (False, True):
                torch.mm(inputs := torch.ones(16, 16, device=scene.device), inputs)  # the collective waits for it
                work, outs, shares = form(scene, asynchronous)
                garbage = [torch.full((size,), -5.0, device=scene.device) for size in SIZES for _ in range(3)]
                if work is not None:
                    work.wait()
                zeros += [
                    (name, asynchronous, (out - share).abs().max()) for out, share in zip(outs, shares, strict=True)
                ]
                del garbage, outs
    (line,) = scene.lines
    timed = {row[1:3] for row in scene.rows()}
    return {
        "wrong": [(name, asynchronous) for name, asynchronous, zero in zeros if float(zero) != 0],
        "races": [simulated.describe(race) for race in simulated.races()],
        "complete": line.coverage.complete,
        "untimed": [kernel for kernel in scene.kernels() if kernel[1:] not in timed],
        "forms": len(FORMS),
        "rows": len(line.collectives),
    }


SIZES = (ELEMENTS // 2, ELEMENTS, 2 * ELEMENTS)
Form = Callable[[Scene, bool], tuple[Any, list[torch.Tensor], list[float]]]
"""Issues it: the handle, what is read in the end, and the values that are right in each."""


def _coalesced(one: Callable[[torch.Tensor], tuple[torch.Tensor, float]]) -> Form:
    def form(scene: Scene, asynchronous: bool) -> tuple[Any, list[torch.Tensor], list[float]]:
        with dist._coalescing_manager(device=scene.device, async_ops=asynchronous) as manager:
            outs, shares = zip(*(one(scene.tensor(scene.rank + 1.0)) for _ in range(2)), strict=True)
        return manager if asynchronous else None, list(outs), list(shares)

    return form


def _reduced(x: torch.Tensor) -> tuple[torch.Tensor, float]:
    dist.all_reduce(x)
    return x, 3


def _scattered(x: torch.Tensor) -> tuple[torch.Tensor, float]:
    dist.reduce_scatter_tensor(part := torch.empty_like(x[: ELEMENTS // 2]), x)
    return part, 3


def _gathered(x: torch.Tensor) -> tuple[torch.Tensor, float]:
    dist.all_gather_into_tensor(whole := x.new_empty(2 * ELEMENTS), x)
    return whole[ELEMENTS:], 2


def _all_reduce(scene: Scene, asynchronous: bool) -> tuple[Any, list[torch.Tensor], list[float]]:
    return dist.all_reduce(x := scene.tensor(scene.rank + 1.0), async_op=asynchronous), [x], [3]


def _broadcast(scene: Scene, asynchronous: bool) -> tuple[Any, list[torch.Tensor], list[float]]:
    return dist.broadcast(x := scene.tensor(scene.rank + 1.0), 1, async_op=asynchronous), [x], [2]


def _reduce(scene: Scene, asynchronous: bool) -> tuple[Any, list[torch.Tensor], list[float]]:
    work = dist.reduce(x := scene.tensor(scene.rank + 1.0), 0, async_op=asynchronous)
    return work, [x] if scene.rank == 0 else [], [3] if scene.rank == 0 else []


def _all_gather(scene: Scene, asynchronous: bool) -> tuple[Any, list[torch.Tensor], list[float]]:
    work = dist.all_gather(
        outs := [scene.tensor() for _ in range(2)], scene.tensor(scene.rank + 1.0), async_op=asynchronous
    )
    return work, outs, [1, 2]


def _all_gather_single(scene: Scene, asynchronous: bool) -> tuple[Any, list[torch.Tensor], list[float]]:
    whole = torch.empty(2 * ELEMENTS, device=scene.device)
    work = dist.all_gather_into_tensor(whole, scene.tensor(scene.rank + 1.0), async_op=asynchronous)
    return work, list(whole.chunk(2)), [1, 2]


def _reduce_scatter(scene: Scene, asynchronous: bool) -> tuple[Any, list[torch.Tensor], list[float]]:
    sources = [scene.tensor(scene.rank + 1.0) for _ in range(2)]
    return dist.reduce_scatter(out := scene.tensor(), sources, async_op=asynchronous), [out], [3]


def _reduce_scatter_single(scene: Scene, asynchronous: bool) -> tuple[Any, list[torch.Tensor], list[float]]:
    part = torch.empty(ELEMENTS // 2, device=scene.device)
    return dist.reduce_scatter_tensor(part, scene.tensor(scene.rank + 1.0), async_op=asynchronous), [part], [3]


def _all_to_all(scene: Scene, asynchronous: bool) -> tuple[Any, list[torch.Tensor], list[float]]:
    sources = [scene.tensor(scene.rank + 1.0) for _ in range(2)]
    return dist.all_to_all(outs := [scene.tensor() for _ in range(2)], sources, async_op=asynchronous), outs, [1, 2]


def _all_to_all_single(scene: Scene, asynchronous: bool) -> tuple[Any, list[torch.Tensor], list[float]]:
    out = scene.tensor()
    work = dist.all_to_all_single(out, scene.tensor(scene.rank + 1.0), async_op=asynchronous)
    return work, list(out.chunk(2)), [1, 2]


def _all_to_all_uneven(scene: Scene, asynchronous: bool) -> tuple[Any, list[torch.Tensor], list[float]]:
    quarter = ELEMENTS // 4
    sizes = [quarter, 3 * quarter]  # what each rank gets of both
    out = torch.empty(2 * sizes[scene.rank], device=scene.device)
    work = dist.all_to_all_single(
        out, scene.tensor(scene.rank + 1.0), [sizes[scene.rank]] * 2, sizes, async_op=asynchronous
    )
    return work, list(out.chunk(2)), [1, 2]


def _gather(scene: Scene, asynchronous: bool) -> tuple[Any, list[torch.Tensor], list[float]]:
    outs = [scene.tensor() for _ in range(2)] if scene.rank == 0 else []
    work = dist.gather(scene.tensor(scene.rank + 1.0), outs or None, 0, async_op=asynchronous)
    return work, outs, [1.0, 2.0][: len(outs)]


def _scatter(scene: Scene, asynchronous: bool) -> tuple[Any, list[torch.Tensor], list[float]]:
    sources = [scene.tensor(rank + 5.0) for rank in range(2)] if scene.rank == 1 else None
    return dist.scatter(out := scene.tensor(), sources, 1, async_op=asynchronous), [out], [scene.rank + 5.0]


def _message(scene: Scene, asynchronous: bool) -> tuple[Any, list[torch.Tensor], list[float]]:
    if scene.rank == 0:
        x = scene.tensor(7.0)
        return (dist.isend(x, 1), [x], [7]) if asynchronous else (dist.send(x, 1), [x], [7])
    out = scene.tensor(0.0)
    work = dist.irecv(out, 0) if asynchronous else dist.recv(out, 0)
    return work if asynchronous else None, [out], [7]


FORMS: dict[str, Form] = {
    "all_reduce": _all_reduce,
    "all_reduce, coalesced": _coalesced(_reduced),
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_single,
    "all_gather_into_tensor, coalesced": _coalesced(_gathered),
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_single,
    "reduce_scatter_tensor, coalesced": _coalesced(_scattered),
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "all_to_all_single, of other sizes": _all_to_all_uneven,
    "gather": _gather,
    "scatter": _scatter,
    "send and recv": _message,
}


def unknown_communicators(scene: Scene) -> Any:
    """A send and a receive in a group of which nobody knows what its transfers wait for: by how much the second one
    begins after the first, in the record and on the device.
    """
    peer, there, back = 1 - scene.rank, scene.tensor(), scene.tensor()
    transfers = [(dist.isend, there), (dist.irecv, back)]
    unknown = patch("aorta.instrument.native.native_interceptor.shares_communicator", lambda _group, _device: None)
    with unknown, scene.looking() as instrument, scene.step(instrument):
        works = [
            transfer(tensor, peer, group=scene.groups.unbound)
            for transfer, tensor in (reversed(transfers) if scene.rank else transfers)
        ]
        for work in works:
            work.wait()
    return [second[1] - first[1] for first, second in (scene.rows(), scene.kernels())]


def stacked_in_a_batch(scene: Scene) -> Any:
    """A list, stacked by the backend, first in a batch: nothing but the caller's own wait keeps the stacked tensor."""
    with scene.looking() as instrument, scene.step(instrument):
        out, other = scene.tensor(), scene.tensor()
        with dist._coalescing_manager(device=scene.device, async_ops=True) as manager:
            sources = [scene.tensor(scene.rank + 1.0) for _ in range(2)]
            dist.reduce_scatter(out, sources, async_op=True)
            dist.broadcast(other, 0, async_op=True)
        del sources
        garbage = [torch.full((size,), -5.0, device=scene.device) for size in SIZES for _ in range(3)]
        manager.wait()
        del garbage
        zero = (out - 3).abs().max()
    (line,) = scene.lines
    return {
        "zero": float(zero),
        "races": [simulated.describe(race) for race in simulated.races()],
        "coverage": [line.coverage.complete, line.coverage.reason],
        "ends": [row.end_ns for row in line.collectives],
        "ratio": line.overlap["overlap_ratio"],
    }


def nothing_in_a_batch(scene: Scene) -> Any:
    """A batch without an operation between two kernels of the computation: rows, waits and stalls of the record."""
    block, inputs = Block(scene.device), torch.ones(16, 16, device=scene.device)
    with scene.looking() as instrument, scene.step(instrument):
        block(inputs)
        with dist._coalescing_manager(device=scene.device, async_ops=False):
            pass
        block(inputs)
    (line,) = scene.lines
    return [len(line.collectives), len(line.waits or ()), line.overlap["compute_stall_ms"]]


def checkpointed(scene: Scene) -> Any:
    """FSDP2, with blocks whose activations are computed again in the backward pass."""
    blocks = [fully_shard(Block(scene.device)) for _ in range(2)]
    model = fully_shard(nn.Sequential(*blocks))
    inputs = torch.ones(16, 16, device=scene.device)
    with scene.looking() as instrument:
        instrument.watch([(str(number), block) for number, block in enumerate(blocks)])
        instrument.watch_backward(model)

        def forward(x: torch.Tensor) -> torch.Tensor:
            for block in blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

        model.forward = forward
        for _ in range(2):
            with scene.step(instrument):
                model(inputs).sum().backward()
    line = scene.lines[-1]
    window = (line.start_mono_ns, line.end_mono_ns)
    compute = torch.cuda.current_stream(scene.device).stream_id
    truth = truth_of(window, simulated.timeline(), simulated.waits(), compute, scene.device.index)
    return {
        "rows": sorted(row[1:3] for row in scene.rows()),
        "kernels": sorted(kernel[1:] for kernel in scene.kernels()),
        "lengths": [round((line.overlap[name] or 0) * 1e6) for name in ("compute_ms", "comm_ms", "compute_comm_ms")],
        "truth": [truth.compute_ns, truth.comm_ns, truth.hidden_ns],
        "complete": line.coverage.complete,
        "races": len(simulated.races()),
    }


def split(scene: Scene) -> Any:
    """A communicator that was split from the one of all ranks: collectives, a message, and none of it mixed up."""
    group = dist.split_group(None, [[0, 1]])
    with scene.looking() as instrument, scene.step(instrument):
        x, y = scene.tensor(scene.rank + 1.0), scene.tensor(scene.rank + 1.0)
        works = [dist.all_reduce(x, group=group, async_op=True), dist.all_reduce(y, async_op=True)]
        works.append(
            dist.irecv(z := scene.tensor(0.0), 0, group=group) if scene.rank else dist.isend(x, 1, group=group)
        )
        for work in works:
            work.wait()
        dist.all_reduce(x, group=group)
        zeros = [x - 6, y - 3, *([z - 3] if scene.rank else [])]
    (line,) = scene.lines
    return {
        "rows": sorted(row[1:3] for row in scene.rows()),
        "kernels": sorted(kernel[1:] for kernel in scene.kernels()),
        "groups": [row.group == group.group_name for row in line.collectives],
        "complete": line.coverage.complete,
        "zero": float(torch.stack([zero.abs().max() for zero in zeros]).max()),
        "races": len(simulated.races()),
    }


def limited_wait(scene: Scene) -> Any:
    """A wait with a limit of time is the host's; of a collective that does not end it says so."""
    group = dist.new_group()
    said = ""
    with scene.looking() as instrument:
        with scene.step(instrument):
            x = scene.tensor()
            work = dist.all_reduce(x, group=group, async_op=True)
            issued_ns = simulated.host_ns()
            work.wait(timedelta(seconds=60))
            waited_ns = simulated.host_ns()
        simulated.dead_peer(group)
        work = dist.all_reduce(x, group=group, async_op=True)
        try:
            work.wait(timedelta(seconds=1))
        except dist.DistBackendError as error:
            said = str(error)
        group._get_backend(torch.device("cuda")).abort()
        torch.accelerator.synchronize()
    end_ns = scene.kernels()[0][2]
    return {"issued": issued_ns < end_ns, "waited": waited_ns >= end_ns, "said": said}


def blocking(scene: Scene) -> Any:
    """Where a wait blocks the host, only the caller's does; and a barrier's always."""
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    try:
        group = dist.new_group()
        with scene.looking() as instrument, scene.step(instrument):
            found = [
                waited(lambda: dist.all_reduce(scene.tensor(), group=group, async_op=True)),
                waited(lambda: dist.all_reduce(scene.tensor(), group=group)),
                waited(lambda: dist.barrier(async_op=True)),
                waited(lambda: dist.barrier()),
            ]
    finally:
        del os.environ["TORCH_NCCL_BLOCKING_WAIT"]
    return {"waited": found, "rows": scene.rows(), "kernels": scene.kernels()}


def waited(issue: Callable[[], Any]) -> tuple[bool, bool]:
    """Whether the host waited in the call, and in the handle's wait."""
    before_ns = simulated.host_ns()
    work = issue()
    issued_ns = simulated.host_ns()
    if work is not None:
        work.wait()
    return issued_ns - before_ns > NOT_AT_ONCE_NS, simulated.host_ns() - issued_ns > NOT_AT_ONCE_NS


def kept_handles(scene: Scene) -> Any:
    """Handles that their caller keeps and does not wait for, of tensors that it drops: how many of these live on when
    the device has passed and a step has begun.
    """
    with scene.looking() as instrument:
        x = scene.tensor()
        outs = [scene.tensor().repeat(2) for _ in range(HANDLES)]
        torch.accelerator.synchronize()
        live = simulated.counters(scene.device.index).live_bytes
        with scene.step(instrument):
            works = [dist.all_gather_into_tensor(out, scene.tensor(), async_op=True) for out in outs]
        torch.accelerator.synchronize()
        with scene.step(instrument):
            dist.all_reduce(x)  # the backend looks for what has ended
        torch.accelerator.synchronize()
        kept = simulated.counters(scene.device.index).live_bytes - live
        for work in works:
            work.wait()
    return int(kept / x.nbytes)


def abandoned(scene: Scene) -> Any:
    """Each other step fails; collectives, waits and a wait of the computing stream happen outside of steps as well."""
    events, rig = [], Rig(scene.device, scene.rank, dist.get_world_size(), scene.groups)
    side = torch.cuda.Stream()
    block = Block(scene.device)
    inputs = torch.ones(16, 16, device=scene.device)
    on_host = torch.empty(16, 16, pin_memory=True)
    with scene.looking() as instrument:
        instrument.watch([("block", block)])
        instrument.watch_backward(block)
        clock = instrument.clock
        assert isinstance(clock, NativeDeviceClock)
        for number in range(200):
            try:
                with scene.step(instrument):
                    work = dist.all_reduce(scene.tensor(), async_op=True)
                    block(inputs).sum().backward()
                    on_host.copy_(inputs, non_blocking=True)
                    torch.cuda.current_stream().wait_stream(side)
                    work.wait()
                    if number % 2:
                        raise InterruptedError
            except InterruptedError:
                pass
            # So that how many are in use is no matter of speed.
            torch.accelerator.synchronize()
            caught_up(instrument, scene.lines, number // 2 + 1)
            torch.cuda.current_stream().wait_stream(side)
            if number % 20 == 0:
                between_steps(rig)
            for _ in range(30 if number == 150 else 0):  # as many as no step has
                block(inputs).sum().backward()
            if number in (99, 199):
                events.append(clock.compiled.events())
    return {"events": events, "written": len(scene.lines)}


def unread_epochs(scene: Scene) -> Any:
    """1,200 epochs, none of them read before the last; then the one mark of an early epoch. By how much each is off."""
    lengths()
    module, _ = load()
    clock = NativeDeviceClock(module, scene.device)
    marked = []
    for number in range(1202):
        clock.new_epoch()
        torch.cuda._sleep(1_000)
        if number in (1, 1200):
            event = torch.Event(device=scene.device, enable_timing=True)
            marked.append((event, clock.mark()))
            event.record()
    torch.accelerator.synchronize()
    off_ns = []
    for event, mark in reversed(marked):
        off_ns.append(int(clock.read_ns(mark) or 0) - simulated.event_ns(event))
        clock.release(mark)
        for _ in range(1202):  # the events of epochs that no mark needs any more are recorded again
            clock.new_epoch()
            torch.cuda._sleep(1_000)
    return off_ns


def priorities(scene: Scene) -> Any:
    """Of the streams that a collective was issued on, and ran on."""
    with scene.looking() as instrument, scene.step(instrument):
        caller = torch.cuda.Stream(priority=-1)
        dist.all_reduce(scene.tensor())
        with torch.cuda.stream(caller):
            dist.all_reduce(scene.tensor())
    rows = simulated.timeline(scene.device.index, kind="collective")
    return [
        (int(simulator().stream_priority(row.device, row.stream)), row.stream not in (0, caller.stream_id))
        for row in rows
    ]


def moved(scene: Scene) -> Any:
    """Of a synchronous and an asynchronous all-reduce: whether the kernel ran on the caller's stream, and whether its
    stream was ordered behind the caller's directly.
    """
    block = Block(scene.device)
    inputs = torch.ones(16, 16, device=scene.device)
    with scene.looking() as instrument, scene.step(instrument):
        caller = torch.cuda.current_stream().stream_id
        for asynchronous in (False, True):
            block(inputs)
            work = dist.all_reduce(scene.tensor(), async_op=asynchronous)
            if work is not None:
                work.wait()
    waits = simulated.waits()
    return [
        (
            row.stream == caller,
            any((wait.stream, wait.on_stream, wait.end_ns) == (row.stream, caller, row.start_ns) for wait in waits),
        )
        for row in simulated.timeline(scene.device.index, kind="collective")
    ]


def marks_cost(scene: Scene) -> Any:
    """Where a mark takes its stream 5 us: the gap on the caller's stream at which a collective is issued beside it; and
    by how much the start of a synchronous one is off, which the stream that it ran on has marked.
    """
    with scene.looking() as instrument:
        simulated.lengths(operators={"aten::add": (100_000, 0.0)})
        simulated.costs(event_on_device_ns=5_000)
        x, y = scene.tensor(), scene.tensor()
        with scene.step(instrument):
            y + 1
            work = dist.all_reduce(x, async_op=True)
            y + 1
            work.wait()
            y + 1
            dist.all_reduce(x)
    before, behind, _ = simulated.timeline(scene.device.index, name="aten::add")
    return behind.start_ns - before.end_ns, (scene.rows()[1][1] or 0) - scene.kernels()[1][1]


def copies_here(scene: Scene) -> Any:
    """Bytes of the copies in the record, where one is onto itself, one is of one value for many elements, and one is on
    a stream that does not compute. What certainly computes where the host is late, beside that copy and beside a kernel
    as long.
    """
    block, side = Block(scene.device), torch.cuda.Stream()
    inputs, into, one = torch.ones(16, 16, device=scene.device), scene.tensor(), scene.tensor()[:1]
    source, copied = torch.ones(100, device=scene.device), torch.zeros(100, device=scene.device)
    beside: list[Callable[[], Any]] = [lambda: copied.copy_(source), lambda: copied.add_(1)]

    def forward(x: torch.Tensor) -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            beside[0]()
        return x @ x @ x

    block.forward = forward
    with scene.looking() as instrument:
        instrument.watch([("block", block)])
        long = (2_000_000, 0.0)
        simulated.lengths(copy_d2d=long, operators={"aten::mm": (100_000, 0.0), "aten::add_": long})
        simulated.costs(launch_ns=150_000)
        for _ in range(2):
            with scene.step(instrument):
                into.copy_(into)
                into.copy_(one)
                block(inputs)
            beside.reverse()
    return [[row.bytes for row in scene.lines[0].copies or ()], *((line.bounds or {}) for line in scene.lines)]


def recursive_block(scene: Scene) -> Any:
    """A block that runs itself once more: whether its inner pass lies within its outer one."""

    class Recursive(nn.Module):
        def forward(self, x: torch.Tensor, depth: int = 1) -> torch.Tensor:
            x = x @ x
            return self(x, depth - 1) @ x if depth else x

    block = Recursive()
    with scene.looking() as instrument:
        instrument.watch([("block", block)])
        with scene.step(instrument):
            block(torch.ones(16, 16, device=scene.device))
    outer, inner = scene.lines[0].compute
    return outer.start_ns < inner.start_ns < inner.end_ns < outer.end_ns


def backward_end_cost(scene: Scene) -> Any:
    """Marks at the end of a backward pass that three gradients reach, as the time of the host where each costs 1 ms."""
    block = Block(scene.device)
    spent_ns = []
    for watched in (False, True):
        with scene.looking() as instrument:
            if watched:
                instrument.watch_backward(block)
            with scene.step(instrument):
                inputs = torch.ones(16, 16, device=scene.device, requires_grad=True)
                output = sum(block(inputs).sum() for _ in range(3))
                assert isinstance(output, torch.Tensor)
                simulated.costs(event_ns=1_000_000)
                begin_ns = simulated.host_ns()
                output.backward()
                spent_ns.append(simulated.host_ns() - begin_ns)
                simulated.costs(event_ns=0)
    without, with_marks = spent_ns
    return round((with_marks - without) / 1e6)


def failed_handle(scene: Scene) -> Any:
    """What the handle of a collective that failed says."""
    group = dist.new_group()
    with scene.looking() as instrument, scene.step(instrument):
        simulated.fail_next_collective(group, "link down")
        torch.cuda._sleep(20_000_000)  # it fails when it runs, not where it is issued
        work = dist.all_reduce(scene.tensor(), group=group, async_op=True)
        with suppress(dist.DistBackendError):
            torch.accelerator.synchronize()
        said = str(work.exception())
        group._get_backend(torch.device("cuda")).abort()
        torch.accelerator.synchronize()
    return "link down" in said


def copies_elsewhere(scene: Scene) -> Any:
    """A value for the host, a copy of nothing, one to another device, and one that this makes itself."""
    here = scene.tensor()
    there = torch.ones(ELEMENTS, device=torch.device("cuda", 1 - scene.device.index))
    with scene.looking() as instrument, scene.step(instrument):
        here[0].item()
        here[:0].cpu()
        there.copy_(here)
        there.cpu()
    (line,) = scene.lines
    rows = [(row.direction, row.bytes, row.end_ns is not None) for row in line.copies or ()]
    return {"rows": rows, "copy_ms": line.overlap["copy_ms"], "reason": line.reasons["copy_ms"]}


def no_stream_to_time_on(scene: Scene) -> Any:
    """A device that hands out its only stream: to the caller, or for two groups."""
    values, told = [], []
    for callers in (True, False):
        with scene.looking() as instrument:
            simulated.pool_streams(1)
            with scene.step(instrument):
                caller = torch.cuda.Stream() if callers else torch.cuda.current_stream()
                with torch.cuda.stream(caller):
                    for group in (scene.groups.world,) if callers else (scene.groups.world, scene.groups.other):
                        x = scene.tensor(scene.rank + 1.0)
                        work = dist.all_reduce(x, group=group, async_op=True)
                        work.wait()
                        values.append((x - 3).abs().max())
                torch.cuda.current_stream().wait_stream(caller)
        lengths()
        told.append([scene.lines[-1].coverage.reason, [row.end_ns is None for row in scene.lines[-1].collectives]])
    return {"told": told, "zero": float(torch.stack(values).max()), "races": len(simulated.races())}


def many_joined(scene: Scene) -> Any:
    """More collectives than a stream keeps the names of, and a wait for all of them."""
    comm = torch.cuda.Stream()
    with scene.looking() as instrument, scene.step(instrument):
        with torch.cuda.stream(comm):
            x = scene.tensor()
            for _ in range(260):
                dist.all_reduce(x)
        torch.cuda.current_stream().wait_stream(comm)
    numbers = [wait.seq - scene.lines[0].collectives[0].seq for wait in scene.lines[0].waits or ()]
    return [len(numbers), min(numbers), max(numbers)]


def waits_told(scene: Scene) -> Any:
    """How often each wait is told, whatever it calls in turn: three of the stream that computes, one of the other
    device's stream of the same number, one of a stream that does not compute. What it waits for where a third stream
    has waited for that twice, and whether torch is then as it was.
    """
    names = ["collective"]
    order = StreamOrder(lambda stream: [names.pop()] if stream == joining and names else [])
    classes = (torch.Stream, torch.Event, torch.cuda.Stream, torch.cuda.Event)
    before = [dict(vars(one)) for one in classes]
    counts, told, joining = [], list[Any](), -1
    watched = DeviceStreams(scene.device)
    looking = StreamWaits(scene.device, watched, lambda: None, lambda *marks: told.append(marks), order)
    try:
        compute, side = torch.cuda.current_stream(), torch.cuda.Stream()
        event, elsewhere = side.record_event(), torch.cuda.default_stream(1 - scene.device.index)
        waits: list[Callable[[], Any]] = [
            lambda: compute.wait_stream(side),
            lambda: compute.wait_event(event),
            lambda: event.wait(compute),
            lambda: elsewhere.wait_event(event),
            lambda: side.wait_stream(compute),
        ]
        for wait in waits:
            wait()
            counts.append(len(told))
            told.clear()
        joining = side.stream_id
        event.record(side)
        third = torch.cuda.Stream()
        for _ in range(2):
            third.wait_event(event)
        compute.wait_stream(third)
    finally:
        looking.close()
    return [counts, [names for _, _, names in told], [dict(vars(one)) for one in classes] == before]


def future_elsewhere(scene: Scene) -> Any:
    """A future that is waited for before a backward pass, and so not at its end."""
    block = Block(scene.device)
    with scene.looking() as instrument:
        instrument.watch([("block", block)])
        instrument.watch_backward(block)
        with scene.step(instrument):
            output = block(torch.ones(16, 16, device=scene.device))
            work = dist.all_reduce(scene.tensor(), async_op=True)
            work.get_future().wait()
            output.sum().backward()
    return [wait.seq for wait in scene.lines[0].waits or ()]


def handles(scene: Scene) -> Any:
    """What a handle answers before its collective has begun, and after its end."""
    x = scene.tensor(scene.rank + 1.0)
    with scene.looking() as instrument, scene.step(instrument):
        torch.cuda._sleep(20_000_000)
        work = dist.all_reduce(x, async_op=True)
        before = work.is_completed()
        torch.accelerator.synchronize()
        return [before, work.is_completed(), work.is_success(), work.exception() is None, len(work.result())]


def uncertain_clock(scene: Scene) -> Any:
    """Brackets of the host's clock whose widths differ, the eighth the narrowest: 100 ns. Where the origin is taken to
    be, the bounds, and the drift to where the host's clock says a second later.
    """
    lengths()
    calls, base_ns = 0, 1

    def now_ns() -> int:
        nonlocal calls
        bracket, after = divmod(calls, 2)
        calls += 1
        return base_ns + 1_000 * bracket + after * (100 + 10 * abs(bracket - 7))

    module, _ = load()
    pointer = ctypes.CFUNCTYPE(ctypes.c_int64)(now_ns)
    try:
        module.use_clock(ctypes.cast(pointer, ctypes.c_void_p).value)
        clock = NativeDeviceClock(module, scene.device)
        mark: Any = clock.mark()
        torch.accelerator.synchronize()
        calls, base_ns = 0, 1_000_000_001
        facts = clock.facts()
    finally:
        module.use_clock(simulated.host_clock_address())
    return [clock.read_ns(mark), clock.bound_ns, facts.bound_at_start_ns, facts.bound_at_end_ns, facts.drift_ns]


def no_stream_left(scene: Scene) -> Any:
    """A device that hands out the same stream for two groups."""
    with scene.looking() as instrument:
        simulated.pool_streams(1)
        with scene.step(instrument):
            outs = []
            for group in (None, scene.groups.other):
                x = scene.tensor(scene.rank + 1.0)
                dist.all_reduce(x, group=group)
                outs.append(x - 3)
    lengths()
    rows = simulated.timeline(scene.device.index, kind="collective")
    return {
        "streams": [row.stream for row in rows],
        "exact": [row[1:3] for row in scene.rows()] == [kernel[1:] for kernel in scene.kernels()],
        "complete": scene.lines[0].coverage.complete,
        "zero": float(torch.stack(outs).abs().max()),
        "races": len(simulated.races()),
    }


def workers(scene: Scene) -> Any:
    """Of gloo, in a group of both backends whose first collective is the device's."""
    group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    with scene.looking() as instrument:
        with scene.step(instrument):
            dist.all_reduce(scene.tensor(), group=group)
            dist.all_reduce(torch.ones(4), group=group)
        lanes = instrument.groups[group.group_name].lanes
    (line,) = scene.lines
    waits = [wait.seq for wait in line.waits] if isinstance(line.waits, list) else None
    on_host: Any = group._get_backend(torch.device("cpu"))
    return {
        "lanes": lanes,
        "threads": int(on_host.options._threads),
        "sources": [row[3] for row in scene.rows()],
        "waits": waits,
    }


def not_compiled(scene: Scene) -> Any:
    """What the record says of a step where compiled code is not used."""
    with scene.looking(native=False) as instrument, scene.step(instrument):
        dist.all_reduce(scene.tensor())
        torch.cuda._sleep(20_000)
    (line,) = scene.lines
    known = [name for name, value in line.overlap.items() if value is not None]
    return [line.coverage.complete, line.coverage.reason, line.reasons["compute_ms"], known, len(line.collectives)]


def spins(scene: Scene) -> Any:
    """A spin's length: from the shortest of several measurements, and after a change of the clock from the next one."""
    lengths()
    factor, calls = 1.0, 0
    module: Any = emulated_link
    own = module.spin

    def spin(cycles: int) -> None:
        nonlocal calls
        calls += 1
        own(round(cycles * factor * (3 if calls in (2, 3, 5) else 1)))

    module.spin = spin
    try:
        sleep = emulated_link.StreamSleep(scene.device)
        simulated.reset()
        asked_ns = 1_000_000
        for change in (1.0, 1.5, 1.5, 1.5, 0.5, 0.5, 0.5):
            factor = change
            sleep(asked_ns)
            torch.accelerator.synchronize()
    finally:
        module.spin = own
    return [row.end_ns - row.start_ns for row in simulated.timeline(scene.device.index, kind="sleep")]


SCENES: tuple[Callable[[Scene], Any], ...] = (
    capture,
    capture_over_steps,
    another_device_is_current,
    every_form,
    unknown_communicators,
    stacked_in_a_batch,
    nothing_in_a_batch,
    checkpointed,
    split,
    limited_wait,
    blocking,
    kept_handles,
    abandoned,
    priorities,
    moved,
    marks_cost,
    copies_elsewhere,
    copies_here,
    recursive_block,
    backward_end_cost,
    failed_handle,
    no_stream_to_time_on,
    many_joined,
    future_elsewhere,
    handles,
    no_stream_left,
    workers,
)
ONE_MODE: tuple[Callable[[Scene], Any], ...] = (
    unread_epochs,
    uncertain_clock,
    waits_told,
    spins,
    not_compiled,
)
ALL_DEDICATED: tuple[Callable[[Scene], Any], ...] = (every_form, limited_wait, moved, handles)


def play(device: torch.device, groups: Groups) -> dict[str, Any]:
    """All of them: by scene, and by mode where that matters."""
    told: dict[str, Any] = {}
    modes: tuple[InstrumentMode, ...] = ("dedicated", "observe")
    for mode in modes:
        for scene in (*SCENES, *(ONE_MODE if mode == "dedicated" else ())):
            played(told, scene, Scene(device, groups, mode))
    for scene in ALL_DEDICATED:
        played(told, scene, Scene(device, groups, "dedicated", dedicated_async=True))
    return told


def played(told: dict[str, Any], scene: Callable[[Scene], Any], on: Scene) -> None:
    """Under its name."""
    simulated.defaults()
    gc.collect()
    begin_s = time.monotonic()
    name = f"{scene.__name__} {'all_dedicated' if on.dedicated_async else on.mode}"
    sys.stderr.write(f"{begin_s:.2f}: {name}\n")  # which one it is, should it hang
    told[name] = scene(on)
    told.setdefault("seconds", {})[name] = time.monotonic() - begin_s
