"""Scenes of streams, events and the device's clock. Each tells what it found and what it must find.

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
from tests.device_path.rig import Block, Scene, lengths
from tests.simulated import device as simulated
from tests.simulated.load import native as simulator

NOT_TIMED = "collectives could not be timed: the device has no stream left to time them on"
Told = tuple[Any, Any]


def another_device_is_current(scene: Scene) -> Told:
    """The model's is not the current one, on which nothing runs."""
    block, inputs = Block(scene.device), scene.square()
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
    passes = [(one.start_ns + line.start_mono_ns, one.end_ns + line.start_mono_ns) for one in line.compute]
    return (
        (scene.spans(), passes, len(passes), float(y.abs().max()), stray, len(simulated.races())),
        (scene.kernel_spans(), scene.kernel_spans(name="aten::mm"), 2, 0, 0, 0),
    )


def unread_epochs(scene: Scene) -> Told:
    """1,200 epochs, none of them read before the last; then the one mark of an early epoch. Neither is off."""
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
    return off_ns, [0, 0]


def priorities(scene: Scene) -> Told:
    """A collective keeps the priority of its caller's stream, also on AORTA's."""
    with scene.one_step():
        caller = torch.cuda.Stream(priority=-1)
        dist.all_reduce(scene.tensor())
        with torch.cuda.stream(caller):
            dist.all_reduce(scene.tensor())
    rows = simulated.timeline(scene.device.index, kind="collective")
    moved = scene.mode == "dedicated"
    return [
        (int(simulator().stream_priority(row.device, row.stream)), row.stream not in (0, caller.stream_id))
        for row in rows
    ], [(0, moved), (-1, moved)]


def moved(scene: Scene) -> Told:
    """Of a synchronous and an asynchronous all-reduce: whether the kernel ran on the caller's stream, and whether its
    stream was ordered behind the caller's directly. `dedicated` runs the former on AORTA's stream; the latter runs on
    the backend's own, in `dedicated` behind AORTA's stream, and with `dedicated_async` on AORTA's.
    """
    block, inputs = Block(scene.device), scene.square()
    with scene.one_step():
        caller = torch.cuda.current_stream().stream_id
        for asynchronous in (False, True):
            block(inputs)
            work = dist.all_reduce(scene.tensor(), async_op=asynchronous)
            if work is not None:
                work.wait()
    ordered = {(wait.stream, wait.on_stream, wait.end_ns) for wait in simulated.waits()}
    return [
        (row.stream == caller, (row.stream, caller, row.start_ns) in ordered)
        for row in simulated.timeline(scene.device.index, kind="collective")
    ], {
        "dedicated": [(False, True), (False, False)],
        "observe": [(True, False), (False, True)],
        "all_dedicated": [(False, True), (False, True)],
    }[scene.way]


def marks_cost(scene: Scene) -> Told:
    """Where a mark takes its stream 5 us, there is no gap on the caller's stream at which a collective is issued beside
    it: its marks are on AORTA's stream, until its caller waits; and the start of a synchronous one, which the stream
    that it ran on has marked, is not off.
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
    return (before.end_ns, scene.rows()[1][1]), (behind.start_ns, scene.kernels()[1][1])


def no_stream_to_time_on(scene: Scene) -> Told:
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
        told.append((scene.lines[-1].coverage.reason, [row.end_ns is None for row in scene.lines[-1].collectives]))
    return (
        (told, float(torch.stack(values).max()), len(simulated.races())),
        ([(f"1 of 1 {NOT_TIMED}", [True]), (f"1 of 2 {NOT_TIMED}", [False, True])], 0, 0),
    )


def no_stream_left(scene: Scene) -> Told:
    """A device that hands out the same stream for two groups: the second one's collective stays where it is."""
    with scene.looking() as instrument:
        simulated.pool_streams(1)
        with scene.step(instrument):
            outs = []
            for group in (None, scene.groups.other):
                x = scene.tensor(scene.rank + 1.0)
                dist.all_reduce(x, group=group)
                outs.append(x - 3)
    lengths()
    on_default = [row.stream == 0 for row in simulated.timeline(scene.device.index, kind="collective")]
    zero, complete = float(torch.stack(outs).abs().max()), scene.lines[0].coverage.complete
    return (
        (on_default, scene.spans(), complete, zero, len(simulated.races())),
        ([scene.mode != "dedicated", True], scene.kernel_spans(), True, 0, 0),
    )


def waits_told(scene: Scene) -> Told:
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
    as_before = [dict(vars(one)) for one in classes] == before
    return (counts, [names for _, _, names in told], as_before), ([1, 1, 1, 0, 0], [["collective"]], True)


def uncertain_clock(scene: Scene) -> Told:
    """Brackets of the host's clock whose widths differ, the eighth the narrowest: 100 ns, in the middle of which the
    clock is placed. The origin, the bounds, and the drift to where the host's clock says a second later.
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
    return (
        (clock.read_ns(mark), clock.bound_ns, facts.bound_at_start_ns, facts.bound_at_end_ns, facts.drift_ns),
        (7_051, 50, 50, 50, -1_000_000_000),
    )


def spins(scene: Scene) -> Told:
    """A spin is as long as asked, within a thousandth: from the shortest of several measurements, of which three of
    five are three times too long, and after each of two changes of the clock from the next one.
    """
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
        for change in (1.0, 1.5, 1.5, 1.5, 0.5, 0.5, 0.5):
            factor = change
            sleep(1_000_000)
            torch.accelerator.synchronize()
    finally:
        module.spin = own
    rows = simulated.timeline(scene.device.index, kind="sleep")
    of_asked = [round((row.end_ns - row.start_ns) / 1e6, 3) for row in rows]
    return of_asked, [1, 1.5, 1, 1, 0.333, 1, 1]
