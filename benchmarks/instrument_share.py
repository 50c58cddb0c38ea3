"""What the instrumentation costs a step, to a fifth of a per cent: `python -m benchmarks.instrument_share`.

Regime: that of `instrument_cost` (two gloo ranks, the engine's own step of the ranking workload, steps of 100 ms or
more), but what is compared is what both ranks' processes spent on a step, of all their threads: instructions where the
kernel counts them, and processor time. Neither sees who else has the cores; processor time does see who else fills
caches and shares a physical core, so it is compared between neighbours. Inside one launch two arms take turns:

    off on off'   off on off'  ...      off: paused, and no recorder; on: everything, the record written to a file

in blocks of three steps, of which the first is dropped (caches after the change). What is added is an `on` block less
the mean of its neighbours, so that drift cancels; the figure is the trimmed mean of all (a fifth at either end), with
the standard error of a bootstrap over them, over what a step spends. off' - off, its order turned over every other
time, is the A/A. Steps are read several at once (`step_recorder.TOGETHER`), which would be in one block of three:
reading and writing are counted where they happen, left out of their block, and added by the step.

`--batch-size 4` is for a machine that is never quiet. What the instrument adds to a step depends on blocks, parameters
and collectives, which stay the same; the computation, whose noise hides it, is a quarter. The ratio is then to the step
of the regime above, run in the same launch. What is added is a fifth to a third less there, as known parts are
(`step_parts`), since less computation leaves more in the caches: the ratio is a lower bound.

On a CPU `observe` and `dedicated` are the same code (`Instrumentation` makes the same interceptor for both), so one is
run unless `--modes` says otherwise.

Prints one JSON object last; exit 1 when a ratio is above 1.01, or its standard error above 0.002: then the machine was
too busy for the figure to mean anything. Both are asked of instructions where they are counted, else of processor time.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from aorta.distributed.process_group import process_group
from aorta.distributed.topology import read_topology
from aorta.instrument.step_recorder import TOGETHER
from aorta.records.writer import RecordWriter
from benchmarks import plans
from benchmarks.counters import Counters
from benchmarks.instrument_cost import CPU, WORDS
from benchmarks.reading import Reading
from tests.loop import Loop

MEASURED = 2
"""Steps of a block, behind one that is dropped."""
TRIMMED = 0.2
WHOLE = 16
"""Steps whose median is the step of the regime."""
BATCH_SIZE = 32
"""That of `WORDS`."""
WHAT = ("cpu_ns", "instructions")
RATIO, ERROR = 1.01, 0.002


def worker(words: Any) -> dict[str, Any]:
    """One rank of one launch: what both ranks spend on a step of the regime, on one of each block, on reading one."""
    counters, topology = Counters(), read_topology()
    with process_group(topology, CPU, 300), tempfile.TemporaryDirectory() as folder:
        writer = RecordWriter(Path(folder) / "record.jsonl", topology.rank)
        chosen = [word.format(strategy=words.strategy) for word in WORDS]
        chosen += [f"instrument.mode={words.mode}", f"instrument.native={not words.python}"]
        loop = Loop((*chosen,), topology, CPU, writer.write)
        whole = _whole_step(loop, counters)
        if words.batch_size != BATCH_SIZE:
            loop.instrument.close()
            loop = Loop((*chosen, f"training.batch_size={words.batch_size}"), topology, CPU, writer.write)
        # In a run that is never paused that many are read at once.
        reading = Reading(loop.instrument.recorder, lambda: np.array(counters.read()), least=TOGETHER)
        for _ in range(2 * TOGETHER):
            loop.step()
        before_all, begun, triples = reading.spent, time.monotonic(), []
        while _both(time.monotonic() - begun < words.seconds):
            with loop.instrument.paused():
                before = _block(reading, loop.unrecorded)
            between = _block(reading, loop.step)
            with loop.instrument.paused():
                after = _block(reading, loop.unrecorded)
            triples.append([before, between, after])
        figures = [[_of_both(block) for block in triple] for triple in triples]
        of_reading = _of_both((reading.spent - before_all) / (len(triples) * (1 + MEASURED)))
        loop.finish()
        writer.close()
    return {"whole": whole, "triples": figures, "reading": of_reading, "why_not": counters.why_not}


def _whole_step(loop: Loop, counters: Counters) -> list[float]:
    """The median step without the instrument."""
    with loop.instrument.paused():
        steps = []
        for _ in range(4 + WHOLE):
            before = np.array(counters.read())
            loop.unrecorded()
            steps.append(_of_both(np.array(counters.read()) - before))
    return [float(figure) for figure in np.median(steps[4:], axis=0)]


def _block(reading: Reading, step: Callable[[], None]) -> Any:
    step()
    return sum(reading.outside(step) for _ in range(MEASURED)) / MEASURED


def _of_both(figures: Any) -> list[float]:
    total = torch.tensor(figures, dtype=torch.float64)
    dist.all_reduce(total)
    return [float(figure) for figure in total]


def _both(goes_on: bool) -> bool:
    return min(_of_both([float(goes_on)])) == dist.get_world_size()


def trimmed_mean(figures: Any, seed: int = 0) -> tuple[float, float]:
    """Mean without the fifths at either end, and its standard error, by a bootstrap."""

    def inner(drawn: Any) -> Any:
        cut = int(TRIMMED * drawn.shape[-1])
        return np.sort(drawn, axis=-1)[..., cut : drawn.shape[-1] - cut].mean(axis=-1)

    drawn = np.random.default_rng(seed).choice(figures, size=(plans.RESAMPLES, len(figures)))
    return float(inner(figures)), float(inner(drawn).std())


def compare(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """What was found of one case, by what was counted; null where it was not."""
    triples = np.array([triple for answer in answers for triple in answer["triples"]])  # triple, block, what
    reading, whole = (np.mean([answer[name] for answer in answers], axis=0) for name in ("reading", "whole"))
    figures: dict[str, Any] = {"triples": len(triples)}
    for index, what in enumerate(WHAT):
        off, on, again = triples[:, :, index].T
        if (off <= 0).any():
            figures[what] = None
            continue
        step, read = float(whole[index]), float(reading[index])
        added, error = trimmed_mean(on - (off + again) / 2)
        same, same_error = trimmed_mean(np.where(np.arange(len(off)) % 2 == 0, again - off, off - again))
        figures[what] = {
            "ratio": 1 + (added + read) / step,
            "standard_error": error / step,
            "aa": {"ratio": 1 + same / step, "standard_error": same_error / step},
            "added_by_rank": (added + read) / 2,
            "of_that_reading": read / 2,
            "step_by_rank": step / 2,
            "measured_step_by_rank": float(np.median(off)) / 2,
        }
    return figures


def measure(words: Any) -> int:
    """Launches, interleaved: cases take turns, so that a busy spell hits them alike."""
    plan = [(strategy, mode) for strategy in words.strategies for mode in words.modes]
    found: dict[tuple[str, str], list[dict[str, Any]]] = {case: [] for case in plan}
    for turn in range(words.launches):
        for strategy, mode in plan if turn % 2 == 0 else plan[::-1]:
            said = ("--strategy", strategy, "--mode", mode, *plans.tap_words(words))
            said += ("--seconds", str(words.seconds), "--batch-size", str(words.batch_size))
            found[strategy, mode].append(plans.launch("benchmarks.instrument_share", 2, *said))
    figures: dict[str, Any] = {"interceptor": plans.interceptor(words)}
    targets = {}
    for (strategy, mode), answers in found.items():
        case = f"{strategy}.{mode}"
        figures[case] = compare(answers)
        figures["instructions"] = "counted" if figures[case]["instructions"] else answers[0]["why_not"]
        judged = figures[case]["instructions"] or figures[case]["cpu_ns"]
        targets[f"{case} ratio <= {RATIO}"] = judged["ratio"] <= RATIO
        targets[f"{case} standard error <= {ERROR}"] = judged["standard_error"] <= ERROR
    return plans.say("instrument_share", figures, targets)


def main() -> int:
    """Parse, launch, print."""
    parser = plans.arguments(__doc__)
    quick = "--quick" in sys.argv
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp"])
    parser.add_argument("--modes", nargs="+", default=["dedicated"])
    parser.add_argument("--launches", type=int, default=1 if quick else 2)
    parser.add_argument("--seconds", type=float, default=15 if quick else 105, help="of a launch's steps")
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE)
    parser.add_argument("--strategy")
    parser.add_argument("--mode")
    plans.choose_tap(parser)
    return plans.run(parser, measure, worker)


if __name__ == "__main__":
    sys.exit(main())
