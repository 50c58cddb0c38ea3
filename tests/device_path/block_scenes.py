"""Scenes of a model's blocks, captured into a graph or not, of its backward pass, and of copies beside them.

Must not: compute anything but what takes time on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from aorta.instrument.native.native_interceptor import NativeDeviceClock
from tests.device_path.batch_patterns import between_steps
from tests.device_path.rig import ELEMENTS, Block, Rig
from tests.device_path.scenario import caught_up
from tests.device_path.scene import Scene
from tests.device_path.witness import truth_of
from tests.simulated import device as simulated


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
