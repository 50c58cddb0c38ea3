"""Small scenes of the device path that need one of their own: what `test_rules` asks for beside the loop of `scenario`.

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

from aorta.records.schema import InstrumentMode
from tests.device_path import block_scenes as blocks
from tests.device_path import collective_scenes as collectives
from tests.device_path import stream_scenes as streams
from tests.device_path.collective_forms import every_form
from tests.device_path.rig import Groups
from tests.device_path.scene import Scene
from tests.simulated import device as simulated

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


def play(device: torch.device, groups: Groups) -> dict[str, Any]:
    """All of them: by scene, and by mode where that matters."""
    told: dict[str, Any] = {}
    modes: tuple[InstrumentMode, ...] = ("dedicated", "observe")
    for mode in modes:
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
