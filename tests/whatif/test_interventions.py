"""Predictions against really making the change, in the simulator: what a what-if says is what then happens.

Each change is made both ways: from the record of the base to the changed job, and from that one's record back.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest

from aorta import whatif
from tests.whatif.event_loop import Network
from tests.whatif.simulated_job import MS, Job
from tests.whatif.simulated_record import record, truth

STRATEGIES = ("ddp", "hsdp", "fsdp_tp")
STEP, RATIO, EXPOSED_MS = 1e-3, 2e-3, 0.05
"""How far a prediction of the network or of a straggler may be off: part of the step, ratio, milliseconds."""


class Change(NamedTuple):
    """A change of the network and of the job, and how a what-if is asked for it and for taking it back."""

    name: str
    network: dict[str, Any]
    job: dict[str, int]
    there: str
    back: str | None = None

    def make(self, job: Job) -> Job:
        return replace(job, network=replace(job.network, **self.network), **self.job)


CHANGES = (
    Change("four times the bandwidth", {"gb_per_s": 0.5}, {}, "network.bandwidth=x4", "network.bandwidth=x0.25"),
    Change("a third of it", {"gb_per_s": 0.125 / 3}, {}, "network.bandwidth=0.0416667", "network.bandwidth=0.125"),
    Change("latency", {"latency_us": 2000.0}, {}, "network.latency=x40", "network.latency=50"),
    Change("a tree", {"algorithm": "tree"}, {}, "network.algorithm=tree", "network.algorithm=ring"),
    Change("a straggler", {}, {"late_rank": 1, "late_ns": 4 * MS}, "rank.1.late_ms=4", "rank.1.late_ms=-4"),
    Change(
        "a straggler and a faster network",
        {"gb_per_s": 0.25},
        {"late_rank": 2, "late_ns": 6 * MS},
        "rank.2.late_ms=6 network.bandwidth=x2",
        "network.bandwidth=x0.5 rank.2.late_ms=-6",
    ),
    Change("a larger world", {"world": 64}, {}, "ranks=64"),
    Change("no communication at all", {"gb_per_s": 1e9, "latency_us": 0.0}, {"backend_ns": 0}, "comm=free"),
)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """What was read of the record of a job; made once."""

    @cache
    def made(job: Job) -> whatif.RunProgram:
        folder = tmp_path_factory.mktemp("job") / "run"
        record(job, folder)
        return whatif.read_program(folder)

    return made


took = cache(truth)


WAYS = [
    pytest.param(strategy, change, back, marks=[pytest.mark.thorough] * (strategy != "ddp"))
    for strategy, change, back in product(STRATEGIES, CHANGES, (False, True))
    if (not back or change.back) and (strategy == "ddp" or "world" not in change.network)  # a group of all ranks
]


@pytest.mark.parametrize(("strategy", "change", "back"), WAYS, ids=lambda value: getattr(value, "name", None))
def test_network_and_stragglers(program, strategy, change, back):
    job = Job(strategy, ranks=4, steps=6, warmup=0)
    base, made = (change.make(job), job) if back else (job, change.make(job))
    before, after = took(base), took(made)
    found = whatif.predict(program(base), whatif.parse_changes((change.back if back else change.there).split()))
    assert found.launch_ms.value == pytest.approx(after.step_ms, rel=STEP)
    assert found.overlap_ratio is not None
    assert found.exposed_comm_ms is not None
    if after.ratio or change.name != "no communication at all":
        assert found.overlap_ratio.value == pytest.approx(after.ratio, abs=RATIO)
    assert found.exposed_comm_ms.value == pytest.approx(after.exposed_ms, abs=EXPOSED_MS)
    if change.name != "a tree":
        assert before.step_ms != pytest.approx(after.step_ms, rel=10 * STEP), "nothing was changed"


LAWS: tuple[dict[str, float], ...] = (
    {"jitter": 0.2},
    {"slow_node": 0, "slow_factor": 1.1},
    {"jitter": 0.2, "slow_node": 0, "slow_factor": 1.1},
)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_stated_interval_holds_another_law(program, strategy):
    held, said = [], 0.0
    for seed, world in product(range(3), (8, 64, 512)):
        job = Job(strategy, steps=10, seed=seed, network=Network(gb_per_s=0.3, latency_us=20.0))
        step = whatif.predict(program(job), whatif.parse_changes([f"ranks={world}"])).launch_ms
        said = max(said, step.high / step.low)
        for law in LAWS:
            real = replace(job, network=replace(job.network, world=world, seed=seed, **law))
            held.append(step.low <= truth(real).step_ms <= step.high)
    assert sum(held) >= 0.95 * len(held)
    assert said < 1.5, "an interval that holds everything says nothing"
