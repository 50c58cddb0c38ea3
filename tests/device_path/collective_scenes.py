"""Scenes of single collectives: batches, groups, and what callers do with handles. Each tells what it found and what it
must find.

Must not: wait for the device where its callers would not.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.device_path.collective_forms import garbage
from tests.device_path.rig import Block, Scene, exchanged
from tests.simulated import device as simulated

NOT_AT_ONCE_NS = 1_000
HANDLES = 8
Told = tuple[Any, Any]


def unknown_communicators(scene: Scene) -> Told:
    """A send and a receive in a group of which nobody knows what its transfers wait for are marked where they are
    issued, each direction on a stream of its own: what the second one waited for is part of its duration.
    """
    there, back = scene.tensor(), scene.tensor()
    unknown = patch("aorta.instrument.native.native_interceptor.shares_communicator", lambda _group, _device: None)
    with unknown, scene.one_step():
        for work in exchanged(there, back, scene.groups.unbound):
            work.wait()
    (first, second), (kernel, other_kernel) = scene.rows(), scene.kernels()
    return (first[1] == second[1], kernel[1] < other_kernel[1]), (True, True)


def stacked_in_a_batch(scene: Scene) -> Told:
    """A list, stacked by the backend, first in a batch: nothing but the caller's own wait keeps the stacked tensor.
    What cannot be timed safely is not, and the record says why.
    """
    with scene.one_step():
        out, other = scene.tensor(), scene.tensor()
        with dist._coalescing_manager(device=scene.device, async_ops=True) as manager:
            sources = [scene.tensor(scene.rank + 1.0) for _ in range(2)]
            dist.reduce_scatter(out, sources, async_op=True)
            dist.broadcast(other, 0, async_op=True)
        del sources
        others = garbage(scene)
        manager.wait()
        del others
        zero = (out - 3).abs().max()
    (line,) = scene.lines
    reason = "2 of 2 collectives could not be timed: they take lists of tensors"
    return (
        (float(zero), len(simulated.races()), [row.end_ns for row in line.collectives], line.overlap["overlap_ratio"]),
        (line.coverage.complete, (line.coverage.reason or "")[: len(reason)]),
    ), ((0, 0, [None, None], None), (False, reason))


def nothing_in_a_batch(scene: Scene) -> Told:
    """A batch without an operation between two kernels of the computation: no rows, waits and stalls."""
    block, inputs = Block(scene.device), scene.square()
    with scene.one_step():
        block(inputs)
        with dist._coalescing_manager(device=scene.device, async_ops=False):
            pass
        block(inputs)
    (line,) = scene.lines
    return (line.collectives, line.waits, line.overlap["compute_stall_ms"]), ([], [], 0)


def failing(scene: Scene) -> Told:
    """A wait with a limit of time is the host's; of a collective that does not end it says so, and the handle of one
    that fails says why.
    """
    said, (slow, failed) = [], (dist.new_group(), dist.new_group())
    with scene.one_step():
        work = dist.all_reduce(scene.tensor(), group=slow, async_op=True)
        issued_ns = simulated.host_ns()
        work.wait(timedelta(seconds=60))
        waited_ns = simulated.host_ns()
        simulated.dead_peer(slow)
        try:
            dist.all_reduce(scene.tensor(), group=slow, async_op=True).wait(timedelta(seconds=1))
        except dist.DistBackendError as error:
            said.append("timed out" in str(error))
        aborted(slow)
        if scene.way != "all_dedicated":  # where no handle is the backend's
            simulated.fail_next_collective(failed, "link down")
            torch.cuda._sleep(20_000_000)  # it fails when it runs, not where it is issued
            work = dist.all_reduce(scene.tensor(), group=failed, async_op=True)
            with suppress(dist.DistBackendError):
                torch.accelerator.synchronize()
            said.append("link down" in str(work.exception()))
            aborted(failed)
    expected = [True] if scene.way == "all_dedicated" else [True, True]
    return (issued_ns < scene.kernels()[0][2] <= waited_ns, said), (True, expected)


def aborted(group: Any) -> None:
    """So that nothing is under way."""
    group._get_backend(torch.device("cuda")).abort()
    torch.accelerator.synchronize()


def blocking(scene: Scene) -> Told:
    """Where a wait blocks the host, only the caller's does, and ends of rows are its; and a barrier's always, whose
    synchronous form is a wait of the host.
    """
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    try:
        group = dist.new_group()
        with scene.one_step():
            found = [
                waited(lambda: dist.all_reduce(scene.tensor(), group=group, async_op=True)),
                waited(lambda: dist.all_reduce(scene.tensor(), group=group)),
                waited(lambda: dist.barrier(async_op=True)),
                waited(lambda: dist.barrier()),
            ]
    finally:
        del os.environ["TORCH_NCCL_BLOCKING_WAIT"]
    sources = ("wait", "event", "wait", "wait")
    return (
        (found, [(kind, end, source) for kind, _, end, source in scene.rows()]),
        (
            [(False, True), (False, False), (False, True), (True, False)],
            [(name, end, source) for (name, _, end), source in zip(scene.kernels(), sources, strict=True)],
        ),
    )


def waited(issue: Callable[[], Any]) -> tuple[bool, bool]:
    """Whether the host waited in the call, and in the handle's wait."""
    before_ns = simulated.host_ns()
    work = issue()
    issued_ns = simulated.host_ns()
    if work is not None:
        work.wait()
    return issued_ns - before_ns > NOT_AT_ONCE_NS, simulated.host_ns() - issued_ns > NOT_AT_ONCE_NS


