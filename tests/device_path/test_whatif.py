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
from tests.device_path.trainings import WARM_UP, lengths, looped
from tests.runs import record
from tests.simulated import device as simulated
from tests.simulated.programs import needs_device, on_devices

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device, pytest.mark.thorough]
STEPS = 6
SIZES = 0, 1 << 30
"""Bytes of two collectives, by which the network's formula is known: it is linear in them."""
STEP, RATIO = 1e-3, 2e-3
NETWORK = {"inter_latency_us": 20.0, "inter_bandwidth_gb_per_s": 0.5}
NETWORKS: dict[str, dict[str, float]] = {
    "base": NETWORK,
    "faster": NETWORK | {"inter_bandwidth_gb_per_s": 2.0},
    "slower": NETWORK | {"inter_bandwidth_gb_per_s": 0.2},
    "latency": NETWORK | {"inter_latency_us": 200.0},
}
EXACT, BOUNDED = True, False
"""Bounded: collectives are queued in the base that are not in the changed job, and when the device came to them left no
trace.
"""
ASKED = [
    ("ddp", "base", "faster", "network.bandwidth=x4", EXACT),
    ("ddp", "faster", "base", "network.bandwidth=x0.25", EXACT),
    ("ddp", "base", "slower", "network.bandwidth=x0.4", EXACT),
    ("ddp", "base", "latency", "network.latency=200", EXACT),
    ("ddp", "slower", "faster", "network.bandwidth=x10", BOUNDED),
    ("ddp", "latency", "base", "network.latency=x0.1", BOUNDED),
    ("fsdp", "faster", "base", "network.bandwidth=x0.25", EXACT),
    ("fsdp", "base", "slower", "network.bandwidth=x0.4", EXACT),
    ("fsdp", "base", "latency", "network.latency=200", EXACT),
    ("fsdp", "base", "faster", "network.bandwidth=x4", BOUNDED),
    ("fsdp", "slower", "faster", "network.bandwidth=x10", BOUNDED),
]


def train(topology: Topology, device: torch.device, root: str, strategy: str, name: str) -> None:
    """A strategy on a network leaves a run folder. Nothing here predicts."""
    folder, fabric = Path(root, f"{strategy}-{name}"), EmulatedFabric(**NETWORKS[name])
    rank, ranks = topology.rank, topology.world_size
    lengths()
    network = EmulatedNetwork(fabric, rank, ranks, None)
    for kind in KINDS:
        least, most = (network.cost_ns(kind, size, range(ranks), None) for size in SIZES)
        simulated.collective_lengths(**{kind: (least, (most - least) / SIZES[1])})
    lines: list[Step] = []
    words = f"parallel={strategy}", "instrument.mode=dedicated"
    with looped(words, topology, device, lines, warm_up=0) as loop:
        for _ in range(WARM_UP + STEPS):
            loop.step()
            torch.accelerator.synchronize()  # a step's end is then the device's: nothing of it is left for the next
        groups = {name: list(seen.ranks) for name, seen in loop.instrument.groups.items()}
    folder.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {"timer": "device_event", "platform": "cuda", "backend": "nccl", "device": str(device)}
    head = header(rank, ranks, parallel=strategy, warmup_steps=WARM_UP, **facts)
    steps = [msgspec.structs.replace(line, warmup=number < WARM_UP) for number, line in enumerate(lines)]
    write_rank(folder, head, steps, footer(len(steps), ranks, groups=groups))
    if rank == 0:
        config = {"workload": {"name": "ranking"}, "fabric": asdict(fabric) | {"algorithm": "ring", "sharing": "group"}}
        write_manifest(folder, config, world_size=ranks, platform="cuda")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder for each strategy and network; one launch for all."""
    folder = tmp_path_factory.mktemp("whatif")
    on_devices(train, folder, {" ".join(way): (str(folder), *way) for way in product(("ddp", "fsdp"), NETWORKS)})
    return folder


def measured(folder: Path) -> tuple[float, float]:
    """Median step time of the slower rank in ms, and median ratio over rank-steps."""
    ranks = [[step for step in record(folder, rank).steps if not step.warmup] for rank in (0, 1)]
    steps = [max(step.end_mono_ns - step.start_mono_ns for step in both) for both in zip(*ranks, strict=True)]
    ratios = [step.overlap["overlap_ratio"] for steps in ranks for step in steps]
    return statistics.median(steps) / 1e6, statistics.median(ratio for ratio in ratios if ratio is not None)


@pytest.mark.parametrize(("strategy", "before", "after", "change", "is_exact"), ASKED)
def test_what_was_predicted_came(
    folders: Path, strategy: str, before: str, after: str, change: str, is_exact: bool
) -> None:
    """To a thousandth; where arrivals left no trace it says so, and the interval holds."""
    step_ms, ratio = measured(folders / f"{strategy}-{after}")
    found = whatif.predict(whatif.read_program(folders / f"{strategy}-{before}"), whatif.parse_changes([change]))
    if is_exact:
        assert found.launch_ms.value == pytest.approx(step_ms, rel=STEP)
        assert found.overlap_ratio is not None
        assert found.overlap_ratio.value == pytest.approx(ratio, abs=RATIO)
        assert measured(folders / f"{strategy}-{before}")[0] != pytest.approx(step_ms, rel=10 * STEP)
    else:
        assert any("were queued behind another" in note for note in found.notes)
        assert found.launch_ms.low <= step_ms <= found.launch_ms.high
