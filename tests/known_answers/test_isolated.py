"""K1 with R10: a pipeline whose isolated parts, and so its overlap efficiency, are known by construction.

The expectation is the flow shop of `test_pipeline` for T; alone, the blocks take their sum, and so do the transfers on
their one link.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from aorta.analysis.baselines import compute_slowdown, overlap_efficiency
from aorta.analysis.readers.run_folder import Run, load_run
from aorta.telemetry.schema import Step
from tests.analysis.builders import write_rank
from tests.known_answers.again import undisturbed
from tests.known_answers.launch import launch, link
from tests.known_answers.program import Case
from tests.known_answers.test_pipeline import flow_shop

pytestmark = pytest.mark.dist
BLOCKS = 4
PHASES = ("train", "compute_only", "comm_only")
# name, way, c, d in milliseconds, and (Tc + Tm - T) / min(Tc, Tm) by hand
TABLE = [
    ("equal", "ddp", 80.0, 80.0, 3 / 4),  # 4c + 4c - 5c over 4c
    ("longer", "ddp", 60.0, 100.0, 3 / 4),  # 4c + 4d - (c + 4d) over 4c
    ("waited", "waited", 70.0, 70.0, 0.0),  # nothing at the same time
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Of each case only the steps of a phase in which the machine took the least time for itself: it only adds."""

    def measure(folder: Path) -> dict[str, Run]:
        cases = [Case(name, way, c, link(d), blocks=BLOCKS, steps=3) for name, way, c, d, _ in TABLE]
        launch(folder, cases, "tests.known_answers.isolated")
        return {
            case.name: least_disturbed(load_run(folder / case.name), folder / f"{case.name}-chosen") for case in cases
        }

    def holds(runs: dict[str, Run]) -> None:
        for name, way, c, d, efficiency in TABLE:
            as_constructed(runs[name], way, c, d, efficiency)
        assert_nothing_slowed_down(runs)

    return undisturbed(tmp_path_factory, "isolated", measure, holds)


def least_disturbed(run: Run, folder: Path) -> Run:
    chosen = {
        phase: min(
            {step.global_step for step in steps_of(run, 0, phase)},
            key=lambda number: sum(wall(step) for rank in (0, 1) for step in steps_of(run, rank, phase, number)),
        )
        for phase in PHASES
    }
    folder.mkdir()
    for rank, record in run.records.items():
        lines = [step for phase in PHASES for step in steps_of(run, rank, phase, chosen[phase])]
        write_rank(folder, record.header, lines)
    return load_run(folder)


def steps_of(run: Run, rank: int, phase: str, number: int | None = None) -> list[Step]:
    record = run.records[rank]
    return [
        step
        for step in (*record.steps, *record.isolated)
        if step.phase == phase and not step.warmup and number in (None, step.global_step)
    ]


def wall(step: Step) -> float:
    return (step.end_mono_ns - step.start_mono_ns) / 1e6


@pytest.mark.parametrize(("name", "way", "c", "d", "efficiency"), TABLE, ids=[row[0] for row in TABLE])
def test_the_parts_and_the_efficiency_are_as_constructed(
    runs: dict[str, Run], name: str, way: str, c: float, d: float, efficiency: float
) -> None:
    as_constructed(runs[name], way, c, d, efficiency)


def as_constructed(run: Run, way: str, c: float, d: float, efficiency: float) -> None:
    found = overlap_efficiency(run)
    together = flow_shop(way, c, d, None, BLOCKS)["window_ms"]
    expected = {"t_ms": together, "tc_ms": BLOCKS * c, "tm_ms": BLOCKS * d}
    # Where each block begins when its turn comes, the host's own gaps add up, in all three parts alike.
    close = 0.1 if way == "waited" else 0.05
    assert {part: found[part] for part in expected} == pytest.approx(expected, rel=close, abs=5)
    assert found["median"] == pytest.approx(efficiency, abs=0.1)


def test_blocks_that_sleep_are_slowed_down_by_nothing(runs: dict[str, Run]) -> None:
    assert_nothing_slowed_down(runs)


def assert_nothing_slowed_down(runs: dict[str, Run]) -> None:
    for run in runs.values():
        assert compute_slowdown(run)["median"] == pytest.approx(0.0, abs=0.03)


def test_what_is_alone_is_alone(runs: dict[str, Run]) -> None:
    for run in runs.values():
        for rank in (0, 1):
            (together,), (compute,), (comm,) = (steps_of(run, rank, phase) for phase in PHASES)
            assert (compute.coverage.complete, compute.coverage.issued, compute.collectives) == (True, 0, [])
            assert (comm.coverage.complete, comm.compute, comm.aux) == (True, [], [])
            assert sorted((r.kind, r.bytes, r.group) for r in comm.collectives) == sorted(
                (r.kind, r.bytes, r.group) for r in together.collectives
            )
            assert {row.end_source for row in comm.collectives} == {"emulated"}
            assert comm.overlap["overlap_ratio"] == 0
