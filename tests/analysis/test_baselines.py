"""Isolated baselines against numbers worked out by hand, and every reason why there are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import aorta.analysis
from aorta.analysis.aggregate import LabelledRun, aggregate
from aorta.documents import as_json
from aorta.documents.dataset import DatasetEntry, PhaseTimes
from aorta.read.record import load_run
from aorta.records.schema import Coverage, Step
from tests.analysis.builders import collective, header, metrics, step, write_rank

BLIND = Coverage(2, 3, False, "the backends counted 3 collectives, AORTA saw 2")


def train(rank: int, number: int, wall: float, busy: float | None, **changes: Any) -> Step:
    values = metrics(wall, busy or 0, 4, 2) | {"compute_ms": busy}
    fields: dict[str, Any] = {"overlap": values, "collectives": [collective(seq=number)]} | changes
    return step(rank, 2, number, **fields)


def alone(rank: int, phase: str, number: int, wall: float, busy: float = 0, **changes: Any) -> Step:
    return step(rank, 2, number, overlap=metrics(wall, busy, 0, 0), phase=phase, **changes)


def steps_of(rank: int) -> list[Step]:
    """T: medians 100 and 104. Tc: 70 and 60. Tm: 50 and 56. Busy: 66 over 60, and 62 over 50. The first step of each
    phase is warm-up, far off.
    """
    together, compute, comm = {
        0: ((98, 100, 110), (69, 70, 72), (48, 50, 51)),
        1: ((104, 103, 190), (60, 58, 61), (56, 56, 57)),
    }[rank]
    overlapped, isolated = {0: ((66, 65, 80), (60, 59, 61)), 1: ((62, 62, 62), (50, 50, 50))}[rank]
    lines = [train(rank, 0, 900, 800, warmup=True)]
    lines += [train(rank, n, wall, busy) for n, (wall, busy) in enumerate(zip(together, overlapped, strict=True), 1)]
    lines += [alone(rank, "compute_only", 0, 900, 800, warmup=True)]
    lines += [alone(rank, "compute_only", n, *pair) for n, pair in enumerate(zip(compute, isolated, strict=True), 1)]
    lines += [alone(rank, "comm_only", 0, 900, warmup=True)]
    lines += [alone(rank, "comm_only", n, wall) for n, wall in enumerate(comm, 1)]
    return lines


def write(folder: Path, lines: dict[int, list[Step]]) -> DatasetEntry:
    folder.mkdir(exist_ok=True)
    for rank, steps in lines.items():
        write_rank(folder, header(rank, 2, warmup_steps=1), steps)
    return aggregate(LabelledRun("base", load_run(folder)))


@pytest.fixture
def whole(tmp_path: Path) -> DatasetEntry:
    return write(tmp_path / "run", {0: steps_of(0), 1: steps_of(1)})


def test_efficiency_is_of_the_slowest_ranks_median_steps(whole: DatasetEntry) -> None:
    found = whole.metrics["overlap_efficiency"]
    assert found.phase_times == PhaseTimes(train_ms=104, compute_only_ms=70, comm_only_ms=56)
    assert found.median == pytest.approx((70 + 56 - 104) / 56)
    assert (found.count, found.nulls, found.reason) == (1, 0, None)


def test_slowdown_is_of_busy_time_rank_by_rank(whole: DatasetEntry) -> None:
    found = whole.metrics["compute_slowdown"]
    assert found.per_rank_median == pytest.approx({"0": 0.1, "1": 0.24})
    assert found.median == pytest.approx(0.17)
    assert (found.count, found.reason) == (2, None)


def test_contention_is_not_clamped(tmp_path: Path) -> None:
    lines = short(200, 80, (70, 60), 50)
    assert write(tmp_path, lines).metrics["overlap_efficiency"].median == pytest.approx(-80 / 50)


def test_nothing_else_sees_the_other_phases(whole: DatasetEntry, tmp_path: Path) -> None:
    bare = {rank: [line for line in steps_of(rank) if line.phase == "train"] for rank in (0, 1)}
    without = write(tmp_path / "bare", bare)
    assert whole.steps.isolated_rank_steps == {"comm_only": 8, "compute_only": 8}
    for entry in (whole, without):
        del entry.metrics["overlap_efficiency"], entry.metrics["compute_slowdown"]
        entry.source.path, entry.steps.isolated_rank_steps = "", {}
    assert as_json(whole) == as_json(without)
    assert whole.health.problems == []  # the footer's count is of all phases
    assert len(aorta.analysis.steps(tmp_path / "run")) == 8
    assert len(aorta.analysis.collectives(tmp_path / "run")) == 8


def without_phase(phase: str) -> dict[int, list[Step]]:
    return {rank: [line for line in steps_of(rank) if line.phase != phase] for rank in (0, 1)}


def short(
    wall: float, busy: float | None, compute: tuple[float, float] | None, comm: float | None, **changes: Any
) -> dict[int, list[Step]]:
    """One step of each phase on both ranks; `compute`: wall and busy time alone. None: the phase was not run."""
    return {
        rank: [
            train(rank, 0, wall, busy, **changes),
            *([] if compute is None else [alone(rank, "compute_only", 0, *compute)]),
            *([] if comm is None else [alone(rank, "comm_only", 0, comm)]),
        ]
        for rank in (0, 1)
    }


NOT_RUN = "no isolated baseline in this run"
NO_COMPUTE = "rank 0 has no compute_only step after warm-up"
MISSING = "1 of 2 ranks are missing; the slowest may be among them"
NO_COMM = "no collective in a step: there is no communication to run alone"
PAUSED = {"reasons": {"compute_ms": "the instrument was paused"}}
UNSEEN = "computation was not seen apart from stalls: the backends counted 3 collectives, AORTA saw 2"


@pytest.mark.parametrize(
    ("lines", "efficiency", "slowdown"),
    [
        pytest.param(short(100, 90, None, None), NOT_RUN, NOT_RUN, id="not run"),
        pytest.param(without_phase("comm_only"), "rank 0 has no comm_only step after warm-up", None, id="no comm"),
        pytest.param(without_phase("compute_only"), NO_COMPUTE, NO_COMPUTE, id="no compute"),
        pytest.param(
            {0: steps_of(0), 1: [line for line in steps_of(1) if line.phase != "comm_only" or line.warmup]},
            "rank 1 has no comm_only step after warm-up",
            None,
            id="only warm-up on a rank",
        ),
        pytest.param({0: steps_of(0)}, MISSING, MISSING, id="rank missing"),
        pytest.param(short(100, 90, (99, 88), None, collectives=[]), NO_COMM, None, id="no communication"),
        pytest.param(short(100, 90, (99, 88), 1.9), "the shorter of Tc and Tm is below 2 % of T", None, id="too short"),
        pytest.param(
            short(100, None, (80, 70), 50, **PAUSED),
            None,
            "computation was not seen: the instrument was paused",
            id="paused",
        ),
        pytest.param(short(100, 90, (80, 70), 50, coverage=BLIND), None, UNSEEN, id="coverage"),
        pytest.param(
            short(100, 90, (80, 0), 50), None, "rank 0 computed nothing in its compute_only steps", id="no computation"
        ),
    ],
)
def test_every_null_has_its_reason(
    tmp_path: Path, lines: dict[int, list[Step]], efficiency: str | None, slowdown: str | None
) -> None:
    found = write(tmp_path, lines).metrics
    for name, reason in (("overlap_efficiency", efficiency), ("compute_slowdown", slowdown)):
        assert found[name].reason == reason
        assert (found[name].median is None) == (reason is not None)


def test_exactly_two_percent_is_enough(tmp_path: Path) -> None:
    lines = short(100, 9, (99, 8), 2)
    assert write(tmp_path, lines).metrics["overlap_efficiency"].median == pytest.approx(0.5)
