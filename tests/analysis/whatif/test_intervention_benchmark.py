"""What `benchmarks.whatif_interventions` makes of launches, on simulated ones: whose errors are known to be nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.whatif_interventions import DONE, noise, rows
from benchmarks.whatif_plan import RANKS, REGIMES, Regime, bandwidth, straggler, world
from benchmarks.whatif_table import BEGIN, END, NAIVE, figures_of, markdown, placed, table, targets
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
    slower, late, larger = rows(folder, [regime])
    assert max(slower.error, late.error) < 1e-3
    assert 0 < larger.error < 0.1
    assert larger.held
    assert all(each.sign_right and each.effect > 0.05 for each in (slower, late, larger))
    assert slower.naive_error(NAIVE[0]) > 0.1, "scaling what was exposed misses what a slow network exposes besides"
    assert abs(slower.real_ms / slower.base_ms - 1) == pytest.approx(slower.effect)


def test_the_page_gets_the_figures(launched: tuple[Path, Regime]) -> None:
    folder, regime = launched
    found = list(rows(folder, [regime]))
    bases = noise(folder, [regime])
    assert (bases["launches"], bases["step_median"], bases["backend_limited"]) == (3, 0.0, 0.0)
    figures = figures_of(found, bases)
    assert figures["all"]["interventions"] == 2
    assert not targets(figures)["at least 50 interventions"]
    assert targets(figures)["median at most 3 %"]
    section = markdown(figures)
    assert "| **network and stragglers** | 2 | 0 | 0.0 % | 0.0 % | 2 of 2 |" in section
    assert "Missed: at least 50 interventions" in section
    assert len(table(found).splitlines()) == 1 + len(found)
    page = placed(f"before\n{BEGIN}\nold\n{END}\nafter\n", section)
    assert page.startswith("before\n")
    assert page.endswith("\nafter\n")
    assert "old" not in page
    with pytest.raises(ValueError, match="has no"):
        placed("nothing", section)


def test_every_intervention_has_a_base_beside_it() -> None:
    for regime in REGIMES:
        order = [name for name, _ in regime.launches()]
        assert len(order) == len(set(order))
        for number in range(len(regime.interventions)):
            before, behind = (order.index(name) for name in regime.bases_of(number))
            assert before < order.index(f"{number:02}") < behind <= before + 3
