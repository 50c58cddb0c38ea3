"""What a step pays for AORTA, and for which part of it: `python -m benchmarks.step_parts [--other CHECKOUT]`.

Regime: two gloo ranks and the engine's own step of the ranking workload, `cold` as in `instrument_cost` (its matrix
products empty the processor's caches between two calls of AORTA's), and `warm` at width 64, where the host does nothing
but launch. In one launch blocks of steps take turns, on off, off on, ...: recorded with everything, and with the
instrument taken off and nothing recorded.

    added   processor time of the training thread, an `on` block over the `off` block beside it: all that it pays, C++,
            evicted caches and torch's longer way round a module with hooks included. A block's figure is the median of
            its steps and its share of reading, encoding and writing.
    lines   processor time in which lines are made of steps, encoded and written, a step.
    own     AORTA's own time as it counts it itself (`aorta_ms` of the record) in the same `on` blocks, wall clock.

`--other`: launches of another checkout, with this file and its compiled part built, take turns with those of this one.

Prints one JSON object last: of rank 0, microseconds a step, medians over blocks with quartiles. Exit 1 when a target is
missed: median of `added` at most 100 us (ddp, cold), 40 (ddp, warm), 150 (fsdp, cold), 80 (fsdp, warm).
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from aorta.distributed.topology import process_group, read_topology
from aorta.records.record_file import RecordWriter
from aorta.records.ring_steps import MOST
from aorta.records.schema import Step
from benchmarks import plans
from benchmarks.instrument_cost import CPU, DROPPED, WORDS, Reading
from tests.loop import Loop
from tests.runs import ROOT

WARM = (
    "training.batch_size=2",
    "workload.model_dim=64",
    "workload.mlp_hidden_dim=128",
    "workload.vocab_size=500",
    "dataset.num_samples=512",
)
REGIMES: dict[str, tuple[str, ...]] = {"cold": (), "warm": WARM}
TARGETS_US = {"ddp.cold": 100, "ddp.warm": 40, "fsdp.cold": 150, "fsdp.warm": 80}


def worker(words: Any) -> dict[str, list[Any]]:
    """One rank: nanoseconds a step of each pair of blocks, `added`, `off`, and `own`."""
    own: list[float] = []
    topology = read_topology()
    chosen = [word.format(strategy=words.strategy) for word in WORDS]
    chosen = [word for word in chosen if word.split("=")[0] not in {more.split("=")[0] for more in words.more}]
    with process_group(topology, CPU, 300), tempfile.TemporaryDirectory() as folder:
        writer = RecordWriter(Path(folder) / "record.jsonl", topology.rank)

        def written(line: Step) -> None:
            own.append((line.overlap.get("aorta_ms") or 0.0) * 1e6)
            writer.write(line)

        loop = Loop((*chosen, *words.more), topology, CPU, written)
        recorder = loop.instrument.recorder
        reading = Reading(recorder, lambda: np.array(time.thread_time_ns()))
        answer: dict[str, list[Any]] = {"added": [], "off": [], "lines": [], "own": []}
        for half in range(words.halves + 1):
            spent: dict[str, float] = {}
            for arm in ("on", "off") if half % 2 == 0 else ("off", "on"):
                if arm == "off":
                    with loop.instrument.paused():
                        taken = [int(reading.outside(loop.unrecorded)) for _ in range(DROPPED + 8)]
                    spent[arm] = median(taken[DROPPED:])
                    continue
                for _ in range(DROPPED):
                    loop.step()
                recorder.catch_up()
                read, lines = int(reading.spent), len(own)
                taken = [int(reading.outside(loop.step)) for _ in range(MOST)]
                recorder.catch_up()
                spent["lines"] = (int(reading.spent) - read) / MOST
                spent[arm] = median(taken) + spent["lines"]
                counted = own[lines:]
            if half:  # the first is for the caches
                answer["added"].append(spent["on"] - spent["off"])
                answer["off"].append(spent["off"])
                answer["lines"].append(spent["lines"])
                answer["own"].append(median(counted))
        loop.finish()
        writer.close()
    return answer


def measure(words: Any) -> int:
    """Launches of every case and checkout, in turns."""
    checkouts = {"this": ROOT} | ({} if words.other is None else {"other": words.other.resolve()})
    seen: dict[tuple[str, str], dict[str, list[Any]]] = {}
    for turn in range(words.launches):
        for case in TARGETS_US:
            strategy, regime = case.split(".")
            if strategy not in words.strategies or regime not in words.regimes:
                continue
            said = ("--strategy", strategy, "--halves", str(words.halves), "--more", *REGIMES[regime])
            for name, checkout in sorted(checkouts.items(), reverse=turn % 2 == 0):
                blocks = plans.launch("benchmarks.step_parts", 2, *said, checkout=checkout)
                kept = seen.setdefault((name, case), {figure: [] for figure in blocks})
                for figure, values in blocks.items():
                    kept[figure] += values
    figures: dict[str, Any] = {"interceptor": plans.interceptor(words)}
    targets = {}
    for (name, case), blocks in seen.items():
        shown = {
            figure: plans.spread_us(values) for figure, values in blocks.items() if isinstance(values[0], int | float)
        }
        figures.setdefault(f"{name}_us", {})[case] = shown
        if name == "this":
            targets[f"{case} added <= {TARGETS_US[case]} us"] = shown["added"]["median"] <= TARGETS_US[case]
    return plans.say("step_parts", figures, targets)


def main() -> int:
    """Parse, launch, print."""
    parser = plans.arguments(__doc__)
    parser.add_argument("--halves", type=int, default=4 if "--quick" in sys.argv else 10, help="pairs of blocks")
    parser.add_argument("--launches", type=int, default=1 if "--quick" in sys.argv else 3, help="of each case")
    parser.add_argument("--other", type=Path, metavar="CHECKOUT")
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp"])
    parser.add_argument("--regimes", nargs="+", default=list(REGIMES))
    parser.add_argument("--strategy")
    parser.add_argument("--more", nargs="*", default=[])
    parser.set_defaults(python=False)
    return plans.run(parser, measure, worker)


if __name__ == "__main__":
    sys.exit(main())
