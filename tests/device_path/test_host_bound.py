"""Where the host sets the pace, the record publishes the device's own numbers, or bounds that hold them.

Known by construction: the witness reads the simulated device's own timeline, in virtual time. Every launch costs the
host 0 to 20 us, events cost host and stream up to 5 us, kernels are slower beside collectives, and a kernel is seen by
the device some time after its launch (`RUNS`).
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from aorta.distributed.topology import Topology
from aorta.records.schema import Step
from tests.device_path.trainings import MATH_NS, WARM_UP, lengths, looped
from tests.device_path.witness import truth_of
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


class Seen(NamedTuple):
    """A step: what it met, the record's line, and the device's own values of its metrics."""

    load: Load
    line: dict[str, Any]
    truth: dict[str, float]


def steps_of(topology: Topology, device: torch.device, name: str) -> list[Seen]:
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
        lengths_ms = {name: length_ns / 1e6 for name, length_ns in truth.lengths_ns().items()}
        seen.append(Seen(load, msgspec.to_builtins(line), {"overlap_ratio": truth.ratio or 0.0, **lengths_ms}))
    return seen


def begin(load: Load, machine: Machine) -> None:
    """From now on launches and kernels take what they do under this load."""
    lengths(load.math_ns, launch_ns=load.launch_ns)
    simulated.costs(**machine._asdict())
    simulated.contention(load.contention)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[Seen]]]:
    """Of each run the steps of each rank; all in one launch."""
    told = on_devices(steps_of, tmp_path_factory.mktemp("host_bound"), {name: [name] for name in RUNS})
    return {
        name: [[Seen(Load(*load), line, truth) for load, line, truth in steps] for steps in ranks]
        for name, ranks in told.items()
    }


def wrong(step: Seen) -> list[str]:
    """Which metrics a step publishes wrongly: a number too far from the device's own, or bounds that do not hold it."""
    found, (load, line, truth) = [], step
    for name in METRICS:
        published, bounds, own = line["overlap"][name], line.get("bounds", {}).get(name), truth[name]
        why = line.get("reasons", {}).get(name)
        scale = {"overlap_ratio": 1.0, "compute_ms": own, "compute_stall_ms": line["overlap"]["window_ms"]}
        if published is None:
            right = "host-bound" in why and bounds and bounds[0] - ROUNDING <= own <= bounds[1] + ROUNDING
        else:
            right = bounds is None and abs(published - own) <= TOLERANCE * scale.get(name, truth["comm_ms"])
        if not right:
            found.append(f"{load}: {name} is {published}, between {bounds}, for {own}; {why}")
    return found


@pytest.mark.parametrize("name", RUNS)
def test_a_number_is_the_devices_own_or_a_bound_that_holds_it(seen: dict[str, list[list[Seen]]], name: str) -> None:
    """Bounds are left open by marks only, and not where the device sets the pace; steps measured by kernels are decided
    at every cost of a launch.
    """
    run = RUNS[name]
    for steps in seen[name]:
        assert [one for step in steps for one in wrong(step)] == []
        for number, step in enumerate(steps if run in CALIBRATED else ()):
            by_kernels = number < len(run.by_kernels)
            assert step.line.get("measured_by") == ("kernels" if by_kernels else None)
            if by_kernels or step.load.launch_ns == 0:
                assert "bounds" not in step.line, step.load
                assert None not in [step.line["overlap"][metric] for metric in METRICS]


def test_the_range_of_a_block_is_no_measure_of_its_computation(seen: dict[str, list[list[Seen]]]) -> None:
    """Else all of this would pass without bounds: of DDP, idle gaps in blocks would hide most communication."""
    run = CALIBRATED[0]
    for steps in seen[run.name]:
        slow = [step for step in steps[len(run.by_kernels) :] if step.load.launch_ns >= 10_000]
        assert slow
        for step in slow:
            low, high = step.line["bounds"]["overlap_ratio"]
            assert low <= step.truth["overlap_ratio"] < high - 0.1
