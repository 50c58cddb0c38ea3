"""What a step pays for AORTA, and for which part of it: `python -m benchmarks.step_parts [--other CHECKOUT]`.

Regime: two gloo ranks and the engine's own step of the ranking workload, `cold` as in `instrument_cost` (its matrix
products empty the processor's caches between two calls of AORTA's), and `warm` at width 64, where the host does nothing
but launch. One launch has two parts.

Steps take turns, eight with the instrument and eight with it taken off and nothing recorded. Of these the last four
count: the others pay for the switch, too, which a run does not have.

    added   processor time of the training thread, with the instrument less without: all that a step pays, C++, evicted
            caches and torch's longer way round a module with hooks included. The median of the turns' differences, each
            of two medians, has a 95 % interval by order statistics.

Blocks of steps:

    own     AORTA's own time as it counts it itself (`aorta_ms` of the record), wall clock.
    passed  the same of steps that are passed over (`instrument.every`), in blocks between the others.
    elsewhere   processor time of the watchdog's process, which makes the lines of both ranks, a step of one rank.
    reading   processor time in which such a process makes and encodes the lines of a block (64 steps together), a step.

`--other`: launches of another checkout, with this file and its compiled part built, take turns with those of this one.

Prints one JSON object last: of rank 0, microseconds a step, medians with quartiles. Exit 1 when a target is missed:
median of `own` at most 100 us (ddp, cold), 40 (ddp, warm), 150 (fsdp, cold), 80 (fsdp, warm); `reading` 150; the upper
end of `added` 100 (ddp, warm).
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from math import inf
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
from aorta.documents.statistics import median_interval
from aorta.instrument.ring_lines import LentRecord
from aorta.instrument.sampling import Sampler
from aorta.recording import rank_record
from aorta.recording.rank_record import open_ring
from aorta.records.record_file import RecordWriter, stream
from aorta.records.ring_file import RingFile
from aorta.records.ring_record import uncollected
from aorta.records.ring_steps import MOST, RingSteps
from aorta.records.schema import Step
from benchmarks import plans
from benchmarks.instrument_cost import CPU, DROPPED, WORDS
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
TURNS = {"ddp.cold": 60, "ddp.warm": 500, "fsdp.cold": 60, "fsdp.warm": 200}
"""With the instrument, and as many without: the median difference is then known to some tens of microseconds of ddp,
warm, to a hundred of fsdp, warm, and to several hundred of large layers, whose steps vary by more."""
TURN, COUNTED = 8, 4
"""Steps of a turn, and how many of them count."""
NEVER = 1 << 40
"""One step of so many is drawn."""
TARGETS_US = {"ddp.cold": 100, "ddp.warm": 40, "fsdp.cold": 150, "fsdp.warm": 80}
READING_US = 150
ADDED_US = {"ddp.warm": 100}
FIGURES = ("added", "off", "own", "passed", "elsewhere", "reading")


def worker(words: Any) -> dict[str, list[Any]]:
    """One rank: nanoseconds a step, by figure, of each turn or of each block."""
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
            lent = LentRecord(writer, 100, nullcontext())
            loop = Loop((*chosen, *words.more), topology, CPU, writer.write, ring=ring, elsewhere=lent)
            with record.open("ab") as file:
                clock = ring.facts.anchor
                header = builders.header(topology.rank, topology.world_size, clock=clock)
                file.write(msgspec.json.encode(header) + b"\n")
            recorder = loop.instrument.recorder
            for block in range(words.blocks + 1):
                for figure, sampler in (("own", None), ("passed", Sampler(NEVER, 0))):
                    recorder.sampler = sampler
                    for _ in range(DROPPED):
                        loop.step()
                    recorder.catch_up()
                    begun_ns, first_row, first_step = line_maker_ns(), ring.count, loop.steps_done
                    for _ in range(MOST):
                        loop.step()
                    recorder.catch_up()
                    if block == 0:  # for the caches
                        continue
                    counted.append((figure, first_step))
                    if figure == "own":
                        answer["reading"].append(reading_ns(ring.path, first_row))
                        answer["elsewhere"].append((line_maker_ns() - begun_ns) / MOST / topology.world_size)
            recorder.sampler = None
            for turn in range(words.turns):
                spent: dict[str, float] = {}
                for arm in ("on", "off") if turn % 2 == 0 else ("off", "on"):
                    with loop.instrument.paused() if arm == "off" else nullcontext():
                        step = loop.unrecorded if arm == "off" else loop.step
                        steps_ns = []
                        for _ in range(TURN):
                            began_ns = time.thread_time_ns()
                            step()
                            steps_ns.append(time.thread_time_ns() - began_ns)
                    spent[arm] = median(steps_ns[-COUNTED:])
                answer["added"].append(spent["on"] - spent["off"])
                answer["off"].append(spent["off"])
            loop.finish()
            writer.close()
        lines = {line.global_step: line for line in stream(record, []) if isinstance(line, Step)}
        for figure, first_step in counted:
            steps = range(first_step, first_step + MOST)
            answer[figure].append(median((lines[number].overlap.get("aorta_ms") or 0.0) * 1e6 for number in steps))
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
    return sum(1e9 * sum(psutil.Process(process.pid).cpu_times()[:2]) for process in rank_record._watchdogs)


def measure(words: Any) -> int:
    """Launches of every case and checkout, in turns."""
    checkouts = {"this": ROOT} | ({} if words.other is None else {"other": words.other.resolve()})
    seen: dict[tuple[str, str], dict[str, list[Any]]] = {}
    fewer = 10 if words.quick else 1
    for turn in range(words.launches):
        for case in TARGETS_US:
            strategy, regime = case.split(".")
            if strategy not in words.strategies or regime not in words.regimes:
                continue
            said = ("--strategy", strategy, "--blocks", str(words.blocks), "--turns", str(TURNS[case] // fewer))
            for name, checkout in sorted(checkouts.items(), reverse=turn % 2 == 0):
                blocks = plans.launch("benchmarks.step_parts", 2, *said, "--more", *REGIMES[regime], checkout=checkout)
                kept = seen.setdefault((name, case), {figure: [] for figure in blocks})
                for figure, values in blocks.items():
                    kept[figure] += values
    figures: dict[str, Any] = {"interceptor": plans.interceptor(words)}
    targets = {}
    for (name, case), blocks in seen.items():
        shown = {figure: plans.spread_us(values) for figure, values in blocks.items()}
        shown["added"] |= added_interval_us(blocks["added"])
        figures.setdefault(f"{name}_us", {})[case] = shown
        if name == "this":
            targets[f"{case} own <= {TARGETS_US[case]} us"] = shown["own"]["median"] <= TARGETS_US[case]
            targets[f"{case} reading <= {READING_US} us"] = shown["reading"]["median"] <= READING_US
            if case in ADDED_US:
                targets[f"{case} added <= {ADDED_US[case]} us"] = shown["added"].get("high", inf) <= ADDED_US[case]
    return plans.say("step_parts", figures, targets)


def added_interval_us(added_ns: Sequence[float]) -> dict[str, float]:
    """The 95 % interval of the median difference; nothing of too few turns."""
    interval = median_interval(np.array(added_ns) / 1e3, np.arange(len(added_ns)))
    return {} if interval is None else {"low": interval[0], "high": interval[1]}


def main() -> int:
    """Parse, launch, print."""
    parser = plans.arguments(__doc__)
    parser.add_argument("--blocks", type=int, default=2 if "--quick" in sys.argv else 6, help="(default: %(default)s)")
    parser.add_argument("--turns", type=int)
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
