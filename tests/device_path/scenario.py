"""Everything that may go wrong between streams, events and memory, in one small loop on two simulated devices.

    run(Scene(device, groups(device), "observe")) -> what was found wrong, and what ran

The device's own timeline, its checker of races and its counters are the witnesses. It runs in virtual time, and the
checker knows orders, not moments: nothing in it depends on how fast a machine is. Must not: wait for the device inside
a step, or share a rule with the instrument.
"""

from __future__ import annotations

import gc
import time
from contextlib import suppress

import torch
import torch.distributed as dist

from aorta.instrument.instrumentation import Instrumentation
from aorta.records.schema import Step
from tests.device_path.agreement import disagreements
from tests.device_path.collective_patterns import parts
from tests.device_path.rig import Rig, Scene
from tests.device_path.stream_patterns import behind_a_failed_step, between_steps, left_by_a_failed_step
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


def run(scene: Scene, shape: Shape | None = None) -> tuple[list[str], Shape]:
    """The loop, `STEPS` times.

    Args:
        shape: what ran when nothing looked on; None: this is that run.

    Returns:
        What was wrong, in words, and what ran.
    """
    scene.groups.begin()
    device, lines = scene.device.index, scene.lines
    rig, zeros, wrong = Rig(scene.device, scene.groups), list[torch.Tensor](), list[str]()
    todo, computed_on = parts(rig.rank), list[int]()
    torch.accelerator.synchronize()
    simulated.reset()
    with scene.looking(begin=False) as instrument:
        instrument.watch([("block", rig.block)])
        before = dict(simulated.counters(device).host_synchronisations)
        with suppress(InterruptedError), scene.step(instrument):
            left_by_a_failed_step(rig)
        behind_a_failed_step(rig)
        for number in range(STEPS):
            with rig.computing(number) as stream:
                with scene.step(instrument):
                    for part in todo:
                        zeros += [out.abs().max() for out in part.run(rig)]
                zeros += [out.abs().max() for out in between_steps(rig)]
            computed_on.append(stream)
            if number == READ_AFTER and not caught_up(instrument, lines, number + 1):
                wrong.append(f"{len(lines)} of {number + 1} steps can be read")
        if (after := dict(simulated.counters(device).host_synchronisations)) != before:
            wrong.append(f"the host synchronised: {before} before, {after} after")
        for work, _ in rig.late:
            work.wait()
    wrong += [f"race: {race.words}" for race in simulated.races()]
    if bad := [number for number, zero in enumerate(zeros) if float(zero) != 0]:
        wrong.append(f"wrong values: {bad} of {len(zeros)}")
    ran = shape_of(device)
    if shape is not None and ran != shape:
        wrong.append(f"the device's own times changed: {sorted(set(ran) ^ set(shape))[:4]}")
    if scene.way != "off":
        if len(lines) != STEPS:
            wrong.append(f"{len(lines)} steps in the record")
        wrong += disagreements(lines, device, computed_on, todo, scene.groups)
    return wrong, ran


def use(scene: Scene) -> dict[str, int]:
    """Memory that the loop needs, and events that it creates in steady state: the device is waited for behind every
    part, so that they do not depend on its speed.
    """
    scene.groups.begin()
    device = scene.device.index
    # Of the loop before this one: cycles, and what the backend keeps until its next call.
    gc.collect()
    torch.accelerator.synchronize()
    work = dist.all_reduce(torch.zeros(1, device=scene.device), async_op=True)
    work.wait()
    del work
    torch.accelerator.synchronize()
    simulated.reset()
    live = simulated.counters(device).live_bytes
    rig = Rig(scene.device, scene.groups)
    todo = parts(rig.rank)
    with scene.looking(begin=False) as instrument:
        instrument.watch([("block", rig.block)])
        for number in range(2 * STEPS):
            if number == STEPS:
                events = simulated.counters(device).events_created
                torch.cuda.reset_peak_memory_stats()
            with scene.step(instrument):
                for part in todo:
                    part.run(rig)
                    torch.accelerator.synchronize()
            caught_up(instrument, scene.lines, number + 1)
        counters = simulated.counters(device)
        for work, _ in rig.late:
            work.wait()
    return {
        "peak_bytes": counters.peak_bytes - live,
        "live_bytes": counters.live_bytes - live,
        "events": counters.events_created - events,
    }
