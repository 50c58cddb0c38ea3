"""Where the host sets the pace, the record publishes the device's own numbers, or bounds that hold them.

Known by construction: the witness reads the simulated device's own timeline, in virtual time. Every launch costs the
host 0 to 20 us, events cost host and stream up to 5 us, kernels are slower beside collectives, and a kernel is seen by
the device some time after its launch (`RUNS`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from aorta.distributed.topology import Topology
from aorta.records.schema import Step
from tests.device_path.launch import on_devices
from tests.device_path.trainings import MATH, SHAPE, WARM_UP
from tests.device_path.witness import Truth, truth_of
from tests.loop import Loop
from tests.simulated import device as simulated
from tests.simulated.programs import needs_device

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device, pytest.mark.thorough]
STRATEGIES, MODES = ("ddp", "fsdp", "tp"), ("dedicated", "observe")
LAUNCHES_US = (0, 5, 20)
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


SLOW_HOSTS = tuple(Load(1_000 * launch_us) for launch_us in LAUNCHES_US)
OTHER_LOADS = tuple(Load(launch_ns, contention=1.3) for launch_ns in (0, 10_000))
MACHINES = (Machine(event_ns=1_000, event_on_device_ns=1_000), Machine(5_000, 5_000), Machine(submission_ns=8_000))
RUNS = (
    *(
        Run(strategy, mode, by_kernels=SLOW_HOSTS, by_marks=(*SLOW_HOSTS, *OTHER_LOADS))
        for strategy, mode in product(STRATEGIES, MODES)
    ),
    *(
        Run(strategy, mode, machine, by_marks=(*SLOW_HOSTS, Load(10_000, math_ns=1_000)))
        for (strategy, mode), machine in product((("ddp", "dedicated"), ("fsdp", "observe")), MACHINES)
    ),
)


def every_run(topology: Topology, device: torch.device) -> list[list[dict[str, Any]]]:
    """On a rank, one after another."""
    return [steps_of(run, topology, device) for run in RUNS]


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


Steps = list[dict[str, Any]]


def _name(run: Run) -> str:
    costs = "".join(f"-{name.removesuffix('_ns')}{ns // 1000}" for name, ns in asdict(run.machine).items() if ns)
    return f"{run.strategy}-{run.mode}{costs}"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Steps]]:
    """Of each run the steps of each rank; all in one launch."""
    by_rank = on_devices(every_run, Path(tmp_path_factory.mktemp("host_bound")))
    return {_name(run): [steps[number] for steps in by_rank] for number, run in enumerate(RUNS)}


of_every_run = pytest.mark.parametrize("run", RUNS, ids=_name)
of_no_cost = pytest.mark.parametrize("run", [run for run in RUNS if run.machine == Machine()], ids=_name)


def by_marks(seen: dict[str, list[Steps]], run: Run) -> Steps:
    """The steps behind the calibration window, of both ranks."""
    return [step for steps in seen[_name(run)] for step in steps[len(run.by_kernels) :]]


def by_kernels(seen: dict[str, list[Steps]], run: Run) -> Steps:
    return [step for steps in seen[_name(run)] for step in steps[: len(run.by_kernels)]]


@of_every_run
def test_a_number_is_the_devices_own_or_a_bound_that_holds_it(seen: dict[str, list[Steps]], run: Run) -> None:
    found = [(step["load"], one) for step in by_marks(seen, run) for one in wrong(step["line"], step["truth"])]
    assert found == []


@of_no_cost
def test_nothing_is_left_open_where_the_device_sets_the_pace(seen: dict[str, list[Steps]], run: Run) -> None:
    steps = [step for step in by_marks(seen, run) if step["load"]["launch_ns"] == 0]
    assert steps
    for step in steps:
        assert "bounds" not in step["line"], step["load"]
        assert None not in [step["line"]["overlap"][name] for name in METRICS]


@of_no_cost
def test_steps_measured_by_kernels_are_decided_at_every_cost(seen: dict[str, list[Steps]], run: Run) -> None:
    steps = by_kernels(seen, run)
    assert {step["load"]["launch_ns"] for step in steps} >= {0, 20_000}
    for step in steps:
        assert step["line"]["measured_by"] == "kernels"
        assert "bounds" not in step["line"]
        assert wrong(step["line"], step["truth"]) == [], step["load"]


def test_the_range_of_a_block_is_no_measure_of_its_computation(seen: dict[str, list[Steps]]) -> None:
    """Else all of this would pass without bounds: of DDP, idle gaps in blocks would hide most communication."""
    steps = [step for step in by_marks(seen, RUNS[0]) if step["load"]["launch_ns"] >= 10_000]
    assert steps
    for step in steps:
        low, high = step["line"]["bounds"]["overlap_ratio"]
        assert low <= step["truth"]["overlap_ratio"] < high - 0.1
