"""What the device path must hold, with the simulated device as the witness (`scenario`, `scenes`).

Both modes are held to the same; the reference is what runs unobserved.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.device_path import scenes
from tests.device_path.launch import on_devices
from tests.runs import ROOT
from tests.simulated.programs import needs_device

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device, pytest.mark.thorough]
WAYS = ["dedicated", "observe"]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank says of every way."""
    return on_devices(scenes.rules, tmp_path_factory.mktemp("rules"))


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of three ranks says of every way."""
    return on_devices(scenes.two_peers, tmp_path_factory.mktemp("peers"), ranks=3)


@pytest.fixture(scope="module")
def told_by_runtime(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank says whose compiled interceptor asks the runtime; the library is kept, as the ordinary one is."""
    build = "from tests.device_path import scenes; scenes.ask_the_runtime(); scenes.native.build()"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True)
    return on_devices(scenes.captures_by_runtime, tmp_path_factory.mktemp("by_runtime"))


every_way = pytest.mark.parametrize("way", WAYS)
or_all_dedicated = pytest.mark.parametrize("way", [*WAYS, "all_dedicated"])
"""The last one: `instrument.dedicated_async`."""


def test_the_loop_itself_is_right(told: list[dict[str, Any]]) -> None:
    """Without an instrument: values, and no race."""
    for rank in told:
        assert rank["off"]["wrong"] == []


@or_all_dedicated
def test_the_record_is_the_devices_own_and_nothing_else_changes(told: list[dict[str, Any]], way: str) -> None:
    """Starts, ends, lengths and stalls; values, races, waits of the host, and when everything runs on the device."""
    for rank in told:
        assert rank[way]["wrong"] == []


@or_all_dedicated
def test_no_more_memory_is_needed_and_no_event_is_made_in_steady_state(told: list[dict[str, Any]], way: str) -> None:
    """In peak, in what is held on to, and in events beyond those that torch and the loop make themselves."""
    for rank in told:
        for what, without in rank["off"]["use"].items():
            assert rank[way]["use"][what] <= without, what


def scene(told: list[dict[str, Any]], name: str, way: str) -> list[Any]:
    """What each rank told of it."""
    return [rank["scenes"][f"{name} {way}"] for rank in told]


NOT_LOOKED_AT = (
    "on a device only compiled code times collectives and blocks, and it is not used (instrument.native=false): "
    "nothing was looked at"
)
NOT_TIMED = "collectives could not be timed: the device has no stream left to time them on"
MOVED = {
    "dedicated": [[False, True], [False, False]],
    "observe": [[True, False], [False, True]],
    "all_dedicated": [[False, True], [False, True]],
}
"""By mode, of a synchronous and an asynchronous collective: whether it runs on its caller's stream, and directly behind
it. `dedicated` runs the former on AORTA's stream; the latter runs on the backend's own, in `dedicated` behind AORTA's
stream, and with `dedicated_async` on AORTA's.
"""
ANSWERS: dict[str, Callable[[str], Any]] = {
    "nothing_in_a_batch": lambda _: [0, 0, 0],
    "kept_handles": lambda _: 0,
    # A collective keeps the priority of its caller's stream.
    "priorities": lambda mode: [[0, mode == "dedicated"], [-1, mode == "dedicated"]],
    "moved": MOVED.__getitem__,
    # A mark takes its stream time: those of an asynchronous collective are on AORTA's stream, until its caller waits.
    "marks_cost": lambda _: [0, 0],
    "recursive_block": lambda _: True,
    # However many gradients reach the outputs of a backward pass.
    "backward_end_cost": lambda _: 2,
    "failed_handle": lambda _: True,
    "no_stream_to_time_on": lambda _: {
        "told": [[f"1 of 1 {NOT_TIMED}", [True]], [f"1 of 2 {NOT_TIMED}", [False, True]]],
        "zero": 0,
        "races": 0,
    },
    "many_joined": lambda _: [256, 4, 259],
    "future_elsewhere": lambda _: [],
    "handles": lambda _: [False, True, True, True, 1],
    # The clock is placed in the middle of the narrowest bracket.
    "uncertain_clock": lambda _: [7_051, 50, 50, 50, -1_000_000_000],
    "waits_told": lambda _: [[1, 1, 1, 0, 0], [["collective"]], True],
    "unread_epochs": lambda _: [0, 0],
    "not_compiled": lambda _: [False, NOT_LOOKED_AT, NOT_LOOKED_AT, ["window_ms", "aorta_ms"], 0],
}
"""Scene -> what each rank must tell of it, by mode; the scenes' docstrings say what it means."""


