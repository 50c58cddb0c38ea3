"""Several ranks train in a pipeline on the simulated device, in virtual time, with equal stages and cheap transfers.

Takes a folder and the cases as JSON: name -> words of train.py, and how long a transfer takes (fixed ns, ns per byte).
Writes `rank_<r>.json`: name -> of each step its metrics, the device's own lengths, and whether everything was seen. Run
by `test_pipeline`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from aorta.distributed.topology import Topology
from aorta.records.schema import Step
from tests.device_path.program_overlap import SHAPE
from tests.device_path.ranks import by_rank
from tests.device_path.witness import clipped, length, truth_of
from tests.loop import Loop
from tests.simulated import device as simulated

LAYER_NS = 1_000_000
"""Of one layer forward, and of one backward. Nothing else takes time, so stages with as many layers are equal."""
WARM_UP, STEPS = 3, 3


def main() -> None:
    """Every case, one after another."""
    cases = json.loads(sys.argv[2])
    by_rank(lambda *rank: {name: seen(*case, *rank) for name, case in cases.items()})


def seen(
    words: list[str], transfer: tuple[int, float], topology: Topology, device: torch.device
) -> list[dict[str, Any]]:
    """Each step of a case after the warm-up."""
    # One of either in a layer, of the ranking model and of the decoder.
    once = dict.fromkeys(("aten::gelu", "aten::gelu_backward", "aten::silu", "aten::silu_backward"), (LAYER_NS, 0.0))
    simulated.lengths(**dict.fromkeys(simulated.CLASSES, (0, 0.0)), operators=once)
    simulated.costs(launch_ns=0)
    simulated.collective_lengths(default=(transfer[0], transfer[1]))
    lines: list[Step] = []
    one = Loop((*SHAPE, *words), topology, device, lines.append)
    for _ in range(WARM_UP):
        one.step()
    torch.accelerator.synchronize()
    simulated.reset()
    for _ in range(STEPS):
        one.step()
    one.finish()
    simulated.no_races()
    rows, waits, stream = simulated.timeline(), simulated.waits(), torch.cuda.current_stream().stream_id
    still = [(wait.begin_ns, wait.end_ns) for wait in waits if (wait.device, wait.stream) == (device.index, stream)]
    return [
        {
            "overlap": line.overlap,
            "truth": truth_of((line.start_mono_ns, line.end_mono_ns), rows, waits, stream, device.index).lengths_ns(),
            "coverage": line.coverage.complete,
            "kinds": [row.kind for row in line.collectives],
            "still_ns": length(clipped(still, (line.start_mono_ns, line.end_mono_ns))),
            "lanes_ms": line.per_stream_ms,
        }
        for line in lines[WARM_UP:]
    ]


if __name__ == "__main__":
    main()
