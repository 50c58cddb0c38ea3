"""One process that stands for all ranks of an emulated fabric, in virtual time: each collective takes what the fabric
says, to the nanosecond, and the streams are busy as long.
"""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from aorta.config.fabric import EmulatedFabric
from aorta.distributed.topology import Topology
from aorta.instrument.dispatcher import all_groups
from aorta.instrument.emulation.network import EmulatedNetwork
from aorta.instrument.emulation.stand_in import emulated_ranks
from aorta.records.schema import Step
from tests.device_path.trainings import STEPS, WARM_UP, lengths, looped
from tests.device_path.witness import clipped, length
from tests.simulated import device as simulated
from tests.simulated.programs import needs_device, on_devices

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device, pytest.mark.thorough]
FABRIC = EmulatedFabric(inter_latency_us=5.0, inter_bandwidth_gb_per_s=0.5)
STRATEGIES = {2: ("ddp", "fsdp", "tp", "fsdp1"), 4: ("ddp", "hsdp", "fsdp_tp")}
MODES = ("observe", "dedicated")
WAYS = [(ranks, *way) for ranks, names in STRATEGIES.items() for way in product(names, MODES)]
HIDES_NOTHING = ("tp",)


def seen(topology: Topology, device: torch.device, ranks: int, strategy: str, mode: str) -> list[dict[str, Any]]:
    """On the only process: each step of a case behind the warm-up."""
    fabric = EmulatedNetwork(FABRIC, topology.rank, ranks, None)
    simulated.real_delays(sleep_ns=0)
    lengths(collective=(0, 0.0))
    words = f"parallel={strategy}", f"instrument.mode={mode}", "fabric=emulated", f"fabric.ranks={ranks}"
    lines: list[Step] = []
    with emulated_ranks(fabric, device), looped(words, topology, device, lines) as loop:
        for _ in range(STEPS):
            loop.step()
    slept = [(row.start_ns, row.end_ns) for row in simulated.timeline(device.index, kind="sleep")]
    return [
        {
            "overlap": line.overlap,
            "complete": line.coverage.complete,
            "loss": line.loss,
            "rows": [
                (row.kind, row.start_ns, row.end_ns, fabric.cost_ns(row.kind, row.bytes, ranks_of(row.group), 0))
                for row in line.collectives
            ],
            "slept_ns": length(clipped(slept, (line.start_mono_ns, line.end_mono_ns))),
        }
        for line in lines[WARM_UP:]
    ]


def ranks_of(name: str) -> tuple[int, ...]:
    """The ranks of a process group."""
    return tuple(dist.get_process_group_ranks(next(group for group in all_groups() if group.group_name == name)))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By the way what the only process left; one launch for each number of ranks."""
    found = {}
    for ranks in STRATEGIES:
        cases = {str(way): way for way in WAYS if way[0] == ranks}
        found |= on_devices(seen, tmp_path_factory.mktemp("ranks"), cases, ranks=1, emulated_ranks=ranks)
    return {name: steps for name, (steps,) in found.items()}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way)))
def test_collectives_take_what_the_fabric_says(told: dict[str, Any], way: tuple[int, str, str]) -> None:
    _, strategy, _ = way
    steps = told[str(way)]
    assert len(steps) == STEPS
    for step in steps:
        assert step["complete"]
        assert step["rows"]
        for kind, start_ns, end_ns, cost_ns in step["rows"]:
            assert end_ns - start_ns == cost_ns > 0, kind
        if way[:2] == (2, "fsdp"):  # it gathers on one stream and scatters on another, through one communicator
            spans = sorted((start, end) for _, start, end, _ in step["rows"])
            assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert step["slept_ns"] == pytest.approx(step["overlap"]["comm_ms"] * 1e6, abs=1)
        assert (step["overlap"]["overlap_ratio"] > 0.1) != (strategy in HIDES_NOTHING)
        assert step["loss"] is None
