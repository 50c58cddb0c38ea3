"""Small scenes of the device path that need one of their own: what `test_rules` asks for beside the loop of `scenario`.

Each is a function of two ranks and answers with what JSON can hold. Enters: the device, a mode, which tap. Must not:
depend on how fast a machine is; it runs in virtual time.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from aorta.config.schema import EmulatedFabric
from aorta.instrument.emulation import emulated_link
from aorta.instrument.emulation.network import EmulatedNetwork
from aorta.instrument.event_clock import DeviceClock
from aorta.instrument.instrumentation import Instrumentation
from aorta.instrument.native.build import load
from aorta.instrument.native.native_device_interceptor import NativeDeviceClock
from aorta.instrument.open_step import StepFacts
from aorta.records.clocks import read_clocks
from aorta.records.schema import InstrumentMode, Step
from tests.device_path.rig import ELEMENTS, Block, Groups, lengths
from tests.device_path.scenario import caught_up
from tests.simulated import device as simulated
from tests.simulated.load import native as simulator

NOT_AT_ONCE_NS = 1_000


@dataclass
class Scene:
    """A device, and an instrument that looks at it."""

    device: torch.device
    groups: Groups
    mode: InstrumentMode
    native: bool
    lines: list[Step] = field(default_factory=list)
    number: int = 0

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @contextmanager
    def looking(self, fabric: EmulatedNetwork | None = None) -> Iterator[Instrumentation]:
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
            fabric=fabric,
            native=self.native,
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
    """A collective, a block's passes and waits, while a graph is captured."""
    block = Block(scene.device)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with scene.looking() as instrument:
        instrument.watch([("block", block)])
        instrument.watch_backward(block)
        x, inputs = scene.tensor(), torch.ones(16, 16, device=scene.device)
        block(inputs).sum().backward()
        with scene.step(instrument):
            dist.all_reduce(x)
            graph = simulated.begin_capture()
            torch.cuda.current_stream().wait_stream(side)
            dist.all_reduce(x)
            block(inputs).sum().backward()
            simulated.end_capture(graph)
            with instrument.recorder.aux("behind"):
                dist.all_reduce(x)
        with scene.step(instrument):
            block(inputs).sum().backward()
            dist.all_reduce(x)
    return [(line.coverage.complete, line.coverage.reason, len(line.compute)) for line in scene.lines]


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
                assert work is not None
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


def limited_wait(scene: Scene) -> Any:
    """A wait with a limit of time is the host's; of a collective that does not end it says so."""
    group = dist.new_group()
    said = ""
    with scene.looking() as instrument:
        with scene.step(instrument):
            x = scene.tensor()
            work = dist.all_reduce(x, group=group, async_op=True)
            issued_ns = simulated.host_ns()
            assert work is not None
            work.wait(timedelta(seconds=60))
            waited_ns = simulated.host_ns()
        simulated.dead_peer(group)
        work = dist.all_reduce(x, group=group, async_op=True)
        assert work is not None
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


def half_precision_hook(scene: Scene) -> Any:
    """As DDP's fp16 hook: each step allocates what it reduces, and waits for the future only."""
    live = []
    with scene.looking() as instrument:
        for number in range(300):
            with scene.step(instrument):
                half = scene.tensor(scene.rank + 1.0).half()
                work = dist.all_reduce(half, async_op=True)
                assert work is not None
                future = work.get_future()
                del work, half
                future.wait()
                reduced = future.value()[0].float()
                del future
            torch.accelerator.synchronize()
            if number in (19, 299):
                live.append(simulated.counters(scene.device.index).live_bytes)
    return {"live": live, "value": float(reduced[0])}


