"""Host time the instrument adds to a device collective: `python -m benchmarks.device_collective_cost`.

Regime: the simulated device in wall-clock time (`tests/simulated`; build it first), one rank, kernels and collectives
that take no time, so that host time is all there is. An asynchronous all-reduce of one element and its `wait()` on the
stream that computes. Blocks of calls alternate between the instrument paused (`off`) and recording, with the compiled
tap and with the Python one, in both modes; reading and writing the step comes later and is not in it. What is timed is
the training thread's own processor time and the wall clock, each as the median over the calls of a block; a figure is
the median over blocks of the difference to the `off` block beside it.

It says what our own code and torch's generic stream and event calls cost, not what a driver takes for them: a card's
driver calls are not in it. Prints one JSON object last, in microseconds per collective; exit 1 when the compiled tap
adds more than 25 us of wall-clock time in either mode.
"""

from __future__ import annotations

import os
import sys
import time
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist

from aorta.distributed.topology import process_group, read_topology
from aorta.instrument.instrumentation import Instrumentation
from aorta.instrument.native import build as native
from aorta.instrument.open_step import StepFacts
from aorta.records.clocks import read_clocks
from aorta.records.schema import InstrumentMode
from benchmarks import plans
from tests.simulated import load

MODES: Final[tuple[InstrumentMode, ...]] = ("dedicated", "observe")
TAPS: Final = ("compiled", "python")
TARGET_US = 25.0


def timed(tensor: torch.Tensor, calls: int) -> dict[str, float]:
    """Median nanoseconds of a call with its wait, on both clocks."""
    wall, cpu = [], []
    for _ in range(calls):
        begin, begin_cpu = time.perf_counter_ns(), time.thread_time_ns()
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        cpu.append(time.thread_time_ns() - begin_cpu)
        wall.append(time.perf_counter_ns() - begin)
    return {"wall": median(wall), "cpu": median(cpu)}


def blocks(instrument: Instrumentation, tensor: torch.Tensor, words: Any) -> list[dict[str, dict[str, float]]]:
    """Pairs of blocks, `off` and `on`, which first alternating."""
    pairs = []
    for number in range(words.pairs + 1):
        pair: dict[str, dict[str, float]] = {}
        for arm in ["off", "on"][:: 1 if number % 2 == 0 else -1]:
            torch.accelerator.synchronize()
            facts = StepFacts(0, number, number, 0.0, warmup=False)
            if arm == "on":
                with instrument.recorder.step(facts):
                    pair[arm] = timed(tensor, words.calls)
            else:
                with instrument.paused():
                    pair[arm] = timed(tensor, words.calls)
        pairs.append(pair)
    return pairs[1:]  # the first is for the caches


def worker(words: Any) -> dict[str, Any]:
    """The rank: every mode and tap."""
    from tests.simulated import device as simulated

    module, why_not = native.load()
    assert module is not None, why_not
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    simulated.lengths(operators=None, **dict.fromkeys(simulated.CLASSES, (0, 0.0)))
    simulated.collective_lengths(default=(0, 0.0))
    found = {}
    with process_group(read_topology(), device, 120):
        for mode in MODES:
            for tap in TAPS:
                with Instrumentation(
                    device, mode, 0, 1, read_clocks(), lambda _line: None, native=tap == "compiled"
                ) as instrument:
                    found[f"{mode}, {tap}"] = blocks(instrument, torch.ones(1, device=device), words)
                    instrument.recorder.finish()
    return found


def measure(words: Any) -> int:
    """One launch."""
    os.environ[load.VARIABLE] = "wall"
    load.for_children()
    told = plans.launch(
        "benchmarks.device_collective_cost", 1, "--pairs", str(words.pairs), "--calls", str(words.calls)
    )
    figures: dict[str, Any] = {}
    targets = {}
    for arm, pairs in told.items():
        added = {
            clock: plans.spread_us([pair["on"][clock] - pair["off"][clock] for pair in pairs])
            for clock in ("wall", "cpu")
        }
        figures[arm] = {"off_wall_us": median(pair["off"]["wall"] for pair in pairs) / 1e3, "added_us": added}
        if arm.endswith("compiled"):
            targets[f"{arm}: adds <= {TARGET_US:g} us"] = added["wall"]["median"] <= TARGET_US
    return plans.say("device_collective_cost", figures, targets)


def main() -> int:
    """Parse, launch, print."""
    parser = plans.arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=6 if "--quick" in sys.argv else 40)
    parser.add_argument("--calls", type=int, default=200)
    return plans.run(parser, measure, worker)


if __name__ == "__main__":
    sys.exit(main())
