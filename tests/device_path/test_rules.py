"""What the device path must hold, with the simulated device as the witness (`scenario`, `scenes`).

Python's tap and the compiled one, in both modes, are held to the same; the reference is what runs unobserved.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.device_path.launch import on_devices
from tests.simulated.programs import needs_device

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device]
WAYS = [f"{mode}-{tap}" for mode, tap in product(("dedicated", "observe"), ("python", "compiled"))]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank says of every way."""
    return on_devices("tests.device_path.program_rules", tmp_path_factory.mktemp("rules"))


every_way = pytest.mark.parametrize("way", WAYS)


def test_the_loop_itself_is_right(told: list[dict[str, Any]]) -> None:
    """Without an instrument: values, and no race."""
    for rank in told:
        assert rank["off"]["wrong"] == []


@every_way
def test_the_record_is_the_devices_own_and_nothing_else_changes(told: list[dict[str, Any]], way: str) -> None:
    """Starts, ends, lengths and stalls; values, races, waits of the host, and when everything runs on the device."""
    for rank in told:
        assert rank[way]["wrong"] == []


@every_way
def test_no_more_memory_is_needed_and_no_event_is_made_in_steady_state(told: list[dict[str, Any]], way: str) -> None:
    """In peak, in what is held on to, and in events beyond those that torch and the loop make themselves."""
    for rank in told:
        assert rank[way]["use"] == rank["off"]["use"]
