"""How large a step's line in the record is: `python -m benchmarks.record_size`.

Regime: steps of 50 collectives, ten under way at a time, and a compute range for each ten, on one gloo rank; and the
first steps of a real run of the ranking workload under fsdp on two ranks, for scale. Bytes as written, newline
included; the header and the footer are not counted.

Prints one JSON object last; exit 1 when the median line of a step of 50 collectives exceeds 10 KiB.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from aorta.distributed.topology import process_group, read_topology
from aorta.records.record_file import RecordWriter
from benchmarks import plans
from benchmarks.steps import CPU, TinySteps
from tests.loop import Loop

COLLECTIVES = 50
LIMIT = 10 * 1024


def worker(words: Any) -> list[int]:
    """Bytes of each line of one rank."""
    topology = read_topology()
    with process_group(topology, CPU, 120), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.jsonl"
        writer = RecordWriter(path, topology.rank)
        if words.tiny:
            steps = TinySteps(writer, topology.rank, topology.world_size, native=not words.python)
            for _ in range(words.steps):
                steps.step(COLLECTIVES)
            steps.close()
        else:
            loop = Loop(
                ("training.device=cpu", "parallel=fsdp", f"instrument.native={not words.python}"),
                topology,
                torch.device("cpu"),
                writer.write,
            )
            for _ in range(words.steps):
                loop.step()
            loop.finish()
        writer.close()
        return [len(line) for line in path.read_bytes().splitlines(keepends=True)]


def measure(words: Any) -> int:
    """Both regimes."""
    sizes = ("--steps", str(words.steps), *plans.tap_words(words))
    tiny = plans.launch("benchmarks.record_size", 1, "--tiny", *sizes)
    real = plans.launch("benchmarks.record_size", 2, *sizes)
    figures = {
        "interceptor": plans.interceptor(words),
        "collectives": COLLECTIVES,
        "bytes_per_step": {"median": median(tiny), "max": max(tiny)},
        "fsdp_bytes_per_step": {"median": median(real), "max": max(real)},
    }
    return plans.say("record_size", figures, {f"50 collectives <= {LIMIT} bytes": median(tiny) <= LIMIT})


def main() -> int:
    """Parse, launch, print."""
    parser = plans.arguments(__doc__)
    parser.add_argument("--steps", type=int, default=5 if "--quick" in sys.argv else 20)
    parser.add_argument("--tiny", action="store_true")
    plans.choose_tap(parser)
    return plans.run(parser, measure, worker)


if __name__ == "__main__":
    sys.exit(main())
