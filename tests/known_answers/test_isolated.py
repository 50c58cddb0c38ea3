"""K1 with R10: a pipeline whose isolated parts, and so its overlap efficiency, are known by construction.

The expectation is the flow shop of `test_pipeline` for T; alone, the blocks take their sum, and so do the transfers on
their one link.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from aorta.analysis.aggregate import single_values
from aorta.read.record import load_run
from aorta.read.run import Run
from aorta.records.schema import Step
from tests.analysis.builders import write_rank
from tests.known_answers.again import each_undisturbed
from tests.known_answers.launch import launch, link
from tests.known_answers.program import Case
from tests.known_answers.test_pipeline import flow_shop
from tests.rank_records import read_rank

pytestmark = [pytest.mark.dist, pytest.mark.alone, pytest.mark.thorough]
BLOCKS = 4
PHASES = ("train", "compute_only", "comm_only")


class Known(NamedTuple):
    """A case: c and d in milliseconds, and (Tc + Tm - T) / min(Tc, Tm) by hand."""

    name: str
    way: str
    c: float
    d: float
    efficiency: float


TABLE = [
    Known("longer", "ddp", 60.0, 100.0, 3 / 4),  # 4c + 4d - (c + 4d) over 4c
    Known("waited", "waited", 70.0, 70.0, 0.0),  # nothing at the same time
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[Known, Run]:
    """Of each case the step of each phase that is the middle one by its length, so that most steps are asked."""

    def measure(folder: Path, table: Sequence[Known]) -> dict[Known, Run]:
        cases = [Case(known.name, known.way, known.c, link(known.d), blocks=BLOCKS, steps=3) for known in table]
        launch(folder, cases, "tests.known_answers.isolated")
        return {known: middle_steps(load_run(folder / known.name), folder / f"{known.name}-chosen") for known in table}

    return each_undisturbed(tmp_path_factory, "isolated", TABLE, measure, as_constructed)


@pytest.mark.parametrize("known", TABLE, ids=lambda known: known.name)
def test_the_parts_and_the_efficiency_are_as_constructed(runs: dict[Known, Run], known: Known) -> None:
    as_constructed(known, runs[known])


def middle_steps(run: Run, folder: Path) -> Run:
    def length(phase: str, number: int) -> float:
        return sum(wall(step) for rank in (0, 1) for step in steps_of(run, rank, phase, number))

    chosen = {}
    for phase in PHASES:
        numbers = sorted(
            {step.global_step for step in steps_of(run, 0, phase)}, key=lambda number: length(phase, number)
        )
        chosen[phase] = numbers[len(numbers) // 2]
    folder.mkdir()
    for rank, tables in run.ranks.items():
        lines = [step for phase in PHASES for step in steps_of(run, rank, phase, chosen[phase])]
        write_rank(folder, read_rank(Path(tables.source.path)).header, lines)
    return load_run(folder)


def steps_of(run: Run, rank: int, phase: str, number: int | None = None) -> list[Step]:
    record = read_rank(Path(run.ranks[rank].source.path))
    return [
        step
        for step in (*record.steps, *record.isolated)
        if step.phase == phase and not step.warmup and number in (None, step.global_step)
    ]


def wall(step: Step) -> float:
    return (step.end_mono_ns - step.start_mono_ns) / 1e6


def as_constructed(known: Known, run: Run) -> None:
    values = single_values(run)
    found = values["overlap_efficiency"]
    together = flow_shop(known.way, known.c, known.d, None, BLOCKS)["window_ms"]
    expected = {"train_ms": together, "compute_only_ms": BLOCKS * known.c, "comm_only_ms": BLOCKS * known.d}
    # Where each block begins when its turn comes, the host's own gaps add up, in all three parts alike.
    close = 0.1 if known.way == "waited" else 0.05
    assert {part: getattr(found.phase_times, part) for part in expected} == pytest.approx(expected, rel=close, abs=5)
    assert found.median == pytest.approx(known.efficiency, abs=0.1)
    assert single_values(run)["compute_slowdown"].median == pytest.approx(
        0.0, abs=0.03
    )  # blocks sleep: nothing slows them down
