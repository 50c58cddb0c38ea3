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
from tests.device_path import talking_threads
from tests.device_path.trainings import looped
from tests.runs import ROOT, record
from tests.simulated import device as simulated
from tests.simulated.load import native as simulator
from tests.simulated.programs import launched, needs_device, on_devices

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device, pytest.mark.thorough]
PRIORITY = -3
"""Of AORTA's streams, and of no other."""
DEDICATED = ("instrument.mode=dedicated", f"instrument.stream_priority={PRIORITY}")
ARMS = {
    "off": ("instrument.mode=off",),
    "observe": ("instrument.mode=observe",),
    "dedicated": DEDICATED,
    "all dedicated": (*DEDICATED, "instrument.dedicated_async=true"),
}
SLOW_NS = 20_000_000
"""A collective really takes so long: who does not wait for one reads what was there before."""
WARM_UP, STEPS = 2, 3
STRATEGIES = {
    2: ("ddp", "fsdp1", "fsdp", "tp", "ep workload=moe", "pp", "cp workload=gpt"),
    4: ("hsdp", "fsdp_tp", "fsdp_ep workload=moe", "fsdp_pp"),
}
Told = dict[str, list[dict[str, Any]]]


def every_arm(topology: Topology, device: torch.device, strategy: str) -> dict[str, Any]:
    """On a rank, one after another."""
    words = f"parallel={strategy}".split()
    return {arm: train((*words, *more), topology, device) for arm, more in ARMS.items()}


def train(words: tuple[str, ...], topology: Topology, device: torch.device) -> dict[str, Any]:
    """One run from the same seed."""
    gc.collect()  # what the run before left in cycles
    before_bytes = simulated.counters(device.index).live_bytes
    lines: list[Step] = []
    with looped(("workload.num_layers=2", *words), topology, device, lines, WARM_UP) as loop:
        simulated.real_delays(collective_ns=SLOW_NS)
        for _ in range(STEPS):
            loop.step()
        counters = simulated.counters(device.index)
        torch.accelerator.synchronize(device)
        streams = streams_of(device.index)
    simulated.real_delays(collective_ns=0)
    return {
        "values": [(line.loss, line.grad_norm) for line in lines],
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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Strategy -> of each rank, mode -> what came of it."""
    found: Told = {}
    for ranks, strategies in STRATEGIES.items():
        cases = {strategy: [strategy] for strategy in strategies}
        found |= on_devices(every_arm, tmp_path_factory.mktemp("trained"), cases, ranks)
    return found


@pytest.mark.spec("D7")
@pytest.mark.parametrize("strategy", [one for some in STRATEGIES.values() for one in some])
def test_training_is_as_without_the_instrument(trained: Told, strategy: str) -> None:
    """Losses and norms of gradients bit for bit, with collectives of 20 ms: a missing wait would read poison. As much
    memory; and the host never waits for the device.
    """
    for rank in trained[strategy]:
        off = rank["off"]
        assert all(value == value for values in off["values"] for value in values if value is not None)
        for arm, found in rank.items():
            assert found["values"] == off["values"], arm
            assert found["peak_bytes"] <= 1.01 * off["peak_bytes"], arm
            assert found["host_synchronisations"] == off["host_synchronisations"], arm
        if strategy != "fsdp1":  # whose own limit of all-gathers in flight waits on the host
            assert off["host_synchronisations"] == {}


def test_docs_say_whose_streams_collectives_run_on(trained: Told) -> None:
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
    launched("tests.device_path.talking_threads", str(tmp_path), str(count))
    for rank in (0, 1):
        steps = record(tmp_path, rank).steps
        rows = [row for step in steps for row in step.collectives if row.bytes == talking_threads.ITEMS * 4]
        assert list(Counter(row.group for row in rows).values()) == [count] * talking_threads.THREADS
        assert [step.global_step for step in steps if not step.coverage.complete] == []


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
            assert None not in (step.overlap["overlap_ratio"], step.overlap["compute_stall_ms"])
