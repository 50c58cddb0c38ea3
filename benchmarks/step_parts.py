"""What a step pays for AORTA, and for which part of it: `python -m benchmarks.step_parts [--other CHECKOUT]`.

Regime: two gloo ranks and the engine's own step of the ranking workload, `cold` as in `instrument_cost` (its matrix
products empty the processor's caches between two calls of AORTA's), and `warm` at width 64, where the host does nothing
but launch. In one launch blocks of steps take turns, on off, off on, ...: recorded with everything, and with the
instrument taken off and nothing recorded.

    added   processor time of the training thread, an `on` block over the `off` block beside it: all that it pays, C++,
            evicted caches and torch's longer way round a module with hooks included. A block's figure is the median of
            its steps and its share of `lines`.
    lines   processor time of the training thread in which lines are made of steps, encoded and written, a step.
    elsewhere   processor time of the watchdog's process, which makes the lines of both ranks, a step of one rank.
    reading   processor time in which such a process makes and encodes the lines of a block (64 steps together), a step.
    own     AORTA's own time as it counts it itself (`aorta_ms` of the record) in the same `on` blocks, wall clock.
    passed  the same of steps that are passed over (`instrument.every`), in blocks between the others.

`--other`: launches of another checkout, with this file and its compiled part built, take turns with those of this one.

Prints one JSON object last: of rank 0, microseconds a step, medians over blocks with quartiles. Exit 1 when a target is
missed: median of `added` at most 100 us (ddp, cold), 40 (ddp, warm), 150 (fsdp, cold), 80 (fsdp, warm); `reading` 150.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import psutil
import torch.distributed as dist

from aorta.config.schema import Watchdog
from aorta.distributed.output_folder import RunFolder
from aorta.distributed.topology import process_group, read_topology
from aorta.instrument.sampling import Sampler
from aorta.recording import rank_progress
from aorta.recording.rank_progress import open_ring
from aorta.recording.rank_record import LentRecord
from aorta.records.record_file import RecordWriter, stream
from aorta.records.ring_file import RingFile
from aorta.records.ring_record import uncollected
from aorta.records.ring_steps import MOST, RingSteps
from aorta.records.schema import Step
from benchmarks import plans
from benchmarks.instrument_cost import CPU, DROPPED, WORDS, Reading
from tests.analysis import builders
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
NEVER = 1 << 40
"""One step of so many is drawn."""
TARGETS_US = {"ddp.cold": 100, "ddp.warm": 40, "fsdp.cold": 150, "fsdp.warm": 80}
READING_US = 150
FIGURES = ("added", "off", "lines", "elsewhere", "reading", "own", "passed")


def worker(words: Any) -> dict[str, list[Any]]:
    """One rank: nanoseconds a step of each pair of blocks, by figure."""
    topology = read_topology()
    chosen = [word.format(strategy=words.strategy) for word in WORDS]
    chosen = [word for word in chosen if word.split("=")[0] not in {more.split("=")[0] for more in words.more}]
    counted: list[tuple[str, int]] = []
    answer: dict[str, list[Any]] = {figure: [] for figure in FIGURES}
    with process_group(topology, CPU, 300), shared_folder() as path:
        folder = RunFolder(path, "step_parts", 0)
        record = folder.record(topology.rank)
        with open_ring(folder, topology, 0, Watchdog(timeout_s=600)) as ring:
            writer = RecordWriter(record, topology.rank)
            lent = LentRecord(writer, 100, None)
            loop = Loop((*chosen, *words.more), topology, CPU, writer.write, ring=ring, elsewhere=lent)
            with record.open("ab") as file:
                clock = ring.facts.anchor
                header = builders.header(topology.rank, topology.world_size, clock=clock)
                file.write(msgspec.json.encode(header) + b"\n")
            recorder = loop.instrument.recorder
            reading = Reading(recorder, lambda: np.array(time.thread_time_ns()))
            for half in range(words.halves + 1):
                spent: dict[str, float] = {}
                for arm in ("on", "passed", "off") if half % 2 == 0 else ("off", "passed", "on"):
                    if arm == "off":
                        with loop.instrument.paused():
                            taken = [int(reading.outside(loop.unrecorded)) for _ in range(DROPPED + 8)]
                        spent[arm] = median(taken[DROPPED:])
                        continue
                    recorder.sampler = Sampler(NEVER, 0) if arm == "passed" else None
                    for _ in range(DROPPED):
                        loop.step()
                    if half:  # the first is for the caches
                        counted.append(("passed" if arm == "passed" else "own", loop.steps_done))
                    if arm == "passed":
                        for _ in range(MOST):
                            loop.step()
                        continue
                    recorder.catch_up()
                    read, begun, first = int(reading.spent), line_maker_ns(), ring.count
                    taken = [int(reading.outside(loop.step)) for _ in range(MOST)]
                    recorder.catch_up()
                    spent["lines"] = (int(reading.spent) - read) / MOST
                    spent[arm] = median(taken) + spent["lines"]
                    spent["reading"] = reading_ns(ring.path, first)
                    spent["elsewhere"] = (line_maker_ns() - begun) / MOST / topology.world_size
                if half:
                    answer["added"].append(spent["on"] - spent["off"])
                    answer["off"].append(spent["off"])
                    answer["lines"].append(spent["lines"])
                    answer["elsewhere"].append(spent["elsewhere"])
                    answer["reading"].append(spent["reading"])
            loop.finish()
            writer.close()
        lines = {line.global_step: line for line in stream(record, []) if isinstance(line, Step)}
        for figure, first in counted:
            block = range(first, first + MOST)
            answer[figure].append(median((lines[number].overlap.get("aorta_ms") or 0.0) * 1e6 for number in block))
    return answer


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder of all ranks for the length of a `with` block."""
    said = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(said)
    yield Path(said[0])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(said[0])


def reading_ns(path: Path | None, first: int) -> float:
    """Processor time a step in which lines are made and encoded of the steps from a row of a ring on."""
    assert path is not None  # it is a file
    steps, encoder = RingSteps(RingFile.open(path)), msgspec.json.Encoder()
    steps.next_row = first
    with uncollected():
        began_ns = time.thread_time_ns()
        lines = steps.take()
        for line in lines:
            encoder.encode(line)
        return (time.thread_time_ns() - began_ns) / len(lines)


def line_maker_ns() -> float:
    """Processor time of the watchdog that makes the lines; 0 on a rank that has not started it."""
    return sum(1e9 * sum(psutil.Process(process.pid).cpu_times()[:2]) for process in rank_progress._started)


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
            targets[f"{case} reading <= {READING_US} us"] = shown["reading"]["median"] <= READING_US
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
