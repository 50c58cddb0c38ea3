"""Ranks whose compiled interceptor asks the runtime whether a stream is captured, as it does with torch 2.11, play the
scenes with captures. `python -m tests.device_path.program_by_runtime` builds that interceptor.

Enters: a folder. Leaves: `rank_<r>.json`: what times collectives, what each scene told, and how often the runtime was
asked in the last one. Run by `test_rules`.
"""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import torch

from aorta.distributed.topology import Topology
from aorta.instrument.native import build as native
from aorta.records.schema import InstrumentMode
from tests.device_path.block_scenes import capture, capture_over_steps
from tests.device_path.launch import by_rank
from tests.device_path.rig import groups
from tests.device_path.scene import Scene
from tests.device_path.scenes import played
from tests.simulated.load import native as simulator

MODES: tuple[InstrumentMode, ...] = ("dedicated", "observe")


def main() -> None:
    """Build it without a folder, else play."""
    native.FLAGS = (*native.FLAGS, "-DAORTA_CAPTURE_BY_RUNTIME")  # type: ignore[misc]  # another library by its name
    if len(sys.argv) == 1:
        native.build()
        return

    def told(_topology: Topology, device: torch.device) -> dict[str, Any]:
        own, scenes = groups(device), {}
        for mode, scene in product(MODES, (capture, capture_over_steps)):
            played(scenes, scene, Scene(device, own, mode))
        (asked,) = simulator().counts("capture_questions").values()
        return {"by": native.compiled(device, wanted=True, emulated=False)[1], "scenes": scenes, "asked": asked}

    by_rank(told)


if __name__ == "__main__":
    main()
