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
from tests.device_path.trainings import WARM_UP, lengths, looped
from tests.simulated import device as simulated
from tests.simulated.programs import needs_device, on_devices

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device, pytest.mark.thorough]
WINDOW, STEPS = 2, 8
INSIDE = range(WARM_UP, WARM_UP + WINDOW)
CASES = ("off", "alone", "beside", "overtaken")
Told = dict[str, list[dict[str, Any]]]


@contextmanager
def own_profiler(rows: list[int]) -> Iterator[None]:
    """The caller's."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield
    results = profiler.profiler and profiler.profiler.kineto_results
    rows.append(len(results.events()) if results else 0)


def calibrated(topology: Topology, device: torch.device, name: str) -> dict[str, Any]:
    """One training; each step with the synchronisations of the host in it, and those between it and the next one."""
    lengths(launch_ns=10_000)
    lines, own_rows = list[Step](), list[int]()
    window = () if name == "off" else (f"instrument.calibration={WINDOW}",)
    words = ("parallel=ddp", "training.log_interval=100", f"telemetry.warmup_steps={WARM_UP}", *window)
    with looped(words, topology, device, lines, warm_up=0) as loop:
        inner = loop.step_of_training.run
        inside: list[int] = []

        def counted(*given: Any) -> Any:
            before = waits()
            outcome = inner(*given)
            inside.append(waits() - before)
            return outcome

        loop.step_of_training.run = counted
        ends: list[int] = []
        with own_profiler(own_rows) if name == "beside" else nullcontext():
            for number in range(STEPS):
                with own_profiler(own_rows) if (name, number) == ("overtaken", WARM_UP + 1) else nullcontext():
                    loop.step()
                ends.append(waits())
    between = [end - sum(inside[: number + 1]) for number, end in enumerate(ends)]
    return {
        "own_rows": own_rows,
        "inside": inside,
        "between": between,
        "measured_by": [line.measured_by or None for line in lines],
        "calibrations": msgspec.to_builtins(loop.calibrations),
        "weights": [float(parameter.detach().double().sum().cpu()) for parameter in loop.model.parameters()],
    }


def waits() -> int:
    """How often the host has waited for the device."""
    return sum(simulated.counters().host_synchronisations.values())


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Every case of each rank."""
    return on_devices(calibrated, tmp_path_factory.mktemp("calibration"), {name: [name] for name in CASES})


def test_training_is_the_same(told: Told) -> None:
    for off, *others in zip(*told.values(), strict=True):
        for other in others:
            assert other["weights"] == off["weights"]
            assert len(other["measured_by"]) == STEPS


def test_the_steps_of_the_window_are_measured_by_kernels(told: Told) -> None:
    for rank in told["alone"]:
        assert rank["measured_by"] == ["kernels" if number in INSIDE else None for number in range(STEPS)]
        (found,) = rank["calibrations"]
        steps = (found["first_step"], found["last_step"], found["steps"], found["problem"])
        assert steps == (INSIDE[0], INSIDE[-1], WINDOW, None)
        assert 0 < found["ratio_by_kernels"] < found["ratio_by_marks"] - 0.02
        # Mathematics alone takes time, and the loss has none.
        shares = {block["block"]: block["kernel_share"] for block in found["blocks"]}
        assert shares.pop("loss") == 0
        assert shares
        assert all(0.5 < share < 0.8 for share in shares.values())
        assert min(found["window_step_ms"], found["other_step_ms"]) > 0


def test_the_host_waits_for_the_profiler_between_steps_only(told: Told) -> None:
    for alone, off in zip(told["alone"], told["off"], strict=True):
        assert alone["inside"] == off["inside"]
        more = [a - b for a, b in zip(alone["between"], off["between"], strict=True)]
        # Counted up to the end of each step: once it has been started, and once it has been stopped.
        started, stopped = more[WARM_UP - 1], more[INSIDE[-1]]
        assert more == [0] * (WARM_UP - 1) + [started] * WINDOW + [stopped] * (STEPS - WARM_UP - WINDOW + 1)
        assert 0 < started < stopped


@pytest.mark.parametrize(
    ("case", "problem"),
    [("beside", "another profiler was recording"), ("overtaken", "the caller's own profiler started meanwhile")],
)
def test_the_callers_own_profiler_comes_first(told: Told, case: str, problem: str) -> None:
    for rank in told[case]:
        assert rank["own_rows"] > [0]
        (found,) = rank["calibrations"]
        assert (found["steps"], found["problem"], found["ratio_by_kernels"]) == (0, problem, None)
        assert not any(rank["measured_by"])
