"""K3 (docs/measuring.md): a rank that is late to every collective costs its peer waiting, and no transfer time; and the
report names it.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from aorta.analysis.frames import collective_rows
from aorta.analysis.matching import matched
from aorta.analysis.readers.run_folder import load_run
from aorta.analysis.report import Report, write_report
from tests.known_answers.launch import launch, link
from tests.known_answers.program import Case

pytestmark = pytest.mark.dist
TRANSFER_MS = 40.0
# Shorter and longer than a transfer: a late arrival must not hide inside one.
LATE_MS = (0.0, 25.0, 70.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[float, Path]:
    """Milliseconds that rank 1 is late -> the run's folder."""
    folder = tmp_path_factory.mktemp("straggler")
    cases = [
        Case(f"late_{late:g}", "waited", 5.0, link(TRANSFER_MS) | {"straggler_rank": 1, "straggler_ms": late}, blocks=4)
        for late in LATE_MS
    ]
    launch(folder, cases)
    return {late: folder / case.name for late, case in zip(LATE_MS, cases, strict=True)}


@pytest.fixture(scope="module")
def rows(folders: dict[float, Path]) -> dict[float, pd.DataFrame]:
    """Its collectives, matched across ranks."""
    frames = {}
    for late, folder in folders.items():
        run = load_run(folder)
        frame = matched(collective_rows(run), run)
        frames[late] = frame[~frame["warmup"]]
    return frames


@pytest.fixture(scope="module")
def reports(folders: dict[float, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[float, Report]:
    output = tmp_path_factory.mktemp("reports")
    return {late: write_report({"x": folder}, output / str(late)) for late, folder in folders.items()}


@pytest.mark.parametrize("late", LATE_MS)
def test_the_transfer_does_not_move(rows: dict[float, pd.DataFrame], late: float) -> None:
    assert set(rows[late]["end_source"]) == {"emulated"}
    assert rows[late]["transfer_ms"].median() == pytest.approx(TRANSFER_MS, rel=0.02)


@pytest.mark.parametrize("late", LATE_MS[1:])
def test_the_peer_waits_as_long_as_the_straggler_is_late(rows: dict[float, pd.DataFrame], late: float) -> None:
    def waited(frame: pd.DataFrame, rank: int) -> float:
        return float(frame.loc[frame["rank"] == rank, "wait_ms"].median())

    assert waited(rows[late], 0) - waited(rows[0.0], 0) == pytest.approx(late, abs=2.0)
    assert waited(rows[late], 1) == pytest.approx(0.0, abs=1.0)


@pytest.mark.parametrize("late", LATE_MS[1:])
def test_the_report_names_the_straggler_and_by_how_much_it_is_late(reports: dict[float, Report], late: float) -> None:
    (entry,) = reports[late].summary["datasets"]["x"]["stragglers"]
    assert (entry["rank"], entry["group_ranks"]) == (1, [0, 1])
    assert entry["late_ms"] == pytest.approx(late, abs=2.0)
    assert "rank 1 is a straggler" in " ".join(reports[late].text.split())


def test_the_report_names_nobody_in_an_even_run(reports: dict[float, Report]) -> None:
    (entry,) = reports[0.0].summary["datasets"]["x"]["stragglers"]
    assert entry["rank"] is None
    assert entry["reason"]
    assert "is a straggler" not in reports[0.0].text
