"""What `benchmarks.whatif_interventions` makes of launches, on simulated ones: whose errors are known to be nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.whatif_interventions import DONE, measured, noise, rows
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
    slower, late, larger = rows(folder, [regime], 1)
    assert max(slower.error, late.error) < 1e-3
    assert 0 < larger.error < 0.1
    assert larger.held
    assert all(each.sign_right and each.effect > 0.05 for each in (slower, late, larger))
    assert slower.naive_error(NAIVE[0]) > 0.1, "scaling what was exposed misses what a slow network exposes besides"
    assert abs(slower.real_ms / slower.base_ms - 1) == pytest.approx(slower.effect)


def test_the_page_gets_the_figures(launched: tuple[Path, Regime]) -> None:
    folder, regime = launched
    found = list(rows(folder, [regime], 1))
    bases = noise(folder, [regime], 1)
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


def test_launched_twice_a_prediction_is_held_to_the_mean_of_both(tmp_path: Path) -> None:
    regime = Regime("simulated, ddp", (), (straggler(1, 5),))
    by_itself = [
        replace(BASE, late_rank=1, late_ns=late * MS) for late in (5, 9)
    ]  # a machine that is not the same twice
    for name, job in {"base00": BASE, "00": by_itself[0], "01": by_itself[1], "base01": BASE}.items():
        record(job, tmp_path / regime.folder / name)
        (tmp_path / regime.folder / name / DONE).write_text(json.dumps([]))
    (twice,) = rows(tmp_path, [regime], 2)
    real_ms = [measured(tmp_path / regime.folder / name).step_ms for name in ("00", "01")]
    assert real_ms[0] < real_ms[1]
    assert twice.real_ms == pytest.approx(sum(real_ms) / 2)
    assert twice.predicted_ms == pytest.approx(real_ms[0], rel=1e-3)
    (tmp_path / regime.folder / "01" / DONE).unlink()
    assert list(rows(tmp_path, [regime], 2)) == []


@pytest.mark.parametrize("rounds", [1, 2])
def test_every_intervention_has_a_base_beside_it(rounds: int) -> None:
    for regime in REGIMES:
        order = [name for name, _ in regime.launches(rounds)]
        assert len(order) == len(set(order))
        seen = 0
        for number in range(len(regime.interventions)):
            for made, bases in regime.launches_of(number, rounds):
                before, behind = (order.index(name) for name in bases)
                assert before < order.index(made) < behind <= before + 3
                seen += 1
        assert seen == rounds * len(regime.interventions)
