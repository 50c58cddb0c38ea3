"""Two ranks train five hundred small steps on the simulated device: what grows?

Enters: a folder, and the words of each case in an argument of its own. Leaves: `rank_<r>.json`: live bytes, events and
unread steps at three moments of each case. Run by `test_training`.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch

from aorta.distributed.topology import Topology
from tests.device_path.program_overlap import SHAPE
from tests.device_path.ranks import by_rank
from tests.loop import Loop
from tests.simulated import device as simulated

LOOKS = (50, 275, 500)


def main() -> None:
    """Every case."""
    by_rank(lambda *rank: {case: looks(tuple(case.split()), *rank) for case in sys.argv[2:]})


def looks(words: tuple[str, ...], topology: Topology, device: torch.device) -> list[dict[str, Any]]:
    """What there is at each of `LOOKS`."""
    written = 0

    def count(_line: object) -> None:
        nonlocal written
        written += 1

    gc.collect()  # the model of the case before, which would be freed at some later step of this one
    one = Loop((*SHAPE, "workload.num_layers=1", *words), topology, device, count)
    found = []
    for number in range(1, max(LOOKS) + 1):
        one.step()
        if number in LOOKS:
            counters = simulated.counters(device.index)
            found.append(
                {
                    "live_bytes": counters.live_bytes,
                    "events": counters.events_created,
                    "streams": counters.streams_created,
                    "unread": number - written,
                }
            )
    one.finish()
    return found


if __name__ == "__main__":
    main()
