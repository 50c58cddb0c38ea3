"""How long a what-if takes at scale, and how much memory: the figure of docs/dev/measurements.md.

    python -m benchmarks.whatif_scale [RANKS [STEPS]]

By default 1,024 ranks and 1,000 steps of 20 collectives, half of them waited for as they come and half behind the step,
with 20 ranges of blocks. Prints one JSON object last. Target: a prediction in 5 s after reading, 1.5 GiB.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from aorta.analysis import whatif
from aorta.command_line import to_stdout
from aorta.config.groups.fabric import network_cost_ns
from aorta.config.schema import EmulatedFabric
from tests.analysis.whatif.hand_made import compute, issue, program, wait

COLLECTIVES = 20
BYTES = 4_000_000
NETWORK = EmulatedFabric(inter_bandwidth_gb_per_s=100.0, inter_latency_us=1.0)


def synthetic(ranks: int, steps: int) -> whatif.RunProgram:
    """Return a program whose ranks do the same, each with its own lengths."""
    everyone, chance = tuple(range(ranks)), random.Random(0)

    def words() -> Iterator[Any]:
        for place in range(COLLECTIVES):
            yield compute(f"block.{place}", chance.randrange(10_000, 1_000_000))
            yield issue("allreduce", BYTES, everyone)
            if place < COLLECTIVES // 2:
                yield wait(place, wake_ns=5_000)
        for place in range(COLLECTIVES // 2, COLLECTIVES):
            yield wait(place, wake_ns=5_000)

    cost_ns = round(network_cost_ns("allreduce", BYTES, everyone, ranks, NETWORK))
    return program([list(words()) for _ in everyone], [cost_ns] * COLLECTIVES, steps=steps, network=NETWORK)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int, nargs="?", default=1_024)
    parser.add_argument("steps", type=int, nargs="?", default=1_000)
    options = parser.parse_args()
    made = synthetic(options.ranks, options.steps)
    began = time.perf_counter()
    predicted = whatif.predict(made, whatif.parse_changes(["network.bandwidth=x2"]))
    what_if_s = time.perf_counter() - began
    began = time.perf_counter()
    whatif.marginals(replace(made, steps=made.steps[-50:]))
    figures = {
        "ranks": options.ranks,
        "steps": options.steps,
        "what_if_s": round(what_if_s, 2),
        "marginals_of_50_steps_s": round(time.perf_counter() - began, 2),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "step_ms": predicted.job_step_ms.value,
    }
    to_stdout(json.dumps(figures))


if __name__ == "__main__":
    main()
