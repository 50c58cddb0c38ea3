"""Scenes of a model's blocks, captured into a graph or not, of its backward pass, and of copies beside them. Each tells
what it found and what it must find.

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
from tests.device_path.agreement import truth_of
from tests.device_path.rig import ELEMENTS, Block, Rig, Scene
from tests.device_path.scenario import caught_up
from tests.device_path.stream_patterns import between_steps
from tests.simulated import device as simulated

Told = tuple[Any, Any]


def checkpointed(scene: Scene) -> Told:
    """FSDP2, with blocks whose activations are computed again in the backward pass."""
    blocks = [fully_shard(Block(scene.device)) for _ in range(2)]
    model = fully_shard(nn.Sequential(*blocks))
    inputs = scene.square()
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
    wrong = truth.differences(line.overlap)
    return (scene.spans(), wrong, line.coverage.complete, simulated.races()), (scene.kernel_spans(), [], True, [])


def abandoned(scene: Scene) -> Told:
    """Every second step fails; collectives, waits and a wait of the computing stream happen outside of steps as well.
    Marks of steps that are not recorded are used again: in the second hundred steps none are made.
    """
    events, rig = [], Rig(scene.device, scene.groups)
    side = torch.cuda.Stream()
    block, inputs = Block(scene.device), scene.square()
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
    return (events[1], len(scene.lines)), (events[0], 100)


def copies_here(scene: Scene) -> Told:
    """Only what moves bytes is a copy, not one onto itself or of one value for many elements; and one on a stream that
    does not compute leaves the computation, of which as much is certain, where the host is late, as beside a kernel as
    long.
    """
    block, side = Block(scene.device), torch.cuda.Stream()
    inputs, into, one = scene.square(), scene.tensor(), scene.tensor()[:1]
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
    copies = [row.bytes for row in scene.lines[0].copies or ()]
    beside_copy, beside_kernel = ((line.bounds or {})["compute_ms"] for line in scene.lines)
    return (copies, 0 < beside_copy[0] < beside_copy[1], beside_copy), ([400], True, beside_kernel)


def copies_elsewhere(scene: Scene) -> Told:
    """A value for the host, a copy of nothing, one to another device, and one that this makes itself, which has a
    direction and no times.
    """
    here = scene.tensor()
    there = torch.ones(ELEMENTS, device=torch.device("cuda", 1 - scene.device.index))
    with scene.one_step():
        here[0].item()
        here[:0].cpu()
        there.copy_(here)
        there.cpu()
    (line,) = scene.lines
    rows = [(row.direction, row.bytes, row.end_ns is not None) for row in line.copies or ()]
    why = "1 of 3 copies were issued on another device's stream" in line.reasons["copy_ms"]
    size = 4 * ELEMENTS
    return (
        (rows, line.overlap["copy_ms"], why),
        ([("d2h", 4, True), ("p2p", size, True), ("d2h", size, False)], None, True),
    )


def recursive_block(scene: Scene) -> Told:
    """A block that runs itself once more: its inner pass lies within its outer one."""

    class Recursive(nn.Module):
        def forward(self, x: torch.Tensor, depth: int = 1) -> torch.Tensor:
            x = x @ x
            return self(x, depth - 1) @ x if depth else x

    block = Recursive()
    with scene.looking() as instrument:
        instrument.watch([("block", block)])
        with scene.step(instrument):
            block(scene.square())
    outer, inner = scene.lines[0].compute
    return outer.start_ns < inner.start_ns < inner.end_ns < outer.end_ns, True


def backward_end_cost(scene: Scene) -> Told:
    """Where a mark costs the host 1 ms, the end of a backward pass costs two, however many gradients reach it."""
    block = Block(scene.device)
    spent_ns = []
    for watched in (False, True):
        with scene.looking() as instrument:
            if watched:
                instrument.watch_backward(block)
            with scene.step(instrument):
                inputs = scene.square(requires_grad=True)
                output = sum(block(inputs).sum() for _ in range(3))
                assert isinstance(output, torch.Tensor)
                simulated.costs(event_ns=1_000_000)
                begin_ns = simulated.host_ns()
                output.backward()
                spent_ns.append(simulated.host_ns() - begin_ns)
                simulated.costs(event_ns=0)
    without, with_marks = spent_ns
    return round((with_marks - without) / 1e6), 2


def capture(scene: Scene) -> Told:
    """Collectives, a block's passes and waits, while a graph is captured: no mark is taken that could not be read
    later; the steps are written, and say what they miss.
    """
    block = Block(scene.device)
    side = torch.cuda.Stream()
    with scene.looking() as instrument:
        instrument.watch([("block", block)])
        instrument.watch_backward(block)
        x, inputs = scene.tensor(), scene.square()
        block(inputs).sum().backward()
        with scene.step(instrument):
            dist.all_reduce(x)
            graph = simulated.begin_capture()
            torch.cuda.current_stream().wait_stream(side)
            for _ in range(2):
                dist.all_reduce(x)
            block(inputs).sum().backward()
            x.clone()
            graph.end()
            with instrument.recorder.aux("behind"):
                dist.all_reduce(x)
        with scene.step(instrument):
            block(inputs).sum().backward()
            dist.all_reduce(x)
    first, second = scene.lines
    why = "2 collectives were captured into a CUDA graph, whose replays cannot be seen"
    return (
        (first.coverage.reason, len(first.compute), len(first.copies or ())),
        (second.coverage.reason, len(second.compute)),  # its passes
        (first.coverage.complete, second.coverage.complete),
    ), ((why, 0, 0), (why, 2), (False, False))


def capture_over_steps(scene: Scene) -> Told:
    """A graph that is captured over the ends of steps, while earlier steps and tensors wait for the device. No event is
    asked for meanwhile, which would end the capture; what is known of such a step is the host's.
    """
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
            graph.end()
            dist.all_reduce(x)
        with scene.step(instrument):
            dist.all_reduce(x)
    # The host is not ahead of an idle device: its marks bound the time.
    most_ms = [(line.bounds or {}).get("comm_ms", (0, line.overlap["comm_ms"]))[1] for line in scene.lines]
    why = "a CUDA graph was being captured when the step began or ended"
    said = [(line.coverage.complete, why in (line.coverage.reason or "")) for line in scene.lines]
    known, captured = (True, False), (False, True)
    return (
        (said, [None if most is None else most > 0 for most in most_ms]),
        ([known, *[captured] * 3, known], [True, None, None, None, True]),
    )
