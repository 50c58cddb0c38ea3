"""What `benchmarks.whatif_interventions` makes of launches, on simulated ones: whose errors are known to be nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.whatif_interventions import DONE, rows
from benchmarks.whatif_plan import RANKS, Regime, bandwidth, straggler, world
from benchmarks.whatif_table import NAIVE
from tests.analysis.whatif.network_law import Network
from tests.analysis.whatif.simulated_job import MS, Job
from tests.analysis.whatif.simulated_record import record

BASE = Job("ddp", ranks=RANKS, steps=6, warmup=1)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Regime]:
    """A regime whose launches are there, but for the last intervention."""
    changes = (bandwidth(0.125, 0.25), straggler(1, 5), world(512, 1), bandwidth(0.125, 2))
    regime = Regime("simulated, ddp", (), changes)
    slower, larger = Network(gb_per_s=0.125 / 4), Network(world=512, jitter=0.2)
    jobs = {
        "base00": BASE,
        "00": replace(BASE, network=slower),
        "01": replace(BASE, late_rank=1, late_ns=5 * MS),
        "base01": BASE,
        "02": replace(BASE, network=larger),
        "base02": BASE,
    }
    folder = tmp_path_factory.mktemp("launches")
    for name, job in jobs.items():
        record(job, folder / regime.folder / name)
        (folder / regime.folder / name / DONE).write_text(json.dumps([]))
    return folder, regime


def test_interventions_are_held_to_the_launch_that_made_them(launched: tuple[Path, Regime]) -> None:
    folder, regime = launched
    slower, late, larger = rows(folder, [regime], 1)
    assert max(slower.error, late.error) < 1e-3
    assert 0 < larger.error < 0.1
    assert larger.held
    assert all(each.sign_right and each.effect > 0.05 for each in (slower, late, larger))
    assert slower.naive_error(NAIVE[0]) > 0.1, "scaling what was exposed misses what a slow network exposes besides"
    assert abs(slower.real_ms / slower.base_ms - 1) == pytest.approx(slower.effect)