@pytest.mark.parametrize("name", ANSWERS)
def test_a_scene_tells_the_same_in_every_way_in_which_it_was_played(told: list[dict[str, Any]], name: str) -> None:
    for rank in told:
        answers = {key.split()[1]: answer for key, answer in rank["scenes"].items() if key.split()[0] == name}
        assert answers == {way: ANSWERS[name](way) for way in answers} != {}


@every_way
def test_what_is_captured_into_a_graph_is_left_alone_and_said(told: list[dict[str, Any]], way: str) -> None:
    """No mark is taken that could not be read later; the steps are written, and say what they miss."""
    for first, second in scene(told, "capture", way):
        assert first == [False, "2 collectives were captured into a CUDA graph, whose replays cannot be seen", 0, 0]
        assert second[:2] == first[:2]
        assert second[2] == 2  # passes of the block


@every_way
def test_a_step_may_begin_or_end_while_a_graph_is_captured(told: list[dict[str, Any]], way: str) -> None:
    """No event is asked for meanwhile, which would end the capture; what is known of such a step is the host's."""
    for lines in scene(told, "capture_over_steps", way):
        assert [complete for complete, _, _ in lines] == [True, False, False, False, True]
        assert all(comm_ms > 0 for _, _, comm_ms in (lines[0], lines[4]))
        for _, reason, comm_ms in lines[1:4]:
            assert "a CUDA graph was being captured when the step began or ended" in reason
            assert comm_ms is None


@pytest.mark.parametrize("mode", ["dedicated", "observe"])
def test_captures_are_noticed_by_asking_the_runtime(told_by_runtime: list[dict[str, Any]], mode: str) -> None:
    """Torch 2.11's streams do not say whether they are captured; the simulated device answers the runtime's question
    (`cudaStreamIsCapturing`), and captures are as with newer ones.
    """
    for rank in told_by_runtime:
        assert rank["by"] == "native"
        assert rank["asked"] > 10
    test_what_is_captured_into_a_graph_is_left_alone_and_said(told_by_runtime, mode)
    test_a_step_may_begin_or_end_while_a_graph_is_captured(told_by_runtime, mode)


@every_way
def test_the_model_may_be_on_a_device_that_is_not_the_current_one(told: list[dict[str, Any]], way: str) -> None:
    for rank in scene(told, "another_device_is_current", way):
        assert rank["rows"] == rank["kernels"]
        assert rank["compute"] == rank["math"]
        assert len(rank["math"]) == 2
        assert (rank["zero"], rank["stray"], rank["races"]) == (0, 0, 0)


@or_all_dedicated
def test_every_form_of_every_collective_is_timed_and_left_alone(told: list[dict[str, Any]], way: str) -> None:
    """Also where the backend uses tensors of its own, which the first wait for its handle releases."""
    for rank in scene(told, "every_form", way):
        assert (rank["races"], rank["wrong"], rank["untimed"]) == ([], [], [])
        assert rank["complete"]
        assert rank["rows"] == 2 * rank["forms"]


@every_way
def test_transfers_of_which_nothing_is_known_are_marked_where_they_are_issued(
    told: list[dict[str, Any]], way: str
) -> None:
    """Each direction on a stream of its own: what the second one waited for is part of its duration."""
    for in_record_ns, on_device_ns in scene(told, "unknown_communicators", way):
        assert in_record_ns == 0
        assert on_device_ns > 0


