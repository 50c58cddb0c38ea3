"""What the instrument must leave as it is on a device: values, memory, and a host that never waits; and the
examples of the documentation, round a loop of one's own.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from aorta.distributed.topology import Topology
from aorta.records.schema import Step
from tests.device_path.launch import launched, on_devices
from tests.device_path.trainings import SHAPE
from tests.loop import Loop
from tests.recording import talking_threads
from tests.runs import ROOT, record
from tests.simulated import device as simulated
from tests.simulated.load import native as simulator
from tests.simulated.programs import needs_device

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device, pytest.mark.thorough]
PRIORITY = -3
"""Of AORTA's streams, and of no other."""
ARMS = {
    "off": ("instrument.mode=off",),
    "observe": ("instrument.mode=observe",),
    "dedicated": ("instrument.mode=dedicated", f"instrument.stream_priority={PRIORITY}"),
    "all dedicated": (
        "instrument.mode=dedicated",
        "instrument.dedicated_async=true",
        f"instrument.stream_priority={PRIORITY}",
    ),
}
SLOW_NS = 20_000_000
"""A collective really takes so long: who does not wait for one reads what was there before."""
WARM_UP, STEPS = 2, 3


def every_strategy_and_arm(topology: Topology, device: torch.device, strategies: list[str]) -> dict[str, Any]:
    """On a rank, one after another."""
    return {
        strategy: {
            arm: train((*f"parallel={strategy}".split(), *words), topology, device) for arm, words in ARMS.items()
        }
        for strategy in strategies
    }


def train(words: tuple[str, ...], topology: Topology, device: torch.device) -> dict[str, Any]:
    """One run from the same seed."""
    gc.collect()  # what the run before left in cycles
    before_bytes = simulated.counters(device.index).live_bytes
    lines: list[Step] = []
    one = Loop((*SHAPE, "workload.num_layers=2", *words), topology, device, lines.append)
    for _ in range(WARM_UP):
        one.step()
    simulated.reset()
    simulated.real_delays(collective_ns=SLOW_NS)
    for _ in range(STEPS):
        one.step()
    counters = simulated.counters(device.index)
    torch.accelerator.synchronize(device)
    streams = streams_of(device.index)
    one.finish()
    simulated.real_delays(collective_ns=0)
    simulated.no_races()
    return {
        "losses": [line.loss for line in lines],
        "grad_norms": [line.grad_norm for line in lines],
        "peak_bytes": counters.peak_bytes - before_bytes,
        "host_synchronisations": dict(counters.host_synchronisations),
        "streams": streams,
    }


def streams_of(device: int) -> dict[str, list[str]]:
    """Whose streams each kind of collective ran on."""
    found: dict[str, set[str]] = {}
    backend = simulated.backend_streams(device)
    for row in simulated.timeline(device, kind="collective"):
        if row.stream == 0:
            whose = "compute"
        elif row.stream in backend:
            whose = "backend"
        else:
            priority = int(simulator().stream_priority(row.device, row.stream))
            whose = "AORTA" if priority == PRIORITY else "strategy"
        found.setdefault(row.name, set()).add(whose)
    return {name: sorted(whose) for name, whose in found.items()}


STRATEGIES = {
    2: ("ddp", "fsdp1", "fsdp", "tp", "ep workload=moe", "pp", "cp workload=gpt"),
    4: ("hsdp", "fsdp_tp", "fsdp_ep workload=moe", "fsdp_pp"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Strategy -> of each rank, mode -> what came of it."""
    found: dict[str, list[dict[str, Any]]] = {}
    for ranks, strategies in STRATEGIES.items():
        folder = Path(tmp_path_factory.mktemp("trained"))
        by_rank = on_devices(every_strategy_and_arm, folder, strategies, ranks=ranks)
        for strategy in strategies:
            found[strategy] = [rank[strategy] for rank in by_rank]
    return found


every_strategy = pytest.mark.parametrize("strategy", [one for some in STRATEGIES.values() for one in some])


@pytest.mark.spec("D7")
@every_strategy
def test_losses_and_gradient_norms_are_those_without_the_instrument(trained: dict[str, Any], strategy: str) -> None:
    """Bit for bit, with collectives of 20 ms: a missing wait would read poison."""
    for rank in trained[strategy]:
        off = rank["off"]
        assert all(loss == loss for loss in off["losses"])
        for arm, found in rank.items():
            assert found["losses"] == off["losses"], arm
            assert found["grad_norms"] == off["grad_norms"], arm


@every_strategy
def test_peak_memory_is_that_without_the_instrument(trained: dict[str, Any], strategy: str) -> None:
    for rank in trained[strategy]:
        for arm, found in rank.items():
            assert found["peak_bytes"] <= 1.01 * rank["off"]["peak_bytes"], arm


@every_strategy
def test_the_host_never_waits_for_the_device(trained: dict[str, Any], strategy: str) -> None:
    for rank in trained[strategy]:
        for arm, found in rank.items():
            assert found["host_synchronisations"] == rank["off"]["host_synchronisations"], arm
        if strategy != "fsdp1":  # whose own limit of all-gathers in flight waits on the host
            assert rank["off"]["host_synchronisations"] == {}


def test_docs_say_whose_streams_collectives_run_on(trained: dict[str, Any]) -> None:
    """Of every strategy, kind and mode; `stream_priority` reaches AORTA's streams only."""
    strategies: dict[str, dict[str, None]] = {}
    for strategy, by_rank in trained.items():
        for rank in by_rank:
            off, observed, moved, all_moved = (found["streams"] for found in rank.values())
            assert observed == off
            for name, before in sorted(off.items()):
                whose = (before, moved[name], all_moved[name])
                row = f"{name} | {' | '.join(map(', '.join, whose))}"
                strategies.setdefault(row, {})[f"`{strategy.split()[0]}`"] = None
    table = [
        "| strategies | collective | without AORTA, or `observe` | `dedicated` | with `dedicated_async` |",
        "|---|---|---|---|---|",
        *(f"| {', '.join(names)} | {row} |" for row, names in strategies.items()),
    ]
    assert "\n".join(table) in Path("docs/dev/devices.md").read_text(), "\n".join(table)


def test_what_threads_issue_that_never_sleep_is_recorded_to_the_last(tmp_path: Path) -> None:
    count = 200
    launched("tests.recording.talking_threads", str(tmp_path), str(count), "fsdp", "native")
    for rank in (0, 1):
        read = record(tmp_path, rank)
        seen = Counter(
            row.group for step in read.steps for row in step.collectives if row.bytes == talking_threads.ITEMS * 4
        )
        assert list(seen.values()) == [count] * talking_threads.THREADS
        assert [step.global_step for step in read.steps if not step.coverage.complete] == []


@pytest.mark.parametrize("example", ["ddp", "fsdp2"])
def test_an_example_records_on_a_device(example: str, tmp_path: Path) -> None:
    launched(ROOT / f"docs/examples/{example}.py", str(tmp_path))
    ranks = json.loads((tmp_path / "run.json").read_text())["topology"]
    assert [rank["interceptor"] for rank in ranks] == ["native", "native"]
    for rank in (0, 1):
        written = record(tmp_path, rank)
        assert (written.header.platform, written.header.timer) == ("cuda", "cuda_event")
        assert written.footer is not None
        assert written.footer.device_clock is not None
        for step in written.steps:
            assert step.coverage.complete, step.coverage.reason
            assert {row.end_source for row in step.collectives} == {"event"}
            assert step.overlap["overlap_ratio"] is not None
            assert step.overlap["compute_stall_ms"] is not None
