"""The record of a real training against the simulated device's own timeline, in virtual time: to the nanosecond.

Known by construction: only the mathematics of blocks takes time on the computing stream, collectives take what the test
sets, and the device says when each ran. Under any load of the machine the answer is the same, so nothing is retried.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.device_path.launch import on_devices
from tests.device_path.trainings import every_case
from tests.simulated.programs import needs_device
from tests.trained_ways import DECODERS, OF_EXPERTS

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device, pytest.mark.thorough]
RATIO, LENGTH_NS = 1e-9, 1
MODES = ("dedicated", "observe")
SHARING_SEQUENCES = ("gpt-cp", "gpt-fsdp_cp")
"""Of decoders what the ranking model does not take: on the other strategies a record knows no workload."""


@dataclass(frozen=True)
class Way:
    """One way to train."""

    strategy: str
    mode: str
    accumulation: int = 1
    ranks: int = 2
    workload: str = "ranking"

    @property
    def name(self) -> str:
        workload = "" if self.workload == "ranking" else f"{self.workload}-"
        return f"{workload}{self.strategy}-{self.mode}" + ("-accumulating" if self.accumulation > 1 else "")

    @property
    def words(self) -> tuple[str, ...]:
        return (
            f"workload={self.workload}",
            f"parallel={self.strategy}",
            f"instrument.mode={self.mode}",
            f"training.gradient_accumulation={self.accumulation}",
        )


WAYS = [
    *(Way(strategy, mode) for strategy, mode in product(("ddp", "fsdp1", "fsdp", "tp"), MODES)),
    *(Way(strategy, "dedicated", accumulation=2) for strategy in ("ddp", "fsdp1", "fsdp")),
    *(Way(strategy, mode, ranks=4) for strategy, mode in product(("hsdp", "fsdp_tp"), MODES)),
    *(
        Way(way.strategy, mode, ranks=way.ranks, workload=way.workload)
        for way, mode in product(DECODERS, MODES)
        if way.strategy in OF_EXPERTS or (way.name in SHARING_SEQUENCES and mode == "dedicated")
    ),
]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[dict[str, Any]]]]:
    """Of each way the steps of each rank; one launch for two ranks and one for four."""
    found: dict[str, list[list[dict[str, Any]]]] = {}
    for ranks in (2, 4):
        ways = [way for way in WAYS if way.ranks == ranks]
        cases = [{"words": way.words} for way in ways]
        folder = Path(tmp_path_factory.mktemp("overlap"))
        by_rank = on_devices(every_case, folder, cases, ranks=ranks)
        for number, way in enumerate(ways):
            found[way.name] = [of_rank[number] for of_rank in by_rank]
    return found


every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)


@pytest.mark.spec("D6")
@every_way
def test_every_collective_starts_and_ends_where_the_devices_own_does(told: dict[str, Any], way: Way) -> None:
    for steps in told[way.name]:
        for step in steps:
            assert step["coverage"]
            assert step["collectives"]
            for kind, start_ns, own_start_ns, end_ns, own_end_ns in step["collectives"]:
                assert (start_ns - own_start_ns, end_ns - own_end_ns) == (0, 0), kind


@every_way
def test_ratio_and_lengths_are_the_devices_own(told: dict[str, Any], way: Way) -> None:
    for steps in told[way.name]:
        for step in steps:
            overlap, lengths = step["overlap"], dict(step["truth"])
            assert overlap["overlap_ratio"] == pytest.approx(lengths.pop("ratio"), abs=RATIO)
            for metric, length_ns in lengths.items():
                assert overlap[metric] * 1e6 == pytest.approx(length_ns, abs=LENGTH_NS), metric


@every_way
def test_the_answer_is_no_trivial_one(told: dict[str, Any], way: Way) -> None:
    """Sharded and replicated strategies hide a good part, and stall; tensor parallelism hides nothing, and of expert
    parallelism only what is left of DDP's all-reduces.
    """
    for steps in told[way.name]:
        for step in steps:
            if way.strategy == "tp":
                assert step["truth"]["ratio"] == 0
            else:
                assert (0.05 if way.strategy in OF_EXPERTS else 0.1) < step["truth"]["ratio"] < 0.95
            assert step["truth"]["compute_stall_ms"] > 0
            assert step["truth"]["copy_ms"] > 0  # the batch, and the loss
