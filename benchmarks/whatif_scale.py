"""How long a what-if takes at scale, and how much memory: a synthetic program, made in memory.

    python -m benchmarks.whatif_scale [RANKS [STEPS]]

By default 1,024 ranks and 1,000 steps of 20 collectives, half of them waited for as they come and half behind the step,
with 20 ranges of blocks. Prints one JSON object last. Target: a prediction in 5 s after reading, 1.5 GiB.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from dataclasses import replace

import numpy as np

from aorta.analysis import whatif
from aorta.analysis.step_intervals import SpanName
from aorta.analysis.whatif.program import (
    Facts,
    Issued,
    Operation,
    ProgramSpans,
    RankLayout,
    RunProgram,
    StepProgram,
    What,
    compact,
)
from aorta.analysis.whatif.recorded import LONG_AGO
from aorta.analysis.whatif.replay import replay
from aorta.command_line import to_stdout
from aorta.config.groups.fabric import network_cost_ns
from aorta.config.schema import EmulatedFabric

COLLECTIVES = 20
BYTES = 4_000_000
NETWORK = EmulatedFabric(inter_bandwidth_gb_per_s=100.0, inter_latency_us=1.0)


def synthetic(ranks: int, steps: int) -> RunProgram:
    """A program whose ranks do the same, each with its own lengths."""
    everyone = tuple(range(ranks))
    operations = [Operation(What.BEGIN)]
    for place in range(COLLECTIVES):
        operations.append(Operation(What.ISSUE, place))
        if place < COLLECTIVES // 2:
            operations.append(Operation(What.WAIT, place))
    operations += [Operation(What.WAIT, place) for place in range(COLLECTIVES // 2, COLLECTIVES)]
    operations.append(Operation(What.END))
    issued = Issued("allreduce", "0", BYTES, everyone, 0)
    layout = RankLayout(tuple(operations), (issued,) * COLLECTIVES)
    charged = round(network_cost_ns("allreduce", BYTES, everyone, ranks, NETWORK))
    chance = np.random.default_rng(0)
    cost = np.full((COLLECTIVES, 1), charged, np.int32)
    rank = np.repeat(np.arange(ranks, dtype=np.int32), COLLECTIVES)
    name = np.tile(np.arange(COLLECTIVES, dtype=np.int32), ranks)
    after = np.array([index for index, each in enumerate(operations) if each.what is What.ISSUE], np.int32)

    def step(number: int) -> StepProgram:
        host = compact(chance.integers(10_000, 1_000_000, (len(operations), ranks)))
        wake = compact(np.full((len(operations), ranks), 5_000))
        begin = compact(chance.integers(0, 1_000, len(rank)))
        end = compact(begin.astype(np.int64) + 500_000)
        spans = ProgramSpans(rank, name, np.tile(after, ranks), begin, np.tile(after, ranks), end)
        nothing = np.full(ranks, np.nan)
        recorded = np.zeros(ranks, np.int64)
        return StepProgram(number, (0,) * ranks, host, wake, cost, cost, None, spans, None, recorded, nothing, nothing)

    made = RunProgram(
        ranks=everyone,
        world_size=ranks,
        layouts=(layout,),
        names=tuple(SpanName("compute", f"block.{number}", "backward") for number in range(COLLECTIVES)),
        steps=[step(number) for number in range(steps)],
        start_ns=np.zeros(ranks, np.int64),
        busy_ns=np.full((1, ranks), LONG_AGO, np.int64),
        facts=Facts("ddp", "cpu", NETWORK, True, ranks * steps * COLLECTIVES, 0),
    )
    times = replay(made)
    for index, each in enumerate(made.steps):
        each.recorded_ns[:] = (times.end_ns - times.begin_ns)[index, :, 0]
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int, nargs="?", default=1_024)
    parser.add_argument("steps", type=int, nargs="?", default=1_000)
    options = parser.parse_args()
    program = synthetic(options.ranks, options.steps)
    made_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    began = time.perf_counter()
    predicted = whatif.predict(program, whatif.parse_changes(["network.bandwidth=x2"]))
    took_s = time.perf_counter() - began
    began = time.perf_counter()
    whatif.marginals(replace(program, steps=program.steps[-50:]))
    to_stdout(
        json.dumps(
            {
                "ranks": options.ranks,
                "steps": options.steps,
                "collectives_a_step": COLLECTIVES,
                "what_if_s": round(took_s, 2),
                "marginals_of_50_steps_s": round(time.perf_counter() - began, 2),
                "program_mib": round(made_mib),
                "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
                "rank_steps_measured": predicted.rank_steps,
                "step_ms": predicted.job_step_ms.value,
            }
        )
    )


if __name__ == "__main__":
    main()
