"""What the device path must hold, with the simulated device as the witness (`scenario`, `scenes`).

Python's tap and the compiled one, in both modes, are held to the same; the reference is what runs unobserved.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.device_path.launch import GRAIN_BYTES, on_devices
from tests.simulated.programs import needs_device

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device]
HELD_STEPS = 280
"""Between the two looks of the scene `half_precision_hook`."""
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
        for what, without in rank["off"]["use"].items():
            assert rank[way]["use"][what] <= without, what


def scene(told: list[dict[str, Any]], name: str, way: str) -> list[Any]:
    """What each rank told of it."""
    return [rank["scenes"][f"{name} {way}"] for rank in told]


@every_way
def test_what_is_captured_into_a_graph_is_left_alone_and_said(told: list[dict[str, Any]], way: str) -> None:
    """No mark is taken that could not be read later; the steps are written, and say what they miss."""
    for first, second in scene(told, "capture", way):
        assert first == [False, "1 collectives were captured into a CUDA graph, whose replays cannot be seen", 0]
        assert second[:2] == first[:2]
        assert second[2] == 2  # passes of the block


@every_way
def test_the_model_may_be_on_a_device_that_is_not_the_current_one(told: list[dict[str, Any]], way: str) -> None:
    for rank in scene(told, "another_device_is_current", way):
        assert rank["rows"] == rank["kernels"]
        assert rank["compute"] == rank["math"]
        assert len(rank["math"]) == 2
        assert (rank["zero"], rank["stray"], rank["races"]) == (0, 0, 0)


@every_way
def test_a_wait_with_a_limit_is_the_hosts_and_tells_of_a_failure(told: list[dict[str, Any]], way: str) -> None:
    for rank in scene(told, "limited_wait", way):
        assert rank["issued"]
        assert rank["waited"]
        assert "timed out" in rank["said"]


@every_way
def test_what_waits_on_the_host_is_waited_for_by_its_caller_only(told: list[dict[str, Any]], way: str) -> None:
    """NCCL's blocking wait, and barriers: no wait of ours at their issue, and they end when their caller has waited."""
    for rank in scene(told, "blocking", way):
        in_call, in_wait = zip(*rank["waited"], strict=True)
        assert in_call == (False, False, False, True)  # a synchronous barrier is a wait of the host
        assert in_wait == (True, False, True, False)
        assert [row[0] for row in rank["rows"]] == [kernel[0] for kernel in rank["kernels"]]
        assert [row[2] for row in rank["rows"]] == [kernel[2] for kernel in rank["kernels"]]
        assert [row[3] for row in rank["rows"]] == ["wait", "event", "wait", "wait"]


@every_way
def test_handles_that_nobody_waits_for_keep_nothing(told: list[dict[str, Any]], way: str) -> None:
    for rank in scene(told, "half_precision_hook", way):
        early, late = rank["live"]
        # Whether the device has already passed the last one when it is first asked is a matter of speed.
        assert late - early < HELD_STEPS * GRAIN_BYTES
        assert rank["value"] == 3


@every_way
def test_marks_of_steps_that_are_not_recorded_are_used_again(told: list[dict[str, Any]], way: str) -> None:
    for rank in scene(told, "abandoned", way):
        assert rank["written"] == 250
        early, late = rank["events"]
        assert late == early
        assert (early is None) == way.endswith("python")  # there they are collected as garbage


@every_way
def test_the_devices_clock_is_placed_exactly_and_does_not_drift(told: list[dict[str, Any]], way: str) -> None:
    for bound_at_start_ns, bound_at_end_ns, drift_ns in scene(told, "clock_facts", way):
        assert (bound_at_start_ns, bound_at_end_ns, drift_ns) == (0, 0, 0)


@every_way
def test_a_collective_keeps_the_priority_of_its_callers_stream(told: list[dict[str, Any]], way: str) -> None:
    moved = way.startswith("dedicated")
    for rank in scene(told, "priorities", way):
        assert rank == [[0, moved], [-1, moved]]


@every_way
def test_a_group_without_a_stream_of_its_own_stays_where_it_is(told: list[dict[str, Any]], way: str) -> None:
    for rank in scene(told, "no_stream_left", way):
        first, second = rank.pop("streams")
        assert (first != 0) == way.startswith("dedicated")
        assert second == 0
        assert rank == {"exact": True, "complete": True, "zero": 0, "races": 0}


@every_way
def test_a_cpu_backend_keeps_its_workers_where_a_device_comes_first(told: list[dict[str, Any]], way: str) -> None:
    for rank in scene(told, "workers", way):
        assert rank["lanes"] == rank["threads"] > 1
        assert rank["sources"] == ["event", "future"]


@pytest.mark.parametrize("tap", ["python", "compiled"])
def test_marks_can_be_read_after_a_thousand_unread_epochs(told: list[dict[str, Any]], tap: str) -> None:
    assert scene(told, "unread_epochs", f"dedicated-{tap}") == [0, 0]


@pytest.mark.parametrize("mode", ["dedicated", "observe"])
def test_the_emulated_fabric_ends_when_it_should_whoever_waits(told: list[dict[str, Any]], mode: str) -> None:
    for rank in scene(told, "emulated", f"{mode}-python"):
        assert rank["rows"] == rank["kernels"]
        assert len(rank["rows"]) == 3
        assert rank["behind"] == [0] * 3
        assert rank["values"] == [0] * 3
        assert rank["races"] == 0
        assert rank["cost"] > 0


def test_a_spin_is_as_long_as_asked_and_follows_the_devices_clock(told: list[dict[str, Any]]) -> None:
    """Three of five measurements at the start are three times too long; then the clock changes twice."""
    for lengths_ns in scene(told, "spins", "dedicated-python"):
        assert lengths_ns == pytest.approx([1e6, 1.5e6, 1e6, 1e6, 1e6 / 3, 1e6, 1e6], rel=0.001)
