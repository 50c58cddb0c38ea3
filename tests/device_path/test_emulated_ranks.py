"""One process that stands for all ranks of an emulated fabric, in virtual time: each collective takes what the fabric
says, to the nanosecond, and the streams are busy as long.
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
MODES = ("observe", "dedicated")
WAYS = [(ranks, *way) for ranks, names in STRATEGIES.items() for way in product(names, MODES)]
HIDES_NOTHING = ("tp",)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """By the number of ranks: what the only process left."""
    found = {}
    for ranks, strategies in STRATEGIES.items():
        cases = {
            f"{strategy} {mode}": [f"parallel={strategy}", f"instrument.mode={mode}"]
            for strategy, mode in product(strategies, MODES)
        }
        words = str(ranks), json.dumps(cases)
        folder = Path(tmp_path_factory.mktemp("ranks"))
        (found[ranks],) = on_devices("tests.device_path.program_emulated_ranks", folder, *words, ranks=1)
    return found


@pytest.mark.parametrize(("ranks", "strategy", "mode"), WAYS)
def test_collectives_take_what_the_fabric_says(told: dict[int, Any], ranks: int, strategy: str, mode: str) -> None:
    steps = told[ranks][f"{strategy} {mode}"]
    assert len(steps) == 3
    for step in steps:
        assert step["complete"]
        assert step["rows"]
        for kind, _, start_ns, end_ns, cost_ns in step["rows"]:
            assert end_ns - start_ns == cost_ns > 0, kind
        assert step["slept_ns"] == pytest.approx(step["overlap"]["comm_ms"] * 1e6, abs=1)
        assert (step["overlap"]["overlap_ratio"] > 0.1) != (strategy in HIDES_NOTHING)
        assert step["loss"] is None


def test_collectives_of_a_communicator_run_one_after_another(told: dict[int, Any]) -> None:
    """FSDP gathers on one stream and scatters on another, through one communicator."""
    for mode in MODES:
        for step in told[2][f"fsdp {mode}"]:
            spans = sorted((start, end) for _, _, start, end, _ in step["rows"])
            assert all(end <= start for (_, end), (start, _) in pairwise(spans))
