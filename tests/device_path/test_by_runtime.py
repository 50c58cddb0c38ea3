"""Torch 2.11's streams do not say whether they are captured: the compiled interceptor asks the runtime (the simulated
device answers as `cudaStreamIsCapturing`), and captures are as with newer ones.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.device_path.launch import on_devices
from tests.device_path.test_rules import (
    test_a_step_may_begin_or_end_while_a_graph_is_captured as steps_over_a_capture_are_right,
)
from tests.device_path.test_rules import test_what_is_captured_into_a_graph_is_left_alone_and_said as a_capture_is_right
from tests.simulated.programs import needs_device

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device, pytest.mark.thorough]
PROGRAM = "tests.device_path.program_by_runtime"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank says; the library is kept, as the ordinary one is."""
    subprocess.run([sys.executable, "-m", PROGRAM], check=True)
    return on_devices(PROGRAM, tmp_path_factory.mktemp("by_runtime"))


@pytest.mark.parametrize("mode", ["dedicated", "observe"])
def test_captures_are_noticed_by_asking_the_runtime(told: list[dict[str, Any]], mode: str) -> None:
    for rank in told:
        assert rank["by"] == "native"
        assert rank["asked"] > 10
    a_capture_is_right(told, f"{mode}-compiled")
    steps_over_a_capture_are_right(told, f"{mode}-compiled")
