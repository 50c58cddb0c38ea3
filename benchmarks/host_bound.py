"""What is published where the host sets the pace of a device: `python -m benchmarks.host_bound`.

Regime: the simulated device in virtual time (`tests/simulated`; build it first), two ranks, every strategy and mode of
`program_host_bound`. A launch costs the host 0 to 20 us, kernels of a block take 23 us. `device` is the overlap ratio
of the device's own timeline, `marks` what the record publishes of the same step (a number, or at least and at most),
`kernels` that of a step of a calibration. Times are virtual, so the same figures come out on any machine.

`reading_us` is not virtual: processor time that the training thread takes for the line of a step (`line`), and for the
part of it that decides what is certain (`_certain`), on this machine, at launches of no cost and of 10 us. Of
`calibration`, `start_and_stop_ms` is wall-clock time of torch.profiler on this machine, which has no CUPTI.

Prints a table, and one JSON object last; exit 1 where a number is more than 0.02 from the device's own, a bound does
not hold it, or a step measured by kernels is off.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from aorta.distributed.process_group import process_group
from aorta.distributed.topology import read_topology
from aorta.instrument.step_builder import StepBuilder
from benchmarks import plans
from tests.device_path.launch import on_devices
from tests.device_path.program_host_bound import RUNS, Load, Machine, begin, wrong
from tests.device_path.program_overlap import SHAPE
from tests.loop import Loop
from tests.simulated import load

PLAIN = [run for run in RUNS if run.machine == Machine()]
READING_NS = (0, 10_000)
STEPS = 40


def table(runs: list[Any], folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """A row for each strategy, mode and cost of a launch, of rank 0; and what is wrong on any rank."""
    by_rank = on_devices("tests.device_path.program_host_bound", folder, json.dumps([asdict(run) for run in runs]))
    rows, failed = [], []
    for number, run in enumerate(runs):
        window = len(run.by_kernels)
        for rank, steps in enumerate(each[number] for each in by_rank):
            for place, step in enumerate(steps):
                kind = "kernels" if place < window else "marks"
                found = wrong(step["line"], step["truth"])
                if kind == "kernels" and step["line"].get("measured_by") != kind:
                    found.append("not measured by kernels")
                failed += [f"{run.strategy}, {run.mode}, rank {rank}, {kind}, {step['load']}: {why}" for why in found]
        mine = by_rank[0][number]
        for at, load_ in enumerate(run.by_kernels):
            kernels, marks = mine[at], mine[window + at]
            assert kernels["load"] == marks["load"] == asdict(load_)
            line = marks["line"]
            rows.append(
                {
                    "strategy": run.strategy,
                    "mode": run.mode,
                    "launch_us": load_.launch_ns / 1e3,
                    "device": marks["truth"]["overlap_ratio"],
                    "marks": line["overlap"]["overlap_ratio"],
                    "bounds": line.get("bounds", {}).get("overlap_ratio"),
                    "kernels": kernels["line"]["overlap"]["overlap_ratio"],
                    "host_lead_ms": line["overlap"]["host_lead_ms"],
                }
            )
    return rows, failed


def calibrations(folder: Path) -> dict[str, Any]:
    """What a window of a calibration costs."""
    told = on_devices("tests.device_path.program_calibration", folder)
    found = [rank["alone"]["calibrations"][0] for rank in told]
    return {
        "steps": found[0]["steps"],
        "step_before_it": 1,
        "window_step_over_other": found[0]["window_step_ms"] / found[0]["other_step_ms"],
        "start_and_stop_ms": [each["setup_ms"] for each in found],
    }


def worker(_words: Any) -> dict[str, Any]:
    """A rank: processor time of reading a step's marks, in microseconds a step."""
    topology = read_topology()
    device = torch.device("cuda", topology.local_rank)
    torch.cuda.set_device(device)
    spent: dict[str, list[int]] = {}
    for name in ("line", "_certain"):
        setattr(StepBuilder, name, timed(getattr(StepBuilder, name), spent.setdefault(name, [])))
    found = {}
    with process_group(topology, device, 300):
        for launch_ns in READING_NS:
            begin(Load(launch_ns), Machine())
            loop = Loop((*SHAPE, "parallel=ddp"), topology, device, lambda _line: None)
            for _ in range(STEPS):
                loop.step()
            loop.finish()
            steps = {name: times[len(times) // 2 :] for name, times in spent.items()}
            found[f"{launch_ns / 1e3:g} us"] = {name: median(times) / 1e3 for name, times in steps.items()}
            for times in spent.values():
                times.clear()
    return found


def timed(function: Callable[..., Any], into: list[int]) -> Callable[..., Any]:
    """The same function, which notes the nanoseconds of its thread."""

    def call(*args: Any, **named: Any) -> Any:
        begun_ns = time.thread_time_ns()
        try:
            return function(*args, **named)
        finally:
            into.append(time.thread_time_ns() - begun_ns)

    return call


def measure(words: Any) -> int:
    """One launch for the table, one for calibrations, one for reading."""
    os.environ[load.VARIABLE] = "virtual"
    load.for_children()
    with tempfile.TemporaryDirectory() as folder:
        rows, failed = table(PLAIN[:1] if words.quick else PLAIN, Path(folder, "table"))
        calibration = calibrations(Path(folder, "calibration"))
    reading_us = plans.launch("benchmarks.host_bound", 2)
    show(rows)
    figures = {"rows": rows, "wrong": failed, "calibration": calibration, "reading_us": reading_us}
    return plans.say("host_bound", figures, {"right, or bounds that hold": not failed})


def show(rows: list[dict[str, Any]]) -> None:
    """The table as docs/dev/measurements.md has it."""
    lines = ["| strategy, mode | launch | device | marks | kernels | lead |", "|---|---|---|---|---|---|"]
    for row in rows:
        ends = row["bounds"]
        marks = f"{row['marks']:.3f}" if ends is None else f"{ends[0]:.3f} to at most {ends[1]:.3f}"
        where = f"{row['strategy']}, `{row['mode']}`"
        lines.append(
            f"| {where} | {row['launch_us']:g} us | {row['device']:.3f} | {marks} | {row['kernels']:.3f} "
            f"| {row['host_lead_ms']:.3f} ms |"
        )
    sys.stdout.write("\n".join(lines) + "\n")


def main() -> int:
    """Parse, launch, print."""
    return plans.run(plans.arguments(__doc__), measure, worker)


if __name__ == "__main__":
    sys.exit(main())
