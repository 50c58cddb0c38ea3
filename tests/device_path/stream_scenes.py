"""Scenes of streams, events, captures and the device's clock.

Must not: leave torch's streams otherwise than it found them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from aorta.instrument.device_streams import DeviceStreams, StreamOrder, StreamWaits
from aorta.instrument.emulation import emulated_link
from aorta.instrument.native.build import load
from aorta.instrument.native.native_interceptor import NativeDeviceClock
from tests.device_path.rig import Block, lengths
from tests.device_path.scene import Scene
from tests.simulated import device as simulated
from tests.simulated.load import native as simulator


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
