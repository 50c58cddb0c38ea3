"""One process that stands for all ranks against as many processes on the same emulated fabric, in virtual time: what
the record says of rank 0 is the same to the nanosecond, and so is what kept the streams busy.
"""

from __future__ import annotations

import json
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

from tests.device_path.launch import on_devices
from tests.simulated.programs import needs_device

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device, pytest.mark.thorough]
STRATEGIES = {2: ("ddp", "fsdp", "tp", "fsdp1"), 4: ("ddp", "hsdp", "fsdp_tp")}
WAYS = [(ranks, *way) for ranks, names in STRATEGIES.items() for way in product(names, ("observe", "dedicated"))]
HIDES_NOTHING = ("tp",)


def cases(ranks: int, taps: tuple[str, ...]) -> str:
    ways = product(STRATEGIES[ranks], ("observe", "dedicated"), taps)
    return json.dumps(
        {
            f"{strategy} {mode} {native}": [
                f"parallel={strategy}",
                f"instrument.mode={mode}",
                f"instrument.native={native}",
            ]
            for strategy, mode, native in ways
        }
    )


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[dict[str, Any], dict[str, Any]]]:
    """By the number of ranks: what rank 0 of real ranks and what the only process left."""
    program, found = "tests.device_path.program_emulated_ranks", {}
    for ranks in STRATEGIES:
        folder = tmp_path_factory.mktemp("ranks")
        # Behind a real backend only the interceptor in Python emulates a fabric.
        real = on_devices(program, Path(folder, "real"), str(ranks), cases(ranks, ("false",)), ranks=ranks)
        one = on_devices(program, Path(folder, "one"), str(ranks), cases(ranks, ("false", "true")), ranks=1)
        found[ranks] = real[0], one[0]
    return found


@pytest.mark.parametrize("native", ["false", "true"])
@pytest.mark.parametrize(("ranks", "strategy", "mode"), WAYS)
def test_it_is_rank_0_of_real_ranks(told: dict[int, Any], ranks: int, strategy: str, mode: str, native: str) -> None:
    real, one = told[ranks]
    steps, expected = one[f"{strategy} {mode} {native}"], real[f"{strategy} {mode} false"]
    assert len(steps) == len(expected) == 3
    for step, by_real in zip(steps, expected, strict=True):
        assert step["complete"]
        assert step["rows"] == by_real["rows"]
        assert step["slept_ns"] == by_real["slept_ns"] > 0
        for metric, value in by_real["overlap"].items():
            if metric != "copy_ms":  # the interceptor in Python does not look at copies
                assert step["overlap"][metric] == value, metric
        assert (step["overlap"]["overlap_ratio"] > 0.1) != (strategy in HIDES_NOTHING)
        assert step["loss"] is None


@pytest.mark.parametrize("native", ["false", "true"])
def test_collectives_of_a_communicator_run_one_after_another(told: dict[int, Any], native: str) -> None:
    """FSDP gathers on one stream and scatters on another, through one communicator."""
    for mode in ("observe", "dedicated"):
        for step in told[2][1][f"fsdp {mode} {native}"]:
            spans = sorted((start, end) for _, _, start, end in step["rows"])
            assert all(end <= start for (_, end), (start, _) in pairwise(spans))
