"""Where the host sets the pace, the record publishes the device's own numbers, or bounds that hold them.

Known by construction: the witness reads the simulated device's own timeline, in virtual time. Every launch costs the
host 0 to 20 us, events cost host and stream up to 5 us, kernels are slower beside collectives, and a kernel is seen by
the device some time after its launch (`program_host_bound.RUNS`).
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.device_path.launch import on_devices
from tests.device_path.program_host_bound import METRICS, RUNS, Machine, Run, wrong
from tests.simulated.programs import needs_device

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device, pytest.mark.thorough]
Steps = list[dict[str, Any]]


def _name(run: Run) -> str:
    costs = "".join(f"-{name.removesuffix('_ns')}{ns // 1000}" for name, ns in asdict(run.machine).items() if ns)
    return f"{run.strategy}-{run.mode}{costs}"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Steps]]:
    """Of each run the steps of each rank; all in one launch."""
    runs = json.dumps([asdict(run) for run in RUNS])
    by_rank = on_devices("tests.device_path.program_host_bound", Path(tmp_path_factory.mktemp("host_bound")), runs)
    return {_name(run): [steps[number] for steps in by_rank] for number, run in enumerate(RUNS)}


every_run = pytest.mark.parametrize("run", RUNS, ids=_name)
of_no_cost = pytest.mark.parametrize("run", [run for run in RUNS if run.machine == Machine()], ids=_name)


def by_marks(seen: dict[str, list[Steps]], run: Run) -> Steps:
    """The steps behind the calibration window, of both ranks."""
    return [step for steps in seen[_name(run)] for step in steps[len(run.by_kernels) :]]


def by_kernels(seen: dict[str, list[Steps]], run: Run) -> Steps:
    return [step for steps in seen[_name(run)] for step in steps[: len(run.by_kernels)]]


@every_run
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