def kept_handles(scene: Scene) -> Told:
    """Of tensors that a caller drops whose handles it keeps and does not wait for, none lives on when the device has
    passed and a step has begun.
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
    return kept // x.nbytes, 0


def future_elsewhere(scene: Scene) -> Told:
    """A future that is waited for before a backward pass, and so not at its end."""
    block = Block(scene.device)
    with scene.looking() as instrument:
        instrument.watch([("block", block)])
        instrument.watch_backward(block)
        with scene.step(instrument):
            output = block(scene.square())
            work = dist.all_reduce(scene.tensor(), async_op=True)
            work.get_future().wait()
            output.sum().backward()
    return scene.lines[0].waits, []


def handles(scene: Scene) -> Told:
    """What a handle answers before its collective has begun, and after its end."""
    x = scene.tensor(scene.rank + 1.0)
    with scene.one_step():
        torch.cuda._sleep(20_000_000)
        work = dist.all_reduce(x, async_op=True)
        before = work.is_completed()
        torch.accelerator.synchronize()
        after = (work.is_completed(), work.is_success(), work.exception() is None, len(work.result()))
    return (before, after), (False, (True, True, True, 1))


def workers(scene: Scene) -> Told:
    """Of gloo, in a group of both backends whose first collective is the device's: it keeps them all. The host waits
    for its collective, and the compute stream does not.
    """
    group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    with scene.looking() as instrument:
        with scene.step(instrument):
            dist.all_reduce(scene.tensor(), group=group)
            dist.all_reduce(torch.ones(4), group=group)
        lanes = instrument.groups[group.group_name].lanes
    on_host: Any = group._get_backend(torch.device("cpu"))
    waits = scene.lines[0].waits
    return (
        (lanes, lanes > 1, [row[3] for row in scene.rows()], [wait.seq for wait in waits] if waits else waits),
        (int(on_host.options._threads), True, ["event", "future"], [0]),
    )


def through_gloo(scene: Scene) -> Told:
    """Values of device tensors in a group of gloo's, which moves them on the host."""
    group = dist.new_group(backend="gloo")
    with scene.one_step():
        x = scene.tensor(0.0)
        torch.cuda._sleep(20_000_000)
        x.fill_(scene.rank + 1)
        dist.all_reduce(x, group=group, async_op=True).wait()
        root = scene.tensor(float(scene.rank))
        dist.broadcast(root, 1, group=group)
        zero = torch.stack([x - 3, root - 1]).abs().max()
    kinds = [row.kind for row in scene.lines[0].collectives]
    return (float(zero), kinds, len(simulated.races())), (0, ["allreduce", "broadcast"], 0)


def not_compiled(scene: Scene) -> Told:
    """What the record says of a step where compiled code is not used."""
    with scene.looking(native=False) as instrument, scene.step(instrument):
        dist.all_reduce(scene.tensor())
        with instrument.recorder.aux("optimizer"):
            torch.cuda._sleep(20_000)
    (line,) = scene.lines
    known = [name for name, value in line.overlap.items() if value is not None]
    why = (
        "on a device only compiled code times collectives and blocks, and it is not used (instrument.native=false): "
        "nothing was looked at"
    )
    return (
        (line.coverage.complete, line.coverage.reason, line.reasons["compute_ms"], known, line.collectives),
        (False, why, why, ["window_ms", "aorta_ms"], []),
    )
