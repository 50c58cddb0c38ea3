"""Two ranks train with and without a calibration window, alone and beside a profiler of their own.

Enters: a folder. Leaves: `rank_<r>.json`: of each case its losses, steps, calibrations and what the host waited for.
Run by `test_calibration`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

from aorta.distributed.topology import Topology
from aorta.records.schema import Step
from tests.device_path.launch import by_rank
from tests.device_path.program_overlap import MATH, SHAPE
from tests.loop import Loop
from tests.simulated import device as simulated

WARM_UP, WINDOW, STEPS = 3, 2, 8
CASES = ("off", "alone", "beside", "overtaken")


@contextmanager
def own_profiler(found: dict[str, Any]) -> Iterator[None]:
    """The caller's."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield
    results = profiler.profiler and profiler.profiler.kineto_results
    found["own_rows"] = len(results.events()) if results else 0


def case(name: str, topology: Topology, device: torch.device) -> dict[str, Any]:
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


def main() -> None:
    """Every case, one after another."""
    simulated.lengths(**dict.fromkeys(simulated.CLASSES, (0, 0.0)), operators=dict.fromkeys(MATH, (23_000, 0.0)))
    simulated.collective_lengths(default=(90_000, 0.5))
    simulated.costs(launch_ns=10_000)
    by_rank(lambda *rank: {name: case(name, *rank) for name in CASES})


if __name__ == "__main__":
    main()
