"""Whether cost grows in proportion to the collectives of a step: `python -m benchmarks.collectives_scaling`.

Regime: one gloo rank, steps of 10, 30, 100, 300 and 1,000 tiny all-reduces, ten under way at a time, every size in
every round, up and down in turn. The figure is the processor time of the training thread for a whole step, its reading
and writing included, as the median over rounds; the same with the instrument paused is taken off. The exponent is the
slope of a straight line through log(cost) over log(collectives): 1 is linear, 2 is quadratic. From 100 on, so that the
fixed cost of a step does not hide growth.

Prints one JSON object last; exit 1 when the exponent exceeds 1.15 or a collective of the largest step costs more than
1.5 times one of a step of 100.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from aorta.distributed.process_group import process_group
from aorta.distributed.topology import read_topology
from aorta.records.writer import RecordWriter
from benchmarks import plans
from benchmarks.steps import CPU, TinySteps

SIZES = (10, 30, 100, 300, 1_000)


def worker(words: Any) -> dict[str, dict[str, float]]:
    """Arm -> collectives in a step -> median nanoseconds of a step."""
    topology = read_topology()
    found: dict[str, dict[int, list[int]]] = {arm: {size: [] for size in SIZES} for arm in ("on", "off")}
    with process_group(topology, CPU, 120), tempfile.TemporaryDirectory() as folder:
        writer = RecordWriter(Path(folder) / "record.jsonl", topology.rank)
        steps = TinySteps(writer, topology.rank, topology.world_size, native=not words.python)
        for turn in range(words.rounds):
            for arm in ("on", "off") if turn % 2 == 0 else ("off", "on"):
                with nullcontext() if arm == "on" else steps.instrument.paused():
                    steps.step(10)  # for the caches
                    for size in SIZES if turn % 2 == 0 else SIZES[::-1]:
                        found[arm][size].append(steps.step(size))
        steps.close()
        writer.close()
    return {arm: {str(size): median(taken) for size, taken in sizes.items()} for arm, sizes in found.items()}


def measure(words: Any) -> int:
    """One launch."""
    found = plans.launch("benchmarks.collectives_scaling", 1, "--rounds", str(words.rounds), *plans.tap_words(words))
    cost = {size: (found["on"][str(size)] - found["off"][str(size)]) / 1e3 for size in SIZES}
    steep = [size for size in SIZES if size >= 100]
    exponent = float(np.polyfit(np.log(steep), np.log([cost[size] for size in steep]), 1)[0])
    each = {size: cost[size] / size for size in SIZES}
    figures = {
        "interceptor": plans.interceptor(words),
        "us_per_step": cost,
        "us_per_collective": each,
        "exponent": exponent,
    }
    targets = {"exponent <= 1.15": exponent <= 1.15, "1,000 against 100 <= 1.5": each[1_000] <= 1.5 * each[100]}
    return plans.say("collectives_scaling", figures, targets)


def main() -> int:
    """Parse, launch, print."""
    parser = plans.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=6 if "--quick" in sys.argv else 30)
    plans.choose_tap(parser)
    return plans.run(parser, measure, worker)


if __name__ == "__main__":
    sys.exit(main())
