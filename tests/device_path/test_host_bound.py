"""Where the host sets the pace, the record publishes the device's own numbers, or bounds that hold them.

Known by construction: the witness reads the simulated device's own timeline, in virtual time. Every launch costs the
host 0 to 20 us, events cost host and stream up to 5 us, kernels are slower beside collectives, and a kernel is seen by
the device some time after its launch (`RUNS`).
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

from aorta.distributed.topology import Topology
from aorta.records.schema import Step
from tests.device_path.agreement import truth_of
from tests.device_path.trainings import MATH_NS, WARM_UP, lengths, looped
from tests.simulated import device as simulated
from tests.simulated.programs import needs_device, on_devices

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device, pytest.mark.thorough]
METRICS = ("overlap_ratio", "compute_ms", "comm_ms", "compute_comm_ms", "exposed_comm_ms", "compute_stall_ms")
TOLERANCE = 0.02
"""Of a ratio, as it is; of computation, of its own; of a stall, of the window; of other times, of communication."""
ROUNDING = 1e-4
"""Of bounds: events tell times in float32 milliseconds since one reference, to 15 ns where that is 0.2 s ago."""


class Load(NamedTuple):
    """What a step of a run meets; it may change within a run, behind a synchronisation. `math_ns`: length of the
    kernels that are mathematics of blocks.
    """

    launch_ns: int
    math_ns: int = MATH_NS
    contention: float = 1.0


class Machine(NamedTuple):
    """What does not change within a run: the costs of events and of submission (`tests.simulated.device.costs`)."""

    event_ns: int = 0
    event_on_device_ns: int = 0
    submission_ns: int = 0


class Run(NamedTuple):
    """One way to train, on one machine, with one step for each load.

    `by_kernels`: the loads of the first steps, which a calibration window covers; `by_marks`: those behind it.
    """

    strategy: str
    mode: str
    machine: Machine = Machine()
    by_kernels: tuple[Load, ...] = ()
    by_marks: tuple[Load, ...] = ()

    @property
    def name(self) -> str:
        costs = zip(("event", "event_on_device", "submission"), self.machine, strict=True)
        return "-".join((self.strategy, self.mode, *(f"{what}{ns // 1000}" for what, ns in costs if ns)))


SLOW_HOSTS = tuple(Load(launch_ns) for launch_ns in (0, 5_000, 20_000))
OTHER_LOADS = tuple(Load(launch_ns, contention=1.3) for launch_ns in (0, 10_000))
MACHINES = (Machine(event_ns=1_000, event_on_device_ns=1_000), Machine(5_000, 5_000), Machine(submission_ns=8_000))
CALIBRATED = [
    Run(strategy, mode, by_kernels=SLOW_HOSTS, by_marks=(*SLOW_HOSTS, *OTHER_LOADS))
    for strategy, mode in product(("ddp", "fsdp", "tp"), ("dedicated", "observe"))
]
WITH_COSTS = [
    Run(strategy, mode, machine, by_marks=(*SLOW_HOSTS, Load(10_000, math_ns=1_000)))
    for (strategy, mode), machine in product((("ddp", "dedicated"), ("fsdp", "observe")), MACHINES)
]
RUNS = {run.name: run for run in (*CALIBRATED, *WITH_COSTS)}


def steps_of(topology: Topology, device: torch.device, name: str) -> list[dict[str, Any]]:
    """The steps of one run: the second one under each load, so that it begins as the steps behind it would."""
    run = RUNS[name]
    simulated.defaults()
    begin(Load(0), run.machine)
    lines: list[Step] = []
    words = [f"parallel={run.strategy}", f"instrument.mode={run.mode}"]
    if run.by_kernels:
        words += [f"telemetry.warmup_steps={WARM_UP}", f"instrument.calibration={2 * len(run.by_kernels)}"]
    loads = [*run.by_kernels, *run.by_marks]
    with looped(words, topology, device, lines) as loop:
        for load in loads:
            torch.accelerator.synchronize()
            begin(load, run.machine)
            loop.step()
            loop.step()
        torch.accelerator.synchronize()
        simulated.contention(1.0)
    rows, waits, stream = simulated.timeline(device.index), simulated.waits(), torch.cuda.current_stream().stream_id
    seen = []
    for load, line in zip(loads, lines[WARM_UP + 1 :: 2], strict=True):
        truth = truth_of((line.start_mono_ns, line.end_mono_ns), rows, waits, stream, device.index)
        own = {name: length_ns / 1e6 for name, length_ns in truth.lengths_ns.items()}
        own["overlap_ratio"] = truth.ratio or 0.0
        bounds = dict(line.bounds or {})
        wrong = [f"{load}: {found}" for metric in METRICS if (found := wrongly(metric, line, own, bounds.get(metric)))]
        more = {"measured_by": line.measured_by or None, "bounds": bounds, "window_ms": line.overlap["window_ms"]}
        seen.append({"wrong": wrong, "own": own} | more)
    return seen


def begin(load: Load, machine: Machine) -> None:
    """From now on launches and kernels take what they do under this load."""
    lengths(load.math_ns, launch_ns=load.launch_ns)
    simulated.costs(**machine._asdict())
    simulated.contention(load.contention)


def wrongly(metric: str, line: Step, own: dict[str, float], bounds: tuple[float, float] | None) -> str | None:
    """In words, if a step publishes a metric wrongly: too far from the device's own, or within bounds without it."""
    published, true, why = line.overlap[metric], own[metric], line.reasons.get(metric)
    scale = {"overlap_ratio": 1.0, "compute_ms": true, "compute_stall_ms": line.overlap["window_ms"] or 0.0}
    if published is None:
        right = "host-bound" in (why or "") and bounds and bounds[0] - ROUNDING <= true <= bounds[1] + ROUNDING
    else:
        right = bounds is None and abs(published - true) <= TOLERANCE * scale.get(metric, own["comm_ms"])
    return None if right else f"{metric} is {published}, between {bounds}, for {true}; {why}"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[dict[str, Any]]]]:
    """Of each run the steps of each rank; all in one launch."""
    return on_devices(steps_of, tmp_path_factory.mktemp("host_bound"), {name: [name] for name in RUNS})


