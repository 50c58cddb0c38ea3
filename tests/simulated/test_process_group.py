"""NCCL's contract on two and four ranks: exact times, values, order, failures; and torch's own strategies.

That none of these has a race is asked in `tests.device_path.test_training`, with and without the instrument.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import forked
from tests.runs import HANGS_S, Launcher, environment, job, losses, succeeded
from tests.simulated.programs import needs_device, scenarios

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device]
OF_WHOLE_GROUPS = (
    "contention",
    "one_communicator_from_two_streams",
    "two_groups_side_by_side",
    "point_to_point eager",
    "point_to_point lazy",
    "coalesced",
    "failing issue",
)


@pytest.fixture(scope="module")
def told() -> dict[str, list[Any]]:
    """What the ranks say of each, in one launch: none of these leaves the group broken."""
    return scenarios(*OF_WHOLE_GROUPS)


def test_kernels_are_slower_while_a_collective_runs(told: dict[str, list[Any]]) -> None:
    first, second = told["contention"]
    # Rank 0: at 160 the first kernel has done 106.667 of its 200 us; the second one has the device to itself, and the
    # next all-reduce starts behind it. Rank 1: 60 us alone, 66.667 beside the first all-reduce, the rest alone.
    assert first["rows"] == [["allreduce", 0, 160], ["allreduce", 283.333, 383.333]]
    assert first["kernels"][1:] == [["sleep", 0, 253.333], ["sleep", 253.333, 283.333], ["sleep", 416.666, 423.666]]
    assert second["rows"] == [["allreduce", 60, 160], ["allreduce", 263.333, 383.333]]
    assert second["kernels"][1:] == [["sleep", 0, 233.333], ["sleep", 233.333, 263.333], ["sleep", 403.333, 410.333]]
    # 100 us of a kernel: 66.667 of them run beside the all-reduce of rank 0, 80 beside the longer one of rank 1.
    assert first["ops"] == [["aten::mul", 283.333, 416.666]]
    assert second["ops"] == [["aten::mul", 263.333, 403.333]]
    assert first["value"] == second["value"] == 6


def test_one_communicator_runs_in_order_whatever_the_streams(told: dict[str, list[Any]]) -> None:
    for rank in told["one_communicator_from_two_streams"]:
        assert rank["rows"] == [["allreduce", 0, 100], ["allreduce", 100, 200]]
        assert rank["why"] == ["communicator"]
        assert rank["values"] == [2, 4]


def test_two_groups_run_side_by_side(told: dict[str, list[Any]]) -> None:
    for rank in told["two_groups_side_by_side"]:
        assert rank["rows"] == [["allreduce", 0, 100], ["allreduce", 0, 100]]


def test_point_to_point_of_a_bound_group_waits_for_its_collectives(told: dict[str, list[Any]]) -> None:
    first, second = told["point_to_point eager"]
    assert first["rows"] == [["allreduce", 0, 300], ["send", 300, 400], ["recv", 400, 500]]
    assert second["rows"] == [["allreduce", 200, 300], ["recv", 300, 400], ["send", 400, 500]]
    assert (first["values"], second["values"]) == ([20, 3], [10, 3])
    assert first["sequences"] == [1, 2]


def test_point_to_point_of_an_unbound_group_has_a_communicator_for_each_pair(told: dict[str, list[Any]]) -> None:
    first, second = told["point_to_point lazy"]
    assert first["rows"] == [["allreduce", 0, 300], ["send", 0, 300], ["recv", 300, 400]]
    assert second["rows"] == [["allreduce", 200, 300], ["recv", 200, 300], ["send", 300, 400]]
    assert (first["values"], second["values"]) == ([20, 3], [10, 3])


def test_what_is_coalesced_is_launched_as_one_and_counted_once(told: dict[str, list[Any]]) -> None:
    for rank in told["coalesced"]:
        assert rank["rows"] == [["allreduce_coalesced", 0, 100], ["coalesced", 100, 200]]
        assert rank["counted"] == [1, 1]
        assert rank["values"] == [3, 5, 7, 3, 5]


@pytest.mark.parametrize("how", ["device", "peer"])
def test_a_collective_that_fails_says_so_and_so_does_the_group_from_then_on(how: str) -> None:
    said = "link down" if how == "device" else "timed out"
    for rank in scenarios(call := f"failing {how}")[call]:
        assert said in rank["said"]
        assert said in rank["again"]


def test_a_call_that_is_refused_leaves_the_group_whole(told: dict[str, list[Any]]) -> None:
    zero, one = told["failing issue"]
    assert (zero["said"], one["said"]) == ("refused", "")
    assert zero["value"] == one["value"] == 2


def end_of(how: str, ranks: int) -> str:
    """What the rank that failed said."""
    own = environment(AORTA_SIMULATED_DEVICES="2")
    done = forked("tests.simulated.program_abort", how, ranks=ranks, environment=own, timeout_s=HANGS_S)
    assert done.returncode == 1, f"{done.stdout}\n{done.stderr}"
    assert "could not be aborted" not in done.stderr
    return done.stderr


@pytest.mark.thorough
def test_an_error_of_its_own_is_what_a_rank_with_a_dead_peer_ends_with() -> None:
    assert "RealError: what really happened" in end_of("raises", ranks=1)


@pytest.mark.thorough
def test_a_peer_that_is_gone_is_told_and_not_waited_for() -> None:
    said = end_of("dies", ranks=2)
    assert "allreduce" in said
    assert "Traceback" in said


STRATEGIES = (("ddp", 2), ("fsdp_tp", 4))
SMALL = (
    "training.max_steps=3",
    "dataset.num_samples=256",
    "workload.num_layers=2",
    "workload.model_dim=64",
    "workload.mlp_hidden_dim=128",
    "workload.vocab_size=500",
    "telemetry.warmup_steps=1",
    "training.log_interval=1",
    "instrument.mode=off",
)


@pytest.mark.parametrize(("strategy", "ranks"), STRATEGIES)
@pytest.mark.thorough
def test_the_script_trains_as_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, ranks: int
) -> None:
    monkeypatch.setenv("AORTA_SIMULATED_DEVICES", "4")
    words = (*SMALL, f"parallel={strategy}")
    on_device = (f"training.output_dir={tmp_path / 'cuda'}", "training.device=cuda")
    # The launch is the same for every strategy: one shows that the real one brings the device with it.
    launcher: Launcher = "torchrun" if strategy == "ddp" else "fork"
    succeeded(job(*words, *on_device, ranks=ranks, launcher=launcher))
    succeeded(job(*words, f"training.output_dir={tmp_path / 'cpu'}", "training.device=cpu", ranks=ranks))
    for rank in range(ranks):
        assert losses(tmp_path / "cuda", rank) == pytest.approx(losses(tmp_path / "cpu", rank), rel=1e-4)
