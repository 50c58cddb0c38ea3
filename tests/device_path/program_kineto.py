"""Two ranks train on the simulated device under torch.profiler, which sees its kernels (`tests.simulated.kineto`).

Enters: a folder and strategies. Leaves: `<strategy>/rank<r>.pt.trace.json`, and `<strategy>/rank_<r>.json`, the lines
of the profiled steps. Run by `test_crosscheck`. Must not: hand anything of the record to the trace.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

from aorta.distributed.topology import Topology
from aorta.records.schema import Step
from tests.device_path.launch import by_rank
from tests.device_path.program_overlap import MATH, SHAPE, WARM_UP
from tests.loop import Loop
from tests.simulated import device as simulated

STEPS = 4


def main(folder: Path, strategies: list[str]) -> None:
    by_rank(lambda *rank: [run(folder / strategy, strategy, *rank) for strategy in strategies])


def run(folder: Path, strategy: str, topology: Topology, device: torch.device) -> None:
    # Only the mathematics of blocks takes time: what else runs on the computing stream is no computation of the model.
    simulated.lengths(**dict.fromkeys(simulated.CLASSES, (0, 0.0)), operators=dict.fromkeys(MATH, (23_000, 0.0)))
    simulated.costs(launch_ns=0)
    simulated.collective_lengths(default=(90_000, 0.5))
    lines: list[Step] = []
    one = Loop((*SHAPE, f"parallel={strategy}", "instrument.mode=dedicated"), topology, device, lines.append)
    for _ in range(WARM_UP):
        one.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(STEPS):
            one.step()
            torch.cuda.synchronize()  # the profiler's steps are the host's: the device has to have come along
            profiler.step()
    one.finish()
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"rank{topology.rank}.pt.trace.json"))
    text = json.dumps(msgspec.to_builtins(lines[WARM_UP:]))
    (folder / f"rank_{topology.rank}.json").write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","))
