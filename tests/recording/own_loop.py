"""Run on every rank: a loop that AORTA did not write, profiled by its public objects.

Arguments: a folder, then what to profile with. Each rank writes `saved_<rank>.json`: `saved_traces` of what it used
while the loop ran and after it, or the error that ended it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import aorta
from aorta.errors import AortaError

STEPS = 8


def step() -> None:
    """One step of anything."""
    torch.ones(8, 8) @ torch.ones(8, 8)


def shown(profiler: aorta.Profiler | aorta.TorchProfiler) -> list[list[str | None]]:
    return [[path and str(path) for path in paths] for _, paths in profiler.saved_traces]


def main(folder: Path, how: str) -> None:
    """Profile one loop as `how` says."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, world, 1), mesh_dim_names=("pp", "dp", "tp"))
    found: dict[str, object] = {}
    try:
        if how == "mesh":
            with aorta.Profiler(folder / "traces", 4, 1, 1, mesh, with_stack=False) as profiler:
                for _ in range(STEPS):
                    step()
                    profiler.step()
                while len(profiler.saved_traces) < STEPS // 4:  # they are written beside the loop
                    time.sleep(0.01)
                found["in the loop"] = shown(profiler)
            found["after it"] = shown(profiler)
        elif how == "outside":
            part = DeviceMesh("cpu", list(range(world - 1)))
            with aorta.Profiler(folder / "traces", 4, 1, 1, part, timeout_s=60):
                pass
        else:
            wanted = aorta.TorchProfiler(
                str(folder / "traces"), remote_root=f"file://{folder}/remote", remote_file_name="r{rank}.json", wait=1
            )
            wanted.start()
            for number in range(STEPS):
                step()
                wanted(number, loss=0.0)
            wanted.close()
            found["after it"] = shown(wanted)
    except AortaError as error:
        found["error"] = f"{type(error).__name__} {error.exit_code}: {error}"
    (folder / f"saved_{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]), sys.argv[2])
