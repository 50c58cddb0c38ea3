"""K3 (docs/dev/measuring.md): a rank that is late to every collective costs its peer waiting, and no transfer time; and
the report names it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest

from aorta.analysis.frames import collectives_frame
from aorta.analysis.load.records import load_run
from aorta.analysis.report.report_folder import Report, write_report
from tests.known_answers.again import undisturbed
from tests.known_answers.launch import launch, link
from tests.known_answers.program import Case

pytestmark = [pytest.mark.dist, pytest.mark.alone]
TRANSFER_MS = 40.0
# Shorter and longer than a transfer: a late arrival must not hide inside one.
LATE_MS = (0.0, 25.0, 70.0)


@dataclass
class Seen:
    """What was seen of a run in which rank 1 is late by so many milliseconds."""

    rows: pd.DataFrame  # its collectives, matched across ranks
    report: Report

    def waited_ms(self, rank: int) -> float:
        return float(self.rows.loc[self.rows["rank"] == rank, "wait_ms"].median())


def test_a_straggler_costs_its_peer_waiting_and_no_transfer_and_the_report_names_it(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    as_constructed(undisturbed(tmp_path_factory, "straggler", measure, as_constructed))


def measure(folder: Path) -> dict[float, Seen]:
    late_by = {late: {"straggler_rank": 1, "straggler_ms": late} for late in LATE_MS}
    cases = {late: Case(f"{late:g}", "waited", 5.0, link(TRANSFER_MS) | late_by[late], blocks=4) for late in LATE_MS}
    launch(folder, list(cases.values()))
    seen = {}
    for late, case in cases.items():
        run = load_run(folder / case.name)
        rows = collectives_frame(run)
        report = write_report({"x": folder / case.name}, folder / f"report_{case.name}")
        seen[late] = Seen(rows[~rows["warmup"]], report)
    return seen


def as_constructed(seen: dict[float, Seen]) -> None:
    for late in LATE_MS:
        transfer_does_not_move(seen[late])
    report_names_nobody(seen[0.0].report)
    for late in LATE_MS[1:]:
        peer_waits(seen, late)
        report_names_the_straggler(seen[late].report, late)


def transfer_does_not_move(one: Seen) -> None:
    assert set(one.rows["end_source"]) == {"emulated"}
    assert one.rows["transfer_ms"].median() == pytest.approx(TRANSFER_MS, rel=0.02)


def peer_waits(seen: dict[float, Seen], late: float) -> None:
    assert seen[late].waited_ms(0) - seen[0.0].waited_ms(0) == pytest.approx(late, abs=2.0)
    assert seen[late].waited_ms(1) == pytest.approx(0.0, abs=1.0)


def report_names_the_straggler(report: Report, late: float) -> None:
    (entry,) = report.summary["datasets"]["x"]["stragglers"]
    assert (entry["rank"], entry["group_ranks"]) == (1, [0, 1])
    assert entry["late_ms"] == pytest.approx(late, abs=2.0)
    assert "rank 1 is a straggler" in " ".join(report.text.split())


def report_names_nobody(report: Report) -> None:
    (entry,) = report.summary["datasets"]["x"]["stragglers"]
    assert entry["rank"] is None
    assert entry["reason"]
    assert "is a straggler" not in report.text
