"""What the instrumentation costs a step (docs/dev/measuring.md, K5): `python -m benchmarks.instrument_cost`.

Regime: real two-rank gloo runs of the ranking workload with the engine's own step, sized to last 100 ms or more.
Inside one launch three arms alternate in blocks of 20 steps, in palindromes so that drift cancels:

    off on off'  off' on off  ...        off: the instrument is paused, nothing of it is on the path (`mode=off`)

A step is timed from its start to the start of what follows; a job's step is the slowest rank's. The first two steps of
a block are dropped (caches after the change), and its figure is the median of the others. Reading, encoding and writing
the record, which happens for several steps at once, is timed where it happens, and its share of a step added. A pair is
an `on` (or `off'`) block and the `off` block of the same half; the figure is the median ratio over all pairs with a
hierarchical bootstrap interval, beside that of off'/off, the A/A interval: what this machine calls equal. The
processor time rank 0 spent on a step is compared in the same way (`cpu`): it does not see who else uses the cores.

Prints one JSON object last; exit 1 when a target is missed: median <= 1.01, and upper end <= 1.03 or no more than the
upper end of A/A.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from aorta.distributed.topology import process_group, read_topology
from aorta.instrument.recorder import Recorder
from aorta.records.record_file import RecordWriter
from benchmarks import plans
from tests.loop import Loop

CPU = torch.device("cpu")
ARMS = ("off", "on", "again")
DROPPED = 2
WORDS = ("training.device=cpu", "training.batch_size=32", "dataset.num_samples=2048", "parallel={strategy}")


class Reading:
    """Counts what reading and writing steps costs, apart from the steps at whose end it happens.

    A run reads several steps at once (`ring_steps.MOST`): a median over steps would leave that out.

    Args:
        recorder: whose `catch_up` is counted from now on.
        now: readings of the clocks that count, as an array.

    Attributes:
        spent: by all calls so far.
    """

    def __init__(self, recorder: Recorder, now: Callable[[], Any]) -> None:
        self._now, self._catch_up = now, recorder.catch_up
        self.spent = np.zeros_like(now())
        recorder.catch_up = self._counted  # type: ignore[method-assign]

    def _counted(self) -> None:
        before = self._now()
        self._catch_up()
        self.spent = self.spent + self._now() - before

    def outside(self, step: Callable[[], None]) -> Any:
        """What a step takes, without what was read at its end."""
        before, spent = self._now(), self.spent
        step()
        return self._now() - before - (self.spent - spent)


def worker(words: Any) -> list[dict[str, tuple[float, float]]]:
    """One rank of one launch: for each half of a palindrome, arm -> medians of a step, wall and processor ms."""
    topology = read_topology()
    with process_group(topology, CPU, 300), tempfile.TemporaryDirectory() as folder:
        writer = RecordWriter(Path(folder) / "record.jsonl", topology.rank)
        chosen = [word.format(strategy=words.strategy) for word in WORDS]
        chosen += [f"instrument.mode={words.mode}", f"instrument.native={not words.python}"]
        loop = Loop((*chosen,), topology, CPU, writer.write)
        reading = Reading(loop.instrument.recorder, _now_ns)
        for _ in range(10):
            loop.step()
        loop.instrument.recorder.catch_up()
        halves = []
        for half in range(words.pairs):
            blocks = {}
            for arm in ARMS if half % 2 == 0 else ARMS[::-1]:
                with nullcontext() if arm == "on" else loop.instrument.paused():
                    blocks[arm] = _block_ms(loop, reading, words.steps)
            halves.append(blocks)
        loop.finish()
        writer.close()
    return halves


def _now_ns() -> Any:
    return np.array([time.perf_counter_ns(), time.process_time_ns()])


def _block_ms(loop: Loop, reading: Reading, steps: int) -> tuple[float, float]:
    read = reading.spent
    taken = np.array([reading.outside(loop.step) for _ in range(steps)])
    loop.instrument.recorder.catch_up()
    share = (reading.spent - read) / steps
    slowest = torch.from_numpy(np.append(taken[:, 0], share[0]))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    *wall, read_wall = slowest.tolist()
    return (median(wall[DROPPED:]) + read_wall) / 1e6, (median(taken[DROPPED:, 1]) + share[1]) / 1e6


def measure(words: Any) -> int:
    """All launches, interleaved: strategies and modes take turns, so that a busy spell hits them alike."""
    plan = [(strategy, mode) for strategy in words.strategies for mode in words.modes]
    found: dict[tuple[str, str], list[list[dict[str, tuple[float, float]]]]] = {case: [] for case in plan}
    sizes = ("--pairs", str(words.pairs), "--steps", str(words.steps), *plans.tap_words(words))
    for turn in range(words.launches):
        for strategy, mode in plan if turn % 2 == 0 else plan[::-1]:
            case = ("--strategy", strategy, "--mode", mode)
            found[strategy, mode].append(plans.launch("benchmarks.instrument_cost", 2, *case, *sizes))
    figures: dict[str, Any] = {"interceptor": plans.interceptor(words)}
    targets = {}
    for (strategy, mode), launches in found.items():

        def ratio(arm: str, what: int, launches: Any = launches) -> dict[str, Any]:
            return plans.median_ratio([[(half["off"][what], half[arm][what]) for half in one] for one in launches])

        on, same = ratio("on", 0), ratio("again", 0)
        step_ms, cpu_ms = (median(half["off"][what] for one in launches for half in one) for what in (0, 1))
        figures[f"{strategy}.{mode}"] = {
            "ratio": on,
            "aa": same,
            "cpu": {"ratio": ratio("on", 1), "aa": ratio("again", 1)},
            "step_ms": step_ms,
            "cpu_ms": cpu_ms,
        }
        targets[f"{strategy}.{mode} median <= 1.01"] = on["median"] <= 1.01
        targets[f"{strategy}.{mode} upper end"] = on["high"] <= max(1.03, same["high"])
        targets[f"{strategy}.{mode} step >= 100 ms"] = step_ms >= 100
    return plans.say("instrument_cost", figures | {"steps_per_block": words.steps}, targets)


def main() -> int:
    """Parse, launch, print."""
    parser = plans.arguments(__doc__)
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp"])
    parser.add_argument("--modes", nargs="+", default=["dedicated", "observe"])
    quick = "--quick" in sys.argv
    parser.add_argument("--launches", type=int, default=2 if quick else 3)
    parser.add_argument("--pairs", type=int, default=4 if quick else 10)
    parser.add_argument("--steps", type=int, default=6 if quick else 20)
    parser.add_argument("--strategy")
    parser.add_argument("--mode")
    plans.choose_tap(parser)
    return plans.run(parser, measure, worker)


if __name__ == "__main__":
    sys.exit(main())
