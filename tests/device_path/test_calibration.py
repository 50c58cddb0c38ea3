"""A calibration window on the simulated device: what it measures, what it costs, and that it changes nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import msgspec
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from aorta.distributed.topology import Topology
from aorta.records.schema import Step
from tests.device_path.launch import on_devices
from tests.device_path.trainings import MATH, SHAPE
from tests.loop import Loop
from tests.simulated import device as simulated
from tests.simulated.programs import needs_device

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device, pytest.mark.thorough]
WARM_UP, WINDOW, STEPS = 3, 2, 8
INSIDE = range(WARM_UP, WARM_UP + WINDOW)
CASES = ("off", "alone", "beside", "overtaken")


@contextmanager
def own_profiler(found: dict[str, Any]) -> Iterator[None]:
    """The caller's."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield
    results = profiler.profiler and profiler.profiler.kineto_results
    found["own_rows"] = len(results.events()) if results else 0


def every_case(topology: Topology, device: torch.device) -> dict[str, Any]:
    """On a rank, one after another."""
    simulated.lengths(**dict.fromkeys(simulated.CLASSES, (0, 0.0)), operators=dict.fromkeys(MATH, (23_000, 0.0)))
    simulated.collective_lengths(default=(90_000, 0.5))
    simulated.costs(launch_ns=10_000)
    return {name: calibrated(name, topology, device) for name in CASES}


def calibrated(name: str, topology: Topology, device: torch.device) -> dict[str, Any]:
    """One training; each step with the synchronisations of the host in it, and those between it and the next one."""
    lines: list[Step] = []
    words = (
        *SHAPE,
        "parallel=ddp",
        "training.log_interval=100",
        f"telemetry.warmup_steps={WARM_UP}",
        *(() if name == "off" else (f"instrument.calibration={WINDOW}",)),
    )
    loop = Loop(words, topology, device, lines.append)
    found: dict[str, Any] = {"own_rows": None}
    torch.accelerator.synchronize()
    simulated.reset()
    inner = loop.step_of_training.run
    inside: list[int] = []

    def counted(*given: Any) -> Any:
        before = waits()
        outcome = inner(*given)
        inside.append(waits() - before)
        return outcome

    loop.step_of_training.run = counted
    ends: list[int] = []
    with own_profiler(found) if name == "beside" else nullcontext():
        for number in range(STEPS):
            with own_profiler(found) if name == "overtaken" and number == WARM_UP + 1 else nullcontext():
                loop.step()
            ends.append(waits())
    loop.finish()
    simulated.no_races()
    between = [end - sum(inside[: number + 1]) for number, end in enumerate(ends)]
    return found | {
        "inside": inside,
        "between": between,
        "lines": msgspec.to_builtins(lines),
        "calibrations": msgspec.to_builtins(loop.calibrations),
        "weights": [float(parameter.detach().double().sum().cpu()) for parameter in loop.model.parameters()],
    }


def waits() -> int:
    """How often the host has waited for the device."""
    return sum(simulated.counters().host_synchronisations.values())


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every case of each rank."""
    return on_devices(every_case, tmp_path_factory.mktemp("calibration"))


@pytest.mark.parametrize("case", CASES)
def test_training_is_the_same(told: list[dict[str, Any]], case: str) -> None:
    for rank in told:
        assert rank[case]["weights"] == rank["off"]["weights"]
        assert len(rank[case]["lines"]) == STEPS


def test_the_steps_of_the_window_are_measured_by_kernels(told: list[dict[str, Any]]) -> None:
    case = "alone"
    for rank in told:
        by = [line.get("measured_by") for line in rank[case]["lines"]]
        assert by == ["kernels" if number in INSIDE else None for number in range(STEPS)]
        (found,) = rank[case]["calibrations"]
        assert (found["first_step"], found["last_step"], found["steps"], found["problem"]) == (
            INSIDE[0],
            INSIDE[-1],
            WINDOW,
            None,
        )
        assert 0 < found["ratio_by_kernels"] < found["ratio_by_marks"] - 0.02
        # Mathematics alone takes time, and the loss has none.
        shares = {block["block"]: block["kernel_share"] for block in found["blocks"]}
        assert shares.pop("loss") == 0
        assert shares
        assert all(0.5 < share < 0.8 for share in shares.values())
        assert found["window_step_ms"] > 0
        assert found["other_step_ms"] > 0


def test_the_host_waits_for_the_profiler_between_steps_only(told: list[dict[str, Any]]) -> None:
    for rank in told:
        assert rank["alone"]["inside"] == rank["off"]["inside"]
        more = [a - b for a, b in zip(rank["alone"]["between"], rank["off"]["between"], strict=True)]
        # Counted up to the end of each step: once it has been started, and once it has been stopped.
        started, stopped = more[WARM_UP - 1], more[INSIDE[-1]]
        assert more == [0] * (WARM_UP - 1) + [started] * WINDOW + [stopped] * (STEPS - WARM_UP - WINDOW + 1)
        assert 0 < started < stopped


@pytest.mark.parametrize(
    ("case", "problem"),
    [("beside", "another profiler was recording"), ("overtaken", "the caller's own profiler started meanwhile")],
)
def test_the_callers_own_profiler_comes_first(told: list[dict[str, Any]], case: str, problem: str) -> None:
    for rank in told:
        assert rank[case]["own_rows"] > 0
        (found,) = rank[case]["calibrations"]
        assert (found["steps"], found["problem"], found["ratio_by_kernels"]) == (0, problem, None)
        assert not any("measured_by" in line for line in rank[case]["lines"])
