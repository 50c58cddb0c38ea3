"""Host time the instrumentation adds to one collective: `python -m benchmarks.interception_cost`.

Regime: an asynchronous all-reduce of one element and its `wait()`, gloo, in worlds of one and of two ranks; the tensor
is so small that host time is all there is. Four arms alternate in blocks of 200 calls, in palindromes:

    plain        torch as it is
    bare         a seam whose handler only calls the original: what any interception from Python costs (the compiled
                 tap costs less, so what it adds to this is negative; `over_plain` says what it adds to torch)
    recorded     the instrument, inside a recorded step
    off          the instrument, paused: shows that nothing stays behind

Each arm is measured twice: in a tight loop, and *cold*, with a matrix product before every call, which is how a
collective of a training step finds the processor's caches: full of something else.

What is timed is the call and the wait, each on the training thread's own processor clock (`time.thread_time_ns`), since
with a shared core the wall clock measures the neighbours, and the wall clock beside it. Reading and writing the step
comes later and is timed apart, per collective. Figures are over the medians of blocks.

Prints one JSON object last, in microseconds per collective; exit 1 when `recorded` - `bare` of the tight loop > 60 us,
its reading included. The target is for the tight loop; `cold` says what it does not.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from aorta.distributed.topology import process_group, read_topology
from aorta.instrument.dispatcher import DispatcherHook
from aorta.instrument.instrumentation import Instrumentation
from aorta.instrument.operators import OPERATORS
from aorta.records.clocks import read_clocks
from aorta.records.record_file import RecordWriter
from aorta.records.step_line import StepFacts
from benchmarks import plans

CPU = torch.device("cpu")
ARMS = ("plain", "bare", "recorded", "off")
EVICTING = 768
"""Side of the square matrices whose product (7 MB in all) stands for a model's work between two collectives: more than
the first two levels of cache of the cores this has run on (2 MiB each)."""
COLD_CALLS = 8
"""Cold calls in a block: each takes some ten milliseconds more."""


class Rig:
    """One rank's arms."""

    def __init__(self, writer: RecordWriter, rank: int, world_size: int, *, native: bool) -> None:
        self.instrument = Instrumentation(
            CPU, "dedicated", rank, world_size, read_clocks(), writer.write, native=native
        )
        self.tensor = torch.ones(1)
        self.factor, self.product = torch.randn(EVICTING, EVICTING), torch.empty(EVICTING, EVICTING)
        self.steps = 0

    @contextmanager
    def arm(self, name: str) -> Iterator[None]:
        with ExitStack() as stack:
            if name != "recorded":
                stack.enter_context(self.instrument.paused())
            if name == "bare":
                stack.callback(DispatcherHook(OPERATORS, CPU, lambda _name, _args, original: original()).close)
            yield

    def block(self, name: str, calls: int) -> dict[str, float]:
        """Median nanoseconds of a call with its wait, on both clocks; and of reading, per collective."""
        with self.arm(name):
            if name in ("recorded", "off"):
                self.steps += 1
                facts = StepFacts(0, self.steps, self.steps, 0.0, warmup=False)
                with self.instrument.recorder.step(facts):
                    found = self._calls(calls)
                    begin = time.thread_time_ns()  # what is left of the step is its reading and writing
                found["reading"] = (time.thread_time_ns() - begin) / (calls + COLD_CALLS)
            else:
                found = self._calls(calls)
        return found

    def _calls(self, calls: int) -> dict[str, float]:
        wall, cpu = self._timed(calls, cold=False)
        return {"cpu": median(cpu), "wall": median(wall), "cold": median(self._timed(COLD_CALLS, cold=True)[1])}

    def _timed(self, calls: int, *, cold: bool) -> tuple[list[int], list[int]]:
        wall, cpu = [], []
        for _ in range(calls):
            if cold:
                torch.mm(self.factor, self.factor, out=self.product)
            begin, begin_cpu = time.perf_counter_ns(), time.thread_time_ns()
            work = dist.all_reduce(self.tensor, async_op=True)
            assert work is not None
            work.wait()
            cpu.append(time.thread_time_ns() - begin_cpu)
            wall.append(time.perf_counter_ns() - begin)
        return wall, cpu


def worker(words: Any) -> list[dict[str, dict[str, float]]]:
    """One rank: every arm, in palindromes; arm -> nanoseconds, a dictionary a half."""
    topology = read_topology()
    with process_group(topology, CPU, 120), tempfile.TemporaryDirectory() as folder:
        writer = RecordWriter(Path(folder) / "record.jsonl", topology.rank)
        rig = Rig(writer, topology.rank, topology.world_size, native=not words.python)
        halves = [
            {arm: rig.block(arm, words.calls) for arm in (ARMS if half % 2 == 0 else ARMS[::-1])}
            for half in range(words.halves + 1)
        ]
        rig.instrument.close()
        writer.close()
    return halves[1:]  # the first is for the caches


def measure(words: Any) -> int:
    """Worlds of one and two."""
    figures: dict[str, Any] = {"interceptor": plans.interceptor(words)}
    targets = {}
    for ranks in (1, 2):
        halves = plans.launch(
            "benchmarks.interception_cost",
            ranks,
            *("--halves", str(words.halves), "--calls", str(words.calls)),
            *plans.tap_words(words),
        )

        def us(pick: Callable[[dict[str, dict[str, float]]], float], halves: Any = halves) -> dict[str, float]:
            return plans.spread_us([pick(half) for half in halves])

        over_plain = us(lambda half: half["recorded"]["cpu"] + half["recorded"]["reading"] - half["plain"]["cpu"])
        added = us(lambda half: half["recorded"]["cpu"] + half["recorded"]["reading"] - half["bare"]["cpu"])
        figures[f"ranks_{ranks}_us"] = {
            **{
                arm: {
                    clock: plans.spread_us([half[arm][clock] for half in halves]) for clock in ("cpu", "wall", "cold")
                }
                for arm in ARMS
            },
            "reading": us(lambda half: half["recorded"]["reading"]),
            "bare_over_plain": us(lambda half: half["bare"]["cpu"] - half["plain"]["cpu"]),
            "off_over_plain": us(lambda half: half["off"]["cpu"] - half["plain"]["cpu"]),
            "added_wall": us(lambda half: half["recorded"]["wall"] - half["bare"]["wall"]),
            "added_cold": us(lambda half: half["recorded"]["cold"] - half["bare"]["cold"]),
            "bare_over_plain_cold": us(lambda half: half["bare"]["cold"] - half["plain"]["cold"]),
            "over_plain": over_plain,
            "added": added,
        }
        targets[f"{ranks} rank(s): added <= 60 us"] = added["median"] <= 60
    return plans.say("interception_cost", figures, targets)


def main() -> int:
    """Parse, launch, print."""
    parser = plans.arguments(__doc__)
    parser.add_argument("--halves", type=int, default=4 if "--quick" in sys.argv else 20)
    parser.add_argument("--calls", type=int, default=200)
    plans.choose_tap(parser)
    return plans.run(parser, measure, worker)


if __name__ == "__main__":
    sys.exit(main())