@every_way
def test_what_cannot_be_timed_safely_is_not_and_the_record_says_why(told: list[dict[str, Any]], way: str) -> None:
    for rank in scene(told, "stacked_in_a_batch", way):
        assert (rank["races"], rank["zero"], rank["ends"], rank["ratio"]) == ([], 0, [None, None], None)
        complete, reason = rank["coverage"]
        assert not complete
        assert reason.startswith("2 of 2 collectives could not be timed: they take lists of tensors")


@every_way
def test_blocks_that_compute_their_activations_again_are_measured(told: list[dict[str, Any]], way: str) -> None:
    for rank in scene(told, "checkpointed", way):
        assert rank["rows"] == rank["kernels"]
        assert rank["lengths"] == rank["truth"]
        assert (rank["complete"], rank["races"]) == (True, 0)


@every_way
def test_a_split_group_is_one_of_its_own(told: list[dict[str, Any]], way: str) -> None:
    for rank in scene(told, "split", way):
        assert rank["rows"] == rank["kernels"]
        assert rank["groups"] == [True, False, True, True]
        assert (rank["complete"], rank["zero"], rank["races"]) == (True, 0, 0)


@or_all_dedicated
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
def test_marks_of_steps_that_are_not_recorded_are_used_again(told: list[dict[str, Any]], way: str) -> None:
    for rank in scene(told, "abandoned", way):
        assert rank["written"] == 100
        early, late = rank["events"]
        assert late == early


@every_way
def test_a_copy_has_a_direction_and_no_times_where_another_device_makes_it(
    told: list[dict[str, Any]], way: str
) -> None:
    for rank in scene(told, "copies_elsewhere", way):
        size = 4 * 4096
        rows = [["d2h", 4, True], ["p2p", size, True], ["d2h", size, False]]
        assert rank["rows"] == rows
        assert rank["copy_ms"] is None
        assert "1 of 3 copies were issued on another device's stream" in rank["reason"]


@every_way
def test_only_what_moves_bytes_is_a_copy_and_one_on_another_stream_leaves_the_computation(
    told: list[dict[str, Any]], way: str
) -> None:
    for copies, beside_a_copy, beside_a_kernel in scene(told, "copies_here", way):
        assert copies == [400]
        at_least_ms, at_most_ms = beside_a_copy["compute_ms"]
        assert 0 < at_least_ms < at_most_ms
        assert beside_a_copy["compute_ms"] == beside_a_kernel["compute_ms"]


@every_way
def test_transfers_with_two_peers_are_timed_apart(peers: list[dict[str, Any]], way: str) -> None:
    for number, rank in enumerate(peers):
        assert rank[way]["rows"] == rank[way]["kernels"]
        assert len(rank[way]["rows"]) == (1 if number else 2)


@every_way
def test_a_group_without_a_stream_of_its_own_stays_where_it_is(told: list[dict[str, Any]], way: str) -> None:
    for rank in scene(told, "no_stream_left", way):
        first, second = rank.pop("streams")
        assert (first != 0) == (way == "dedicated")
        assert second == 0
        assert rank == {"exact": True, "complete": True, "zero": 0, "races": 0}


@every_way
def test_a_cpu_backend_keeps_its_workers_where_a_device_comes_first(told: list[dict[str, Any]], way: str) -> None:
    for rank in scene(told, "workers", way):
        assert rank["lanes"] == rank["threads"] > 1
        assert rank["sources"] == ["event", "future"]
        assert rank["waits"] == [0]  # the host waits for the other one, and the compute stream does not


def test_a_spin_is_as_long_as_asked_and_follows_the_devices_clock(told: list[dict[str, Any]]) -> None:
    """Three of five measurements at the start are three times too long; then the clock changes twice."""
    for lengths_ns in scene(told, "spins", "dedicated"):
        assert lengths_ns == pytest.approx([1e6, 1.5e6, 1e6, 1e6, 1e6 / 3, 1e6, 1e6], rel=0.001)
