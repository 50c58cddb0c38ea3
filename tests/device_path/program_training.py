"""Several ranks train on the simulated device in each mode, with collectives that really take long.

Enters: a folder, the strategies (with words that one needs behind it), how many steps. Leaves: `rank_<r>.json`:
strategy -> mode and tap -> losses, gradient norms, peak bytes, what the host waited for, on
whose streams collectives ran. Run by `test_training`.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch

from aorta.distributed.topology import Topology
from aorta.records.schema import Step
from tests.device_path.launch import by_rank
from tests.device_path.program_overlap import SHAPE
from tests.loop import Loop
from tests.simulated import device as simulated
from tests.simulated.load import native as simulator

PRIORITY = -3
"""Of AORTA's streams, and of no other."""
ARMS = {
    "off": ("instrument.mode=off",),
    "observe": ("instrument.mode=observe",),
    "dedicated": ("instrument.mode=dedicated", f"instrument.stream_priority={PRIORITY}"),
    "all dedicated": (
        "instrument.mode=dedicated",
        "instrument.dedicated_async=true",
        f"instrument.stream_priority={PRIORITY}",
    ),
}
SLOW_NS = 20_000_000
"""A collective really takes so long: who does not wait for one reads what was there before."""
WARM_UP = 2


def main() -> None:
    """Every strategy, in every mode."""
    strategies, steps = sys.argv[2].split(","), int(sys.argv[3])
    by_rank(
        lambda *rank: {
            strategy: {
                arm: trained((*f"parallel={strategy}".split(), *words), *rank, steps) for arm, words in ARMS.items()
            }
            for strategy in strategies
        }
    )


def trained(words: tuple[str, ...], topology: Topology, device: torch.device, steps: int) -> dict[str, Any]:
    """One run from the same seed."""
    gc.collect()  # what the run before left in cycles
    before_bytes = simulated.counters(device.index).live_bytes
    lines: list[Step] = []
    one = Loop((*SHAPE, "workload.num_layers=2", *words), topology, device, lines.append)
    for _ in range(WARM_UP):
        one.step()
    simulated.reset()
    simulated.real_delays(collective_ns=SLOW_NS)
    for _ in range(steps):
        one.step()
    counters = simulated.counters(device.index)
    torch.accelerator.synchronize(device)
    streams = streams_of(device.index)
    one.finish()
    simulated.real_delays(collective_ns=0)
    simulated.no_races()
    return {
        "losses": [line.loss for line in lines],
        "grad_norms": [line.grad_norm for line in lines],
        "peak_bytes": counters.peak_bytes - before_bytes,
        "host_synchronisations": dict(counters.host_synchronisations),
        "streams": streams,
    }


def streams_of(device: int) -> dict[str, list[str]]:
    """Whose streams each kind of collective ran on."""
    found: dict[str, set[str]] = {}
    backend = simulated.backend_streams(device)
    for row in simulated.timeline(device, kind="collective"):
        if row.stream == 0:
            whose = "compute"
        elif row.stream in backend:
            whose = "backend"
        else:
            priority = int(simulator().stream_priority(row.device, row.stream))
            whose = "AORTA" if priority == PRIORITY else "strategy"
        found.setdefault(row.name, set()).add(whose)
    return {name: sorted(whose) for name, whose in found.items()}


if __name__ == "__main__":
    main()
