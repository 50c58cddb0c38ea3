"""A calibration window on the simulated device: what it measures, what it costs, and that it changes nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from tests.device_path.launch import on_devices
from tests.device_path.program_calibration import CASES, STEPS, WARM_UP, WINDOW
from tests.simulated.programs import needs_device

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device, pytest.mark.thorough]
INSIDE = range(WARM_UP, WARM_UP + WINDOW)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every case of each rank."""
    return on_devices("tests.device_path.program_calibration", tmp_path_factory.mktemp("calibration"))


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
