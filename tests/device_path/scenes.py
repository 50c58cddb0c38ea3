"""What ranks play for `test_rules`: the loop of `scenario` in every way, and small scenes that need one of their own.

Each is a function of two ranks and answers with what JSON can hold. Enters: the device, a mode. Must not:
depend on how fast a machine is; it runs in virtual time.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from aorta.distributed.topology import Topology
from aorta.instrument.native import build as native
from aorta.records.schema import InstrumentMode
from tests.device_path import block_scenes as blocks
from tests.device_path import collective_scenes as collectives
from tests.device_path import stream_scenes as streams
from tests.device_path.collective_forms import every_form
from tests.device_path.rig import Groups, groups, stream_id
from tests.device_path.scenario import run, use
from tests.device_path.scene import Scene
from tests.simulated import device as simulated
from tests.simulated.load import native as simulator
from tests.simulated.scenarios import unbound_group

SCENES: tuple[Callable[[Scene], Any], ...] = (
    blocks.capture,
    blocks.capture_over_steps,
    streams.another_device_is_current,
    every_form,
    collectives.unknown_communicators,
    collectives.stacked_in_a_batch,
    collectives.nothing_in_a_batch,
    blocks.checkpointed,
    collectives.split,
    collectives.limited_wait,
    collectives.blocking,
    collectives.kept_handles,
    blocks.abandoned,
    streams.priorities,
    streams.moved,
    streams.marks_cost,
    blocks.copies_elsewhere,
    blocks.copies_here,
    blocks.recursive_block,
    blocks.backward_end_cost,
    collectives.failed_handle,
    streams.no_stream_to_time_on,
    collectives.many_joined,
    collectives.future_elsewhere,
    collectives.handles,
    streams.no_stream_left,
    collectives.workers,
)
ONE_MODE: tuple[Callable[[Scene], Any], ...] = (
    streams.unread_epochs,
    streams.uncertain_clock,
    streams.waits_told,
    streams.spins,
    collectives.not_compiled,
)
ALL_DEDICATED: tuple[Callable[[Scene], Any], ...] = (
    every_form,
    collectives.limited_wait,
    streams.moved,
    collectives.handles,
)


MODES: tuple[InstrumentMode, ...] = ("dedicated", "observe")
WAYS: dict[str, InstrumentMode] = {"dedicated": "dedicated", "observe": "observe", "all_dedicated": "dedicated"}
"""The last one: `instrument.dedicated_async`."""


def rules(_topology: Topology, device: torch.device) -> dict[str, Any]:
    """What each loop found wrong and what it used, without an instrument and in every way; and all scenes."""
    own = groups(device)
    wrong, shape = run(device, own, "off")
    told: dict[str, Any] = {"off": {"wrong": wrong, "use": use(device, own, "off")._asdict()}}
    for name, mode in WAYS.items():
        told[name] = {"wrong": run(device, own, mode, dedicated_async=name == "all_dedicated", shape=shape)[0]}
    for name, mode in WAYS.items():
        told[name]["use"] = use(device, own, mode, dedicated_async=name == "all_dedicated")._asdict()
    return told | {"scenes": play(device, own)}


def play(device: torch.device, groups: Groups) -> dict[str, Any]:
    """All scenes: by name, and by mode where that matters."""
    told: dict[str, Any] = {}
    for mode in MODES:
        for scene in (*SCENES, *(ONE_MODE if mode == "dedicated" else ())):
            played(told, scene, Scene(device, groups, mode))
    for scene in ALL_DEDICATED:
        played(told, scene, Scene(device, groups, "dedicated", dedicated_async=True))
    return told


def played(told: dict[str, Any], scene: Callable[[Scene], Any], on: Scene) -> None:
    """Under its name."""
    simulated.defaults()
    gc.collect()
    begin_s = time.monotonic()
    name = f"{scene.__name__} {'all_dedicated' if on.dedicated_async else on.mode}"
    sys.stderr.write(f"{begin_s:.2f}: {name}\n")  # which one it is, should it hang
    told[name] = scene(on)
    told.setdefault("seconds", {})[name] = time.monotonic() - begin_s


def ask_the_runtime() -> None:
    """The compiled interceptor of this process asks whether a stream is captured, as it does with torch 2.11."""
    native.FLAGS = (*native.FLAGS, "-DAORTA_CAPTURE_BY_RUNTIME")  # type: ignore[misc]  # another library by its name


def captures_by_runtime(_topology: Topology, device: torch.device) -> dict[str, Any]:
    """What times collectives, what scenes with captures tell, and how often the runtime was asked in the last one."""
    ask_the_runtime()
    own, scenes = groups(device), dict[str, Any]()
    for mode in MODES:
        for scene in (blocks.capture, blocks.capture_over_steps):
            played(scenes, scene, Scene(device, own, mode))
    (asked,) = simulator().counts("capture_questions").values()
    return {"by": native.compiled(device, wanted=True, emulated=False)[1], "scenes": scenes, "asked": asked}


def two_peers(_topology: Topology, device: torch.device) -> dict[str, Any]:
    """One of three ranks sends to both others at once: by mode, kind, start and end in the record and on the device."""
    unbound = unbound_group()
    transfer(torch.zeros(1, device=device), unbound)  # communicators' own streams, before an instrument takes any
    own = Groups(*[unbound] * 6, {priority: stream_id(priority) for priority in (0, -1)})
    return {mode: sent(Scene(device, own, mode)) for mode in MODES}


def sent(scene: Scene) -> dict[str, Any]:
    """The second rank, to which the first one sends first, receives last."""
    x = scene.tensor()
    with scene.looking() as instrument, scene.step(instrument):
        if scene.rank:
            torch.cuda._sleep((500_000, 100_000)[scene.rank - 1])
        transfer(x, scene.groups.unbound)
    return {"rows": [row[:3] for row in scene.rows()], "kernels": scene.kernels()}


def transfer(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """A group that is bound to no device has a communicator for each pair of ranks: their transfers overlap."""
    if dist.get_rank():
        works = [dist.irecv(x, 0, group=group)]
    else:
        works = [dist.isend(x, peer, group=group) for peer in (1, 2)]
    for work in works:
        work.wait()
    torch.accelerator.synchronize()
