"""Where the instrument's processor time in a step goes: `python -m benchmarks.step_parts`.

Regime: that of `instrument_cost` (two gloo ranks, the engine's own step of the ranking workload, cold caches). A part
is the training thread's own processor time (`time.thread_time_ns`) inside the functions named in `PARTS`, as the mean
over the steps of rank 0: steps are read several at once (`step_recorder.TOGETHER`), so a median would leave that out.
What runs in C++ between collectives and in the backward pass cannot be timed from here; `--python` is its upper bound.
A part may hold others: `end` is the end of a step and what is read there, `line`, `write` and `handed_over` are in it.
`progress` is what the watchdog costs the rank, in other parts or between them: all that is noted in the progress file
of a run with a watchdog; `progress_floor` is what looking at the clock as often costs.

Prints one JSON object last, in microseconds a step; exit 1 when a target is missed with the compiled part: `all`, the
parts that hold no other, at most 600 us for ddp and for fsdp, and `progress` above its floor at most 10 us.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import aorta.instrument
from aorta.config.schema import Watchdog
from aorta.distributed.output_folder import RunFolder
from aorta.distributed.topology import process_group, read_topology
from aorta.instrument.compute_ranges import BlockRanges
from aorta.instrument.open_step import OpenStep, Scalar
from aorta.instrument.step_builder import StepBuilder
from aorta.instrument.step_recorder import TOGETHER, StepRecorder, _Bracket
from aorta.records.progress_file import Progress
from aorta.records.record_file import RecordWriter
from aorta.runner.watchdog import noted_progress
from benchmarks import plans
from benchmarks.instrument_cost import CPU, WORDS
from tests.loop import Loop

PARTS: tuple[tuple[str, type, str], ...] = (
    ("begin", StepRecorder, "begin"),
    ("end", StepRecorder, "end"),
    ("line", StepBuilder, "line"),
    ("write", RecordWriter, "write"),
    ("handed_over", OpenStep, "add_native_events"),
    ("aux", _Bracket, "__enter__"),
    ("aux", _Bracket, "__exit__"),
    ("scalars", Scalar, "__init__"),
    ("scalars", StepRecorder, "note"),
    ("backward_ranges", BlockRanges, "_open_backward"),
    ("backward_end", BlockRanges, "_nodes_ran"),
)
NOTES = ("begin_step", "end_step", "enter", "group", "issue", "completed")
"""How the rank notes progress: the part `progress`; `progress_floor` is the clock alone, looked at as often."""
HOOKS = ("register_forward_pre_hook", "register_forward_hook")
"""Through which the instrument comes to modules: the part `forward_hooks`."""
ALONE = ("begin", "end", "forward_hooks", "backward_ranges", "backward_end", "aux", "scalars")
"""Parts that are in no other."""
TARGET_US = 600
PROGRESS_TARGET_US = 10


class Parts:
    """Processor nanoseconds of each part since `take`."""

    def __init__(self) -> None:
        self._spent: dict[str, int] = {}
        self._within_note = False

    def take(self) -> dict[str, int]:
        spent, self._spent = self._spent, {}
        return spent

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self._add(part, time.thread_time_ns() - begin)

        return call

    def _add(self, part: str, spent_ns: int) -> None:
        self._spent[part] = self._spent.get(part, 0) + spent_ns

    def watch_notes(self, progress: Progress) -> None:
        """What is noted in this rank's progress file, from now on; compiled functions too, once they are there."""
        for name in NOTES:
            setattr(progress, name, self._noting(getattr(progress, name)))

    def watch(self) -> None:
        """In this process, from now on."""
        for part, owner, name in PARTS:
            setattr(owner, name, self.timed(part, getattr(owner, name)))
        for name in HOOKS:
            setattr(torch.nn.Module, name, self._registering(getattr(torch.nn.Module, name)))

    def _noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        timed = self.timed("progress", function)

        def call(*args: Any) -> Any:
            if self._within_note:  # one note by another: it is timed with that one
                return function(*args)
            self._within_note = True
            try:
                begin = time.thread_time_ns()
                self._add("progress_floor", time.thread_time_ns() - begin)
                return timed(*args)
            finally:
                self._within_note = False

        return call

    def _registering(self, register: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: torch.nn.Module, hook: Callable[..., Any], **options: Any) -> Any:
            ours = hook.__module__.startswith(aorta.instrument.__name__)
            return register(module, self.timed("forward_hooks", hook) if ours else hook, **options)

        return call


def worker(words: Any) -> dict[str, float]:
    """One rank: part -> microseconds a step."""
    parts, topology = Parts(), read_topology()
    if not words.notes:
        parts.watch()
    with (
        process_group(topology, CPU, 300),
        tempfile.TemporaryDirectory() as name,
        noted_progress(
            folder := RunFolder(Path(name), "step_parts", 0), topology, 6, Watchdog(timeout_s=0), completed_late=False
        ) as progress,
    ):
        writer = RecordWriter(folder.record(topology.rank), topology.rank)
        chosen = [word.format(strategy=words.strategy) for word in WORDS] + [f"instrument.native={not words.python}"]
        loop = Loop((*chosen,), topology, CPU, writer.write, progress=progress)
        if words.notes:
            parts.watch_notes(progress)
        for _ in range(6):
            loop.step()
        loop.instrument.recorder.catch_up()
        parts.take()
        for _ in range(words.steps):
            loop.step()
        spent = parts.take()
        loop.finish()
        writer.close()
    return {part: total_ns / words.steps / 1e3 for part, total_ns in sorted(spent.items())}


def measure(words: Any) -> int:
    """Two launches for each strategy: timing notes in the first would add to the parts that they are in."""
    figures: dict[str, Any] = {"interceptor": plans.interceptor(words)}
    targets: dict[str, bool] = {}
    for strategy in ("ddp", "fsdp"):
        said = ("--strategy", strategy, "--steps", str(words.steps), *plans.tap_words(words))
        found = plans.launch("benchmarks.step_parts", 2, *said)
        notes = plans.launch("benchmarks.step_parts", 2, *said, "--notes")
        figures[f"{strategy}_us"] = found | notes | {"all": sum(found.get(part, 0) for part in ALONE)}
        if not words.python:
            targets[f"{strategy} all <= {TARGET_US} us"] = figures[f"{strategy}_us"]["all"] <= TARGET_US
            progress = notes["progress"] - notes["progress_floor"]
            targets[f"{strategy} progress <= {PROGRESS_TARGET_US} us"] = progress <= PROGRESS_TARGET_US
    return plans.say("step_parts", figures, targets)


def main() -> int:
    """Parse, launch, print."""
    parser = plans.arguments(__doc__)
    parser.add_argument("--steps", type=int, default=(2 if "--quick" in sys.argv else 6) * TOGETHER)
    parser.add_argument("--strategy")
    parser.add_argument("--notes", action="store_true", help=argparse.SUPPRESS)
    plans.choose_tap(parser)
    return plans.run(parser, measure, worker)


if __name__ == "__main__":
    sys.exit(main())
