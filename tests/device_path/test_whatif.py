"""What-if predictions on the simulated device, in virtual time: the change is really made, and the record of the base
said what came.

Training, streams, events and the record are the real ones; the times of kernels and collectives are set, so the answers
are the same under any load.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from aorta import whatif
from aorta.config.schema import EmulatedFabric
from aorta.distributed.topology import Topology
from aorta.instrument.emulation.network import EmulatedNetwork
from aorta.records.schema import Step
from aorta.timeline.classes import KINDS
from tests.analysis.builders import footer, header, write_manifest, write_rank
from tests.device_path.launch import on_devices
from tests.device_path.trainings import MATH, SHAPE
from tests.loop import Loop
from tests.runs import record
from tests.simulated import device as simulated
from tests.simulated.programs import needs_device

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device, pytest.mark.thorough]
WARM_UP, STEPS = 3, 6
SIZES = 0, 1 << 30
"""Bytes of two collectives, by which the network's formula is known: it is linear in them."""


def every_case(topology: Topology, device: torch.device, root: str) -> None:
    """On a rank: each strategy on each network leaves a run folder. Nothing here predicts."""
    for strategy, (name, settings) in product(STRATEGIES, CHANGED.items()):
        train(Path(root, f"{strategy}-{name}"), strategy, EmulatedFabric(**settings), topology, device)


def train(folder: Path, strategy: str, fabric: EmulatedFabric, topology: Topology, device: torch.device) -> None:
    """One case, and its record."""
    # Only the mathematics of blocks takes time: what else runs on the computing stream is no computation of the model.
    simulated.lengths(**dict.fromkeys(simulated.CLASSES, (0, 0.0)), operators=dict.fromkeys(MATH, (23_000, 0.0)))
    simulated.costs(launch_ns=0)
    lines: list[Step] = []
    network, ranks = EmulatedNetwork(fabric, topology.rank, topology.world_size, None), range(topology.world_size)
    for kind in KINDS:
        least, most = (network.cost_ns(kind, size, ranks, None) for size in SIZES)
        simulated.collective_lengths(**{kind: (least, (most - least) / SIZES[1])})
    one = Loop((*SHAPE, f"parallel={strategy}", "instrument.mode=dedicated"), topology, device, lines.append)
    for _ in range(WARM_UP + STEPS):
        one.step()
        torch.accelerator.synchronize()  # a step's end is then the device's: nothing of it is left for the next
    groups = {name: list(seen.ranks) for name, seen in one.instrument.groups.items()}
    one.finish()
    folder.mkdir(parents=True, exist_ok=True)
    head = header(
        topology.rank,
        topology.world_size,
        parallel=strategy,
        timer="device_event",
        platform="cuda",
        device=str(device),
        backend="nccl",
        warmup_steps=WARM_UP,
    )
    steps = [msgspec.structs.replace(line, warmup=number < WARM_UP) for number, line in enumerate(lines)]
    write_rank(folder, head, steps, footer(len(steps), topology.world_size, groups=groups))
    if topology.rank == 0:
        config = {"workload": {"name": "ranking"}, "fabric": asdict(fabric) | {"algorithm": "ring", "sharing": "group"}}
        write_manifest(folder, config, world_size=topology.world_size, platform="cuda")


STEP, RATIO = 1e-3, 2e-3
NETWORK = {"inter_latency_us": 20.0, "inter_bandwidth_gb_per_s": 0.5}
CHANGED: dict[str, dict[str, Any]] = {
    "base": NETWORK,
    "faster": NETWORK | {"inter_bandwidth_gb_per_s": 2.0},
    "slower": NETWORK | {"inter_bandwidth_gb_per_s": 0.2},
    "latency": NETWORK | {"inter_latency_us": 200.0},
}
ASKED = {
    ("base", "faster"): "network.bandwidth=x4",
    ("faster", "base"): "network.bandwidth=x0.25",
    ("base", "slower"): "network.bandwidth=x0.4",
    ("slower", "faster"): "network.bandwidth=x10",
    ("base", "latency"): "network.latency=200",
    ("latency", "base"): "network.latency=x0.1",
}
STRATEGIES = ("ddp", "fsdp")
EXACT = [
    *(("ddp", *way) for way in ASKED if way[0] in ("base", "faster")),
    *(("fsdp", *way) for way in (("faster", "base"), ("base", "slower"), ("base", "latency"))),
]
BOUNDED = [
    ("ddp", "slower", "faster"),
    ("ddp", "latency", "base"),
    ("fsdp", "base", "faster"),
    ("fsdp", "slower", "faster"),
]
"""Collectives are queued in the base that are not in the changed job: when the device came to them left no trace."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder for each strategy and network; one launch for all."""
    folder = Path(tmp_path_factory.mktemp("whatif"))
    on_devices(every_case, folder, str(folder))
    return folder


def measured(folder: Path) -> tuple[float, float]:
    """Median step time of the slower rank in ms, and median ratio over rank-steps."""
    ranks = [[step for step in record(folder, rank).steps if not step.warmup] for rank in (0, 1)]
    steps = [max(step.end_mono_ns - step.start_mono_ns for step in both) for both in zip(*ranks, strict=True)]
    ratios = [step.overlap["overlap_ratio"] for steps in ranks for step in steps]
    return statistics.median(steps) / 1e6, statistics.median(ratio for ratio in ratios if ratio is not None)


def predicted(folder: Path, change: str) -> whatif.Prediction:
    return whatif.predict(whatif.read_program(folder), whatif.parse_changes([change]))


@pytest.mark.parametrize(("strategy", "before", "after"), EXACT)
def test_what_was_predicted_came(folders: Path, strategy: str, before: str, after: str) -> None:
    step_ms, ratio = measured(folders / f"{strategy}-{after}")
    found = predicted(folders / f"{strategy}-{before}", ASKED[before, after])
    assert found.launch_ms.value == pytest.approx(step_ms, rel=STEP)
    assert found.overlap_ratio is not None
    assert found.overlap_ratio.value == pytest.approx(ratio, abs=RATIO)
    assert measured(folders / f"{strategy}-{before}")[0] != pytest.approx(step_ms, rel=10 * STEP)


@pytest.mark.parametrize(("strategy", "before", "after"), BOUNDED)
def test_where_arrivals_left_no_trace_it_says_so_and_the_interval_holds(
    folders: Path, strategy: str, before: str, after: str
) -> None:
    step_ms, _ = measured(folders / f"{strategy}-{after}")
    found = predicted(folders / f"{strategy}-{before}", ASKED[before, after])
    assert any("were queued behind another" in note for note in found.notes)
    assert found.launch_ms.low <= step_ms <= found.launch_ms.high
