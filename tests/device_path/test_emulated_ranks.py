"""One process that stands for all ranks of an emulated fabric, in virtual time: each collective takes what the fabric
says, to the nanosecond, and the streams are busy as long.
"""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path
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
from tests.device_path.launch import on_devices
from tests.device_path.trainings import MATH, SHAPE
from tests.device_path.witness import clipped, length
from tests.loop import Loop
from tests.simulated import device as simulated
from tests.simulated.programs import needs_device

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device, pytest.mark.thorough]
WARM_UP, STEPS = 3, 3
FABRIC = EmulatedFabric(inter_latency_us=5.0, inter_bandwidth_gb_per_s=0.5)


def every_case(topology: Topology, device: torch.device, ranks: int, cases: dict[str, list[str]]) -> dict[str, Any]:
    """On the only process, one after another."""
    fabric = EmulatedNetwork(FABRIC, topology.rank, ranks, None)
    simulated.real_delays(sleep_ns=0)
    more = "fabric=emulated", f"fabric.ranks={ranks}"
    with emulated_ranks(fabric, device):
        return {name: seen([*words, *more], topology, device, fabric) for name, words in cases.items()}


def seen(words: list[str], topology: Topology, device: torch.device, fabric: EmulatedNetwork) -> list[dict[str, Any]]:
    """Each step of a case behind the warm-up."""
    simulated.lengths(**dict.fromkeys(simulated.CLASSES, (0, 0.0)), operators=dict.fromkeys(MATH, (23_000, 0.0)))
    simulated.costs(launch_ns=0)
    simulated.collective_lengths(default=(0, 0.0))
    lines: list[Step] = []
    one = Loop((*SHAPE, *words), topology, device, lines.append)
    for _ in range(WARM_UP):
        one.step()
    torch.accelerator.synchronize()
    simulated.reset()
    for _ in range(STEPS):
        one.step()
    one.finish()
    simulated.no_races()
    slept = [(row.start_ns, row.end_ns) for row in simulated.timeline(device.index, kind="sleep")]
    return [
        {
            "overlap": line.overlap,
            "complete": line.coverage.complete,
            "loss": line.loss,
            "rows": [
                (
                    row.kind,
                    row.bytes,
                    row.start_ns,
                    row.end_ns,
                    fabric.cost_ns(row.kind, row.bytes, ranks_of(row.group), 0),
                )
                for row in line.collectives
            ],
            "slept_ns": length(clipped(slept, (line.start_mono_ns, line.end_mono_ns))),
        }
        for line in lines[WARM_UP:]
    ]


def ranks_of(name: str) -> tuple[int, ...]:
    """The ranks of a process group."""
    return tuple(dist.get_process_group_ranks(next(group for group in all_groups() if group.group_name == name)))


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
        folder = Path(tmp_path_factory.mktemp("ranks"))
        (found[ranks],) = on_devices(every_case, folder, ranks, cases, ranks=1, emulated_ranks=ranks)
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
