"""The record of a real training against the simulated device's own timeline, in virtual time: to the nanosecond.

Known by construction: only the mathematics of blocks takes time on the computing stream, collectives take what the test
sets, and the device says when each ran. Under any load of the machine the answer is the same, so nothing is retried.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import pytest

from tests.device_path.trainings import seen
from tests.simulated.programs import needs_device, on_devices
from tests.trained_ways import DECODERS, OF_EXPERTS

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device, pytest.mark.thorough]
RATIO, LENGTH_NS = 1e-9, 1
MODES = ("dedicated", "observe")
SHARING_SEQUENCES = ("gpt-cp", "gpt-fsdp_cp")
"""Of decoders what the ranking model does not take: on the other strategies a record knows no workload."""


class Way(NamedTuple):
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
    found = {}
    for ranks in (2, 4):
        cases = {way.name: [way.words] for way in WAYS if way.ranks == ranks}
        found |= on_devices(seen, tmp_path_factory.mktemp("overlap"), cases, ranks)
    return found


@pytest.mark.spec("D6")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_a_record_is_the_devices_own_timeline(told: dict[str, list[Any]], way: Way) -> None:
    """Starts and ends of every collective, the ratio and the lengths."""
    for step in (step for steps in told[way.name] for step in steps):
        assert step["coverage"]
        assert step["collectives"]
        for kind, start_ns, own_start_ns, end_ns, own_end_ns in step["collectives"]:
            assert (start_ns - own_start_ns, end_ns - own_end_ns) == (0, 0), kind
        overlap, truth = step["overlap"], dict(step["truth"])
        ratio = truth.pop("ratio")
        assert overlap["overlap_ratio"] == pytest.approx(ratio, abs=RATIO)
        for metric, length_ns in truth.items():
            assert overlap[metric] * 1e6 == pytest.approx(length_ns, abs=LENGTH_NS), metric
        # And that is no trivial answer: sharded and replicated strategies hide a good part, and stall; tensor
        # parallelism hides nothing, and of expert parallelism only what is left of DDP's all-reduces.
        least = 0.05 if way.strategy in OF_EXPERTS else 0.1
        assert ratio == 0 if way.strategy == "tp" else least < ratio < 0.95
        assert truth["compute_stall_ms"] > 0
        assert truth["copy_ms"] > 0  # the batch, and the loss
