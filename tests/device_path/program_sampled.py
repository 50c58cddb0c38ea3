"""Two ranks train on the simulated device, one of several steps observed; each writes what its steps cost the device.

Takes a folder, and the words of each case as JSON. Writes `rank_<r>.json`, a list with one entry a case. Run by
`test_sampled`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from aorta.distributed.topology import Topology
from aorta.records.schema import Step
from tests.device_path.launch import by_rank
from tests.device_path.program_overlap import SHAPE, WARM_UP, set_lengths
from tests.loop import Loop
from tests.simulated import device as simulated

STEPS = 16


def main() -> None:
    """Every case, one after another."""
    by_rank(lambda *rank: [seen(words, *rank) for words in json.loads(sys.argv[2])])


def seen(words: list[str], topology: Topology, device: torch.device) -> dict[str, Any]:
    """By step: events recorded, and the record's line. `bare`: events of a step that nothing of AORTA is part of."""
    set_lengths(None)
    lines: list[Step] = []
    one = Loop((*SHAPE, *words), topology, device, lines.append)

    def events() -> int:
        return simulated.counters(device.index).events_recorded

    taken = []
    for _ in range(WARM_UP + STEPS):
        before = events()
        one.step()
        torch.accelerator.synchronize()
        taken.append(events() - before)
    with one.instrument.paused():
        one.unrecorded()
        before = events()
        one.unrecorded()
        bare = events() - before
    one.finish()
    simulated.no_races()
    return {
        "bare": bare,
        "events": taken,
        "drawn": [None if line.coverage.reason is not None else line.drawn for line in lines],
        "overlap": [line.overlap for line in lines],
        "collectives": [len(line.collectives) for line in lines],
        "complete": [line.coverage.complete for line in lines],
        "losses": [line.loss for line in lines],
    }


if __name__ == "__main__":
    main()