def abandoned(scene: Scene) -> Any:
    """Each other step fails; waits and a wait of the computing stream happen outside of steps as well."""
    events = []
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    block = Block(scene.device)
    inputs = torch.ones(16, 16, device=scene.device)
    with scene.looking() as instrument:
        instrument.watch([("block", block)])
        instrument.watch_backward(block)
        compiled = getattr(instrument.clock, "compiled", None)
        for number in range(500):
            try:
                with scene.step(instrument):
                    work = dist.all_reduce(scene.tensor(), async_op=True)
                    block(inputs).sum().backward()
                    torch.cuda.current_stream().wait_stream(side)
                    assert work is not None
                    work.wait()
                    if number % 2:
                        raise InterruptedError
            except InterruptedError:
                pass
            torch.cuda.current_stream().wait_stream(side)
            torch.accelerator.synchronize()
            caught_up(instrument, scene.lines, number // 2 + 1)  # so that how many are in use is no matter of speed
            if number in (99, 499):
                events.append(None if compiled is None else compiled.events())
    return {"events": events, "written": len(scene.lines)}


def clock_facts(scene: Scene) -> Any:
    """How well the device is placed on the host's time line."""
    with scene.looking() as instrument:
        with scene.step(instrument):
            dist.all_reduce(scene.tensor())
        torch.accelerator.synchronize()
        simulated.advance_host(12_345_678)
        facts = instrument.clock.facts()
    assert facts is not None
    return [facts.bound_at_start_ns, facts.bound_at_end_ns, facts.drift_ns]


def unread_epochs(scene: Scene) -> Any:
    """1,200 epochs, none of them read before the last."""
    lengths()
    module, _ = load()
    clock = NativeDeviceClock(module, scene.device) if scene.native else DeviceClock(scene.device)
    event = torch.Event(device=scene.device, enable_timing=True)
    for _ in range(1200):
        clock.new_epoch()
        torch.cuda._sleep(1_000)  # type: ignore[no-untyped-call]
    mark: Any = clock.mark()
    event.record()
    torch.accelerator.synchronize()
    read_ns = int(clock.read_ns(mark) or 0)
    return read_ns - simulated.event_ns(event)


def priorities(scene: Scene) -> Any:
    """Of the streams that a collective was issued on, and ran on."""
    with scene.looking() as instrument, scene.step(instrument):
        caller = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        dist.all_reduce(scene.tensor())
        with torch.cuda.stream(caller):
            dist.all_reduce(scene.tensor())
    rows = simulated.timeline(scene.device.index, kind="collective")
    return [
        (int(simulator().stream_priority(row.device, row.stream)), row.stream not in (0, caller.stream_id))
        for row in rows
    ]


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
    on_host: Any = group._get_backend(torch.device("cpu"))
    return {"lanes": lanes, "threads": int(on_host.options._threads), "sources": [row[3] for row in scene.rows()]}


def emulated(scene: Scene) -> Any:
    """The emulated fabric: each collective ends its cost later, whoever waits for it and how."""
    fabric = EmulatedNetwork(EmulatedFabric(intra_latency_us=50.0), scene.rank, dist.get_world_size(), None)
    values = []
    with scene.looking(fabric) as instrument:
        for way in ("sync", "async", "future"):
            with scene.step(instrument):
                x = scene.tensor(scene.rank + 1.0)
                if way == "sync":
                    dist.all_reduce(x)
                else:
                    work = dist.all_reduce(x, async_op=True)
                    assert work is not None
                    (work.get_future() if way == "future" else work).wait()
                y = x - 3  # the first kernel behind it
                torch.accelerator.synchronize()
            values.append(float(y.abs().max()))
    cost_ns = fabric.cost_ns("allreduce", 4 * ELEMENTS, (0, 1), 0)
    behind = [row.start_ns for row in simulated.timeline(scene.device.index, name="aten::sub")]
    return {
        "rows": [row[1:3] for row in scene.rows()],
        "kernels": [(start, end + cost_ns) for _, start, end in scene.kernels()],
        "behind": [start - (end + cost_ns) for start, (_, _, end) in zip(behind, scene.kernels(), strict=True)],
        "values": values,
        "cost": cost_ns,
        "races": len(simulated.races()),
    }


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


BOTH_TAPS: tuple[Callable[[Scene], Any], ...] = (
    capture,
    another_device_is_current,
    limited_wait,
    blocking,
    half_precision_hook,
    abandoned,
    clock_facts,
    priorities,
    no_stream_left,
    workers,
)
ONE_MODE: tuple[Callable[[Scene], Any], ...] = (unread_epochs,)
PYTHON_ONLY: tuple[Callable[[Scene], Any], ...] = (emulated,)
ONCE: tuple[Callable[[Scene], Any], ...] = (spins,)


def play(device: torch.device, groups: Groups) -> dict[str, Any]:
    """All of them: by scene, and by mode and tap where those matter."""
    told: dict[str, Any] = {}
    modes: tuple[InstrumentMode, ...] = ("dedicated", "observe")
    for mode in modes:
        for native in (False, True):
            for scene in BOTH_TAPS:
                played(told, scene, Scene(device, groups, mode, native))
        for scene in PYTHON_ONLY:
            played(told, scene, Scene(device, groups, mode, native=False))
    for native in (False, True):
        for scene in ONE_MODE:
            played(told, scene, Scene(device, groups, "dedicated", native))
    for scene in ONCE:
        played(told, scene, Scene(device, groups, "dedicated", native=False))
    return told


def played(told: dict[str, Any], scene: Callable[[Scene], Any], on: Scene) -> None:
    """Under its name."""
    simulated.defaults()
    gc.collect()
    begin_s = time.monotonic()
    name = f"{scene.__name__} {on.mode}-{'compiled' if on.native else 'python'}"
    sys.stderr.write(f"{begin_s:.2f}: {name}\n")  # which one it is, should it hang
    told[name] = scene(on)
    told.setdefault("seconds", {})[name] = time.monotonic() - begin_s
