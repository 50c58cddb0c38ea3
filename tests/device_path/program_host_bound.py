"""Two ranks train where launches and events cost the host time; what the record says beside the device's own truth.

Enters: a folder and runs as JSON. Leaves: `rank_<r>.json`: of each run its steps, each with what the record publishes
and what the device says. Run by `test_host_bound` on the runs of `RUNS`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import msgspec
import torch

from aorta.distributed.topology import Topology
from aorta.records.schema import Step
from tests.device_path.launch import by_rank
from tests.device_path.program_overlap import MATH, SHAPE, WARM_UP
from tests.device_path.witness import Truth, truth_of
from tests.loop import Loop
from tests.simulated import device as simulated

STRATEGIES, MODES = ("ddp", "fsdp1", "fsdp", "tp"), ("dedicated", "observe")
LAUNCHES_US = (0, 2, 5, 10, 20)
METRICS = ("overlap_ratio", "compute_ms", "comm_ms", "compute_comm_ms", "exposed_comm_ms", "compute_stall_ms")
TOLERANCE = 0.02
"""Of a ratio, as it is; of computation, of its own; of a stall, of the window; of other times, of communication."""
ROUNDING = 1e-4
"""Of bounds: events tell times in float32 milliseconds since one reference, to 15 ns where that is 0.2 s ago."""


@dataclass(frozen=True)
class Load:
    """What a step of a run meets; it may change within a run, behind a synchronisation.

    `math_ns`: length of the kernels that are mathematics of blocks. Others take no time, so that the computation is all
    that does on the computing stream.
    """

    launch_ns: int
    math_ns: int = 23_000
    contention: float = 1.0


@dataclass(frozen=True)
class Machine:
    """What does not change within a run: the costs of events and of submission (`tests.simulated.device.costs`)."""

    event_ns: int = 0
    event_on_device_ns: int = 0
    submission_ns: int = 0


@dataclass(frozen=True)
class Run:
    """One way to train, on one machine, with one step for each load.

    `by_kernels`: the loads of the first steps, which a calibration window covers; `by_marks`: those behind it.
    """

    strategy: str
    mode: str
    machine: Machine = Machine()
    by_kernels: tuple[Load, ...] = ()
    by_marks: tuple[Load, ...] = ()

    @classmethod
    def read(cls, run: dict[str, Any]) -> Run:
        return msgspec.convert(run, cls)


SLOW_HOSTS = tuple(Load(1_000 * launch_us) for launch_us in LAUNCHES_US)
OTHER_LOADS = tuple(Load(launch_ns, contention=1.3) for launch_ns in (0, 10_000))
MACHINES = (Machine(event_ns=1_000, event_on_device_ns=1_000), Machine(5_000, 5_000), Machine(submission_ns=8_000))
RUNS = (
    *(
        Run(strategy, mode, by_kernels=SLOW_HOSTS, by_marks=(*SLOW_HOSTS, *OTHER_LOADS))
        for strategy, mode in product(STRATEGIES, MODES)
    ),
    *(
        Run(strategy, mode, machine, by_marks=(*SLOW_HOSTS[::2], Load(10_000, math_ns=1_000)))
        for (strategy, mode), machine in product((("ddp", "dedicated"), ("fsdp", "observe")), MACHINES)
    ),
)


def main() -> None:
    """Every run, one after another."""
    runs = [Run.read(one) for one in json.loads(sys.argv[2])]
    by_rank(lambda *rank: [steps_of(run, *rank) for run in runs])


def steps_of(run: Run, topology: Topology, device: torch.device) -> list[dict[str, Any]]:
    """The steps of one run: the second one under each load, so that it begins as the steps behind it would."""
    simulated.defaults()
    begin(Load(0), run.machine)
    lines: list[Step] = []
    words = [*SHAPE, f"parallel={run.strategy}", f"instrument.mode={run.mode}"]
    if run.by_kernels:
        words += [f"telemetry.warmup_steps={WARM_UP}", f"instrument.calibration={2 * len(run.by_kernels)}"]
    loop = Loop(tuple(words), topology, device, lines.append)
    torch.accelerator.synchronize()
    simulated.reset()
    for _ in range(WARM_UP):
        loop.step()
    loads = [*run.by_kernels, *run.by_marks]
    for load in loads:
        torch.accelerator.synchronize()
        begin(load, run.machine)
        loop.step()
        loop.step()
    torch.accelerator.synchronize()
    simulated.contention(1.0)
    loop.finish()
    simulated.no_races()
    rows, waits, stream = simulated.timeline(device.index), simulated.waits(), torch.cuda.current_stream().stream_id
    seen = []
    for load, line in zip(loads, lines[WARM_UP + 1 :: 2], strict=True):
        window = (line.start_mono_ns, line.end_mono_ns)
        truth = truth_of(window, rows, waits, stream, device.index)
        seen.append({"load": asdict(load), "line": msgspec.to_builtins(line), "truth": _metrics(truth)})
    return seen


def _metrics(truth: Truth) -> dict[str, float]:
    """The device's own values of `METRICS`, and of what their tolerances are parts of."""
    lengths_ms = {name: length_ns / 1e6 for name, length_ns in truth.lengths_ns().items()}
    return {"overlap_ratio": truth.hidden_ns / truth.comm_ns, **lengths_ms}


def wrong(line: dict[str, Any], truth: dict[str, float]) -> list[str]:
    """Which metrics a step publishes wrongly: a number too far from the device's own, or bounds that do not hold it.

    Args:
        line: a step of the record.
    """
    found = []
    for name in METRICS:
        published, bounds = line["overlap"][name], line.get("bounds", {}).get(name)
        scale = {
            "overlap_ratio": 1.0,
            "compute_ms": truth["compute_ms"],
            "compute_stall_ms": line["overlap"]["window_ms"],
        }
        allowed = TOLERANCE * scale.get(name, truth["comm_ms"])
        if published is not None and bounds is not None:
            found.append(f"{name} is {published}, and has bounds {bounds}")
        elif published is not None and abs(published - truth[name]) > allowed:
            found.append(f"{name} is {published:.4f} for {truth[name]:.4f}")
        elif published is None and (bounds is None or "host-bound" not in line["reasons"][name]):
            found.append(f"{name} is null without bounds: {line['reasons'].get(name)}")
        elif bounds is not None and not bounds[0] - ROUNDING <= truth[name] <= bounds[1] + ROUNDING:
            found.append(f"{name} is between {bounds[0]:.4f} and {bounds[1]:.4f} for {truth[name]:.4f}")
    return found


def begin(load: Load, machine: Machine) -> None:
    """From now on launches and kernels take what they do under this load."""
    simulated.lengths(**dict.fromkeys(simulated.CLASSES, (0, 0.0)), operators=dict.fromkeys(MATH, (load.math_ns, 0.0)))
    simulated.collective_lengths(default=(90_000, 0.5))
    simulated.costs(launch_ns=load.launch_ns, **asdict(machine))
    simulated.contention(load.contention)


if __name__ == "__main__":
    main()
