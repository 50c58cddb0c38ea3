"""A record of two ranks says what a larger world would take, where the network has another law than the predictor's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from aorta.analysis import whatif
from tests.analysis.whatif.network_law import Network
from tests.analysis.whatif.simulated_job import Job
from tests.analysis.whatif.simulated_record import record, truth

WORLDS = (8, 64, 512)
LAWS: tuple[dict[str, float], ...] = (
    {"jitter": 0.2},
    {"slow_node": 0, "slow_factor": 1.1},
    {"jitter": 0.2, "slow_node": 0, "slow_factor": 1.1},
)
DRAWS = 3
HELD = 0.95


def jobs(strategy: str) -> Iterator[Job]:
    for seed in range(DRAWS):
        yield Job(strategy, steps=10, warmup=2, seed=seed, network=Network(gb_per_s=0.3, latency_us=20.0))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp"])
def test_the_stated_interval_holds_another_law(tmp_path: Path, strategy: str) -> None:
    held, said = [], 0.0
    for job in jobs(strategy):
        folder = tmp_path / str(job.seed)
        record(job, folder)
        program = whatif.read_program(folder)
        for world in WORLDS:
            step = whatif.predict(program, whatif.parse_changes([f"ranks={world}"])).launch_ms
            for law in LAWS:
                network = replace(job.network, world=world, seed=job.seed, **law)  # type: ignore[arg-type]
                real_ms = truth(replace(job, network=network)).step_ms
                held.append(step.low <= real_ms <= step.high)
                said = max(said, step.high / step.low)
    assert sum(held) >= HELD * len(held)
    assert said < 1.5, "an interval that holds everything says nothing"


def test_more_ranks_than_recorded_are_flagged_as_computing_alike(tmp_path: Path) -> None:
    """Of more ranks the slowest is slower: the prediction is below what comes, and says what it left out."""
    job = next(jobs("fsdp"))
    record(job, tmp_path / "run")
    found = whatif.predict(whatif.read_program(tmp_path / "run"), whatif.parse_changes(["ranks=32"]))
    real_ms = truth(replace(job, ranks=32)).step_ms
    assert found.job_step_ms.value < real_ms < found.job_step_ms.value * 1.1
    assert any("no more stragglers than there were" in flag for flag in found.flags)
