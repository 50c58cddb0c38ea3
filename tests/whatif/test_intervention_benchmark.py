"""What `benchmarks.whatif_interventions` makes of launches, on simulated ones: whose errors are known to be nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.whatif_interventions import DONE, RANKS, Regime, bandwidths, errors, rows, stragglers, worlds
from tests.whatif.event_loop import Network
from tests.whatif.simulated_job import MS, Job
from tests.whatif.simulated_record import record

BASE = Job("ddp", ranks=RANKS, steps=6, warmup=1)


def test_interventions_are_held_to_the_launch_that_made_them(tmp_path: Path) -> None:
    changes = (*bandwidths(0.125, 0.25), *stragglers(1, 5), *worlds(1, 512), *bandwidths(0.125, 2))
    regime = Regime("simulated, ddp", (), changes)
    jobs = {
        "base00": BASE,
        "00": replace(BASE, network=Network(gb_per_s=0.125 / 4)),
        "01": replace(BASE, late_rank=1, late_ns=5 * MS),
        "base01": BASE,
        "02": replace(BASE, network=Network(world=512, jitter=0.2)),
        "base02": BASE,
    }  # the launch of the last intervention is missing
    for name, job in jobs.items():
        record(job, tmp_path / regime.folder / name)
        (tmp_path / regime.folder / name / DONE).write_text(json.dumps([]))
    slower, late, larger = rows(tmp_path, [regime], 1)
    for row in (slower, late):
        assert row.predicted_ms == pytest.approx(row.real_ms, rel=1e-3)
    assert larger.low_ms <= larger.real_ms <= larger.high_ms
    assert larger.predicted_ms == pytest.approx(larger.real_ms, rel=0.1)
    found = errors([slower, late, larger])
    assert (found["made"], found["large"], found["sign_right"], found["held"]) == (3, 3, 3, 3)
    assert found["median"] < 1e-3
