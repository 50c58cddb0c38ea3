"""K3 (docs/dev/measuring.md): a rank that is late to every collective costs its peer waiting, and no transfer time."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from aorta.analysis.dataframes import collectives_frame
from aorta.read.record import load_run
from tests.known_answers.again import undisturbed
from tests.known_answers.launch import launch, link
from tests.known_answers.program import Case

pytestmark = [pytest.mark.dist, pytest.mark.alone]
TRANSFER_MS = 40.0
# Shorter and longer than a transfer: a late arrival must not hide inside one.
LATE_MS = (0.0, 25.0, 70.0)


def test_a_straggler_costs_its_peer_waiting_and_no_transfer(tmp_path_factory: pytest.TempPathFactory) -> None:
    as_constructed(undisturbed(tmp_path_factory, "straggler", measure, as_constructed))


def measure(folder: Path) -> dict[float, pd.DataFrame]:
    """Delay of rank 1 in milliseconds -> the run's collectives, matched across ranks."""
    late_by = {late: {"straggler_rank": 1, "straggler_ms": late} for late in LATE_MS}
    cases = {late: Case(f"{late:g}", "waited", 5.0, link(TRANSFER_MS) | late_by[late], blocks=4) for late in LATE_MS}
    launch(folder, list(cases.values()))
    seen = {}
    for late, case in cases.items():
        rows = collectives_frame(load_run(folder / case.name))
        seen[late] = rows[~rows["warmup"]]
    return seen


def as_constructed(seen: dict[float, pd.DataFrame]) -> None:
    for rows in seen.values():
        assert set(rows["end_source"]) == {"emulated"}
        assert rows["transfer_ms"].median() == pytest.approx(TRANSFER_MS, rel=0.02)
    for late in LATE_MS[1:]:
        assert waited_ms(seen[late], 0) - waited_ms(seen[0.0], 0) == pytest.approx(late, abs=2.0)
        assert waited_ms(seen[late], 1) == pytest.approx(0.0, abs=1.0)


def waited_ms(rows: pd.DataFrame, rank: int) -> float:
    return float(rows.loc[rows["rank"] == rank, "wait_ms"].median())
