"""Everything that may go wrong between streams, events and memory, in one small loop on two simulated devices.

    run(device, groups(device), "observe") -> what was found wrong, and what ran

The device's own timeline, its checker of races and its counters are the witnesses. It runs in virtual time, and the
checker knows orders, not moments: nothing in it depends on how fast a machine is. Must not: wait for the device inside
a step, or share a rule with the instrument.
"""

from __future__ import annotations

import gc
import time
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist

from aorta.instrument.instrumentation import Instrumentation
from aorta.records.clocks import read_clocks
from aorta.records.schema import InstrumentMode, Step
from aorta.records.step_line import StepFacts
from tests.device_path.agreement import disagreements
from tests.device_path.batch_patterns import between_steps
from tests.device_path.collective_patterns import parts
from tests.device_path.rig import Groups, Rig
from tests.device_path.stream_patterns import behind_a_failed_step, left_by_a_failed_step
from tests.simulated import device as simulated

STEPS = 5
READ_AFTER = 3
"""So many steps are read before the next begins: what they marked with is then used again."""
HANGS_S = 60.0


def caught_up(instrument: Instrumentation, lines: list[Step], number: int) -> bool:
    """Read until so many steps are written; polling is no order to the checker of races."""
    deadline = time.monotonic() + HANGS_S
    while len(lines) < number and time.monotonic() < deadline:
        instrument.recorder.catch_up()
        time.sleep(0.0005)  # the device's threads want the processor
    return len(lines) == number


Shape = list[tuple[str, int, int]]
"""Names, starts and ends of all that took time; the device's first moment is 0."""


def shape_of(device: int) -> Shape:
    """What ran. Which stream it was on is the instrument's choice; when it ran is not."""
    rows = [row for row in simulated.timeline(device) if row.end_ns > row.start_ns]
    origin_ns = rows[0].start_ns
    return sorted((row.name, row.start_ns - origin_ns, row.end_ns - origin_ns) for row in rows)


def first_difference(ran: Shape, shape: Shape) -> str:
    """In words."""
    pairs = zip(ran, shape, strict=False)
    return next((f"{one} in place of {other}" for one, other in pairs if one != other), f"{len(ran)} of {len(shape)}")


def run(
    device: torch.device,
    groups: Groups,
    mode: InstrumentMode,
    *,
    dedicated_async: bool = False,
    shape: Shape | None = None,
) -> tuple[list[str], Shape]:
    """The loop, `STEPS` times, under one instrument.

    Args:
        dedicated_async: as in `Instrumentation`. shape: what ran when nothing looked on; None: this is that run.

    Returns:
        What was wrong, in words, and what ran.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    groups.begin()
    rig, lines, zeros, wrong = Rig(device, rank, size, groups), list[Step](), list[torch.Tensor](), list[str]()
    todo, computed_on = parts(rank), list[int]()
    torch.accelerator.synchronize()
    simulated.reset()
    with Instrumentation(
        device, mode, rank, size, read_clocks(), lines.append, native=True, dedicated_async=dedicated_async
    ) as instrument:
        instrument.watch([("first", rig.model[0]), ("second", rig.model[1])])
        instrument.watch_backward(rig.model)
        before = dict(simulated.counters(device.index).host_synchronisations)
        with suppress(InterruptedError), instrument.recorder.step(StepFacts(0, -1, -1, 0.0, warmup=False)):
            left_by_a_failed_step(rig)
        behind_a_failed_step(rig)
        for number in range(STEPS):
            with rig.computing(number) as stream:
                with instrument.recorder.step(StepFacts(0, number, number, 0.0, warmup=False)):
                    for part in todo:
                        zeros += [out.abs().max() for out in part.run(rig)]
                zeros += [out.abs().max() for out in between_steps(rig)]
            computed_on.append(stream)
            if number == READ_AFTER and not caught_up(instrument, lines, number + 1):
                wrong.append(f"{len(lines)} of {number + 1} steps can be read")
        if (after := dict(simulated.counters(device.index).host_synchronisations)) != before:
            wrong.append(f"the host synchronised: {before} before, {after} after")
        for work, _ in rig.late:
            work.wait()
        instrument.recorder.finish()
    wrong += [f"race: {simulated.describe(race)}" for race in simulated.races()]
    if bad := [number for number, zero in enumerate(zeros) if float(zero) != 0]:
        wrong.append(f"wrong values: {bad} of {len(zeros)}")
    ran = shape_of(device.index)
    if shape is not None and ran != shape:
        wrong.append(f"the device's own times changed: {first_difference(ran, shape)}")
    if mode != "off":
        if len(lines) != STEPS:
            wrong.append(f"{len(lines)} steps in the record")
        wrong += disagreements(lines, device.index, computed_on, todo, groups)
    return wrong, ran


class Use(NamedTuple):
    """Of memory and events, by a loop whose device has passed before each part. `events`: created in steady state."""

    peak_bytes: int
    live_bytes: int
    events: int


def use(
    device: torch.device,
    groups: Groups,
    mode: InstrumentMode,
    *,
    dedicated_async: bool = False,
) -> Use:
    """What the loop needs: the device is waited for behind every part, so that it does not depend on its speed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups.begin()
    # Of the loop before this one: cycles, and what the backend keeps until its next call.
    gc.collect()
    torch.accelerator.synchronize()
    work = dist.all_reduce(torch.zeros(1, device=device), async_op=True)
    work.wait()
    del work
    torch.accelerator.synchronize()
    simulated.reset()
    live = simulated.counters(device.index).live_bytes
    rig, lines = Rig(device, rank, size, groups), list[Step]()
    todo = [part.run for part in parts(rank)]
    with Instrumentation(
        device, mode, rank, size, read_clocks(), lines.append, native=True, dedicated_async=dedicated_async
    ) as instrument:
        instrument.watch([("first", rig.model[0]), ("second", rig.model[1])])
        instrument.watch_backward(rig.model)
        for number in range(2 * STEPS):
            if number == STEPS:
                events = simulated.counters(device.index).events_created
                torch.cuda.reset_peak_memory_stats()
            with instrument.recorder.step(StepFacts(0, number, number, 0.0, warmup=False)):
                for part in todo:
                    part(rig)
                    torch.accelerator.synchronize()
            caught_up(instrument, lines, number + 1)
        counters = simulated.counters(device.index)
        for work, _ in rig.late:
            work.wait()
        instrument.recorder.finish()
    return Use(counters.peak_bytes - live, counters.live_bytes - live, counters.events_created - events)