@pytest.mark.parametrize("name", RUNS)
def test_a_number_is_the_devices_own_or_a_bound_that_holds_it(seen: dict[str, Any], name: str) -> None:
    """Bounds are left open by marks only, and not where the device sets the pace; steps measured by kernels are decided
    at every cost of a launch. Nor is a block's range a measure of its computation: idle gaps in DDP's would hide most
    communication.
    """
    run = RUNS[name]
    for steps in seen[name]:
        assert [wrong for step in steps for wrong in step["wrong"]] == []
        for number, (step, load) in enumerate(zip(steps, (*run.by_kernels, *run.by_marks), strict=True)):
            if run in CALIBRATED:
                by_kernels = number < len(run.by_kernels)
                assert step["measured_by"] == ("kernels" if by_kernels else None)
                if by_kernels or load.launch_ns == 0:
                    assert step["bounds"] == {}, load
                elif run is CALIBRATED[0] and load.launch_ns >= 10_000:
                    low, high = step["bounds"]["overlap_ratio"]
                    assert low <= step["own"]["overlap_ratio"] < high - 0.1


def test_every_load_and_machine_is_another(seen: dict[str, Any]) -> None:
    """Kernels beside collectives are slower, and events take their time."""
    (ddp, *_) = seen[CALIBRATED[0].name]
    plain, slowed = (ddp[len(SLOW_HOSTS) + place] for place in (0, len(SLOW_HOSTS)))
    assert slowed["own"]["compute_ms"] > 1.05 * plain["own"]["compute_ms"]
    costs, more = (seen[run.name][0][0]["window_ms"] for run in WITH_COSTS[:2])
    assert plain["window_ms"] < costs < more
