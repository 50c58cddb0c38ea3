"""Scenes of single collectives: every form of each, batches, groups, and what callers do with handles.

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

from tests.device_path.collective_forms import SIZES
from tests.device_path.rig import Block
from tests.device_path.scene import Scene
from tests.simulated import device as simulated

NOT_AT_ONCE_NS = 1_000
HANDLES = 8


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
        garbage = [torch.full((size,), -5.0, device=scene.device) for size in SIZES for _ in range(6)]
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
        with instrument.recorder.aux("optimizer"):
            torch.cuda._sleep(20_000)
    (line,) = scene.lines
    known = [name for name, value in line.overlap.items() if value is not None]
    return [line.coverage.complete, line.coverage.reason, line.reasons["compute_ms"], known, len(line.collectives)]
