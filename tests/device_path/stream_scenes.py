"""Scenes of streams, events and the device's clock. Each tells what it found and what it must find.

Must not: leave torch's streams otherwise than it found them.
"""

from __future__ import annotations

import ctypes
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
        off_ns.append(int(clock.read_ns(mark) or 0) - simulator().event_ns(event.event_id))
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


def no_stream_left(scene: Scene) -> Told:
    """A device that hands out its only stream, to the caller, or for two groups: the second one's asynchronous
    collective cannot be timed, a synchronous one stays where it is.
    """
    zeros, told, both = [], [], list(scene.groups[:2])
    for callers, groups, asynchronous in ((True, both[:1], True), (False, both, True), (False, both, False)):
        with scene.looking() as instrument:
            simulated.pool_streams(1)
            with scene.step(instrument):
                caller = torch.cuda.Stream() if callers else torch.cuda.current_stream()
                with torch.cuda.stream(caller):
                    for group in groups:
                        x = scene.tensor(scene.rank + 1.0)
                        if work := dist.all_reduce(x, group=group, async_op=asynchronous):
                            work.wait()
                        zeros.append((x - 3).abs().max())
                torch.cuda.current_stream().wait_stream(caller)
        lengths()
        line = scene.lines.pop()
        told.append((line.coverage.reason, [row.end_ns is None for row in line.collectives], len(simulated.races())))
    scene.lines.append(line)
    on_default = [row.stream == 0 for row in simulated.timeline(scene.device.index, kind="collective")]
    return (
        (told, on_default, scene.spans(), float(torch.stack(zeros).max())),
        (
            [(f"1 of 1 {NOT_TIMED}", [True], 0), (f"1 of 2 {NOT_TIMED}", [False, True], 0), (None, [False] * 2, 0)],
            [scene.mode != "dedicated", True],
            scene.kernel_spans(),
            0,
        ),
    )


def waits_told(scene: Scene) -> Told:
    """A wait of the other device's stream of the same number is none of the computing stream's. What that waits for
    where a third stream has waited for it twice; and whether torch is then as it was.
    """
    names, told = ["collective"], list[Any]()
    side, third = torch.cuda.Stream(), torch.cuda.Stream()
    order = StreamOrder(lambda stream: [names.pop()] if stream == side.stream_id and names else [])
    classes = (torch.Stream, torch.Event, torch.cuda.Stream, torch.cuda.Event)
    before = [dict(vars(one)) for one in classes]
    watched = DeviceStreams(scene.device)
    looking = StreamWaits(scene.device, watched, lambda: None, lambda *marks: told.append(marks[2]), order)
    try:
        event = side.record_event()
        torch.cuda.default_stream(1 - scene.device.index).wait_event(event)
        for _ in range(2):
            third.wait_event(event)
        torch.cuda.current_stream().wait_stream(third)
    finally:
        looking.close()
    return (told, [dict(vars(one)) for one in classes] == before), ([("collective",)], True)


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
        module.use_clock(simulator().host_clock_address())
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
