"""K1 (docs/measuring.md): a pipeline whose overlap is known by construction, and what the record says of it.

The expectation is a two-machine flow shop, computed here and nowhere else: compute is one machine, the link the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from aorta.records.reader import read_rank
from aorta.records.schema import Step
from tests.known_answers.again import each_undisturbed
from tests.known_answers.launch import launch, link
from tests.known_answers.program import Case

pytestmark = [pytest.mark.dist, pytest.mark.alone]
RATIO, RELATIVE = 0.02, 0.02


class Known(NamedTuple):
    """A case: milliseconds of a block's compute and of its transfer, and the one block that has a parameter, if any."""

    name: str
    way: str
    c: float
    d: float
    owner: int | None = None
    blocks: int = 8


TABLE = [
    Known("shorter", "ddp", 100.0, 60.0),
    Known("equal", "ddp", 90.0, 90.0),
    Known("longer", "ddp", 60.0, 100.0),
    Known("after_backward", "after", 60.0, 60.0),
    # Where blocks wait, what a busy machine adds to each of them (some 4 ms) adds up: a few long ones.
    Known("waited", "waited", 200.0, 200.0, blocks=4),
    Known("one", "one", 80.0, 360.0, owner=3),
]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[Known, tuple[Step, Step]]:
    """All cases, one after another in one launch: of each the step of both ranks that was disturbed least."""

    def measure(folder: Path, cases: Sequence[Known]) -> dict[Known, tuple[Step, Step]]:
        launch(folder, [Case(k.name, k.way, k.c, link(k.d), k.blocks, k.owner) for k in cases])
        return {known: least_disturbed(folder / known.name) for known in cases}

    def holds(known: Known, steps: tuple[Step, Step]) -> None:
        for step in steps:
            says_what_is_known(step, known)

    return each_undisturbed(tmp_path_factory, "pipeline", TABLE, measure, holds)


def least_disturbed(folder: Path) -> tuple[Step, Step]:
    """The step of both ranks in which the machine took the least time for itself: others only lengthen a step, and a
    rank that is held up makes its peer wait, which is communication that no construction knows.
    """
    ranks = [read_rank(folder / f"rank_{rank}_metrics.jsonl").steps for rank in (0, 1)]
    pairs = [pair for pair in zip(*ranks, strict=True) if not pair[0].warmup]
    return min(pairs, key=lambda pair: sum(step.end_mono_ns - step.start_mono_ns for step in pair))


def flow_shop(way: str, c: float, d: float, owner: int | None, blocks: int) -> dict[str, float]:
    """What must come out, in milliseconds."""
    computing = [(i * c, (i + 1) * c) for i in range(blocks)]
    ready = [end for _, end in computing]
    if way == "after":
        ready = [blocks * c] * blocks
    if way == "one":
        ready = [ready[blocks - 1 - owner]]  # backward meets the last block first
    if way == "waited":
        computing = [(i * (c + d), i * (c + d) + c) for i in range(blocks)]
        ready = [end for _, end in computing]
    link, free = [], 0.0
    for moment in ready:
        link.append((max(moment, free), max(moment, free) + d))
        free = link[-1][1]
    hidden = sum(max(0.0, min(a, b) - max(x, y)) for x, a in computing for y, b in link)
    comm = len(link) * d
    return {
        "compute_ms": blocks * c,
        "comm_ms": comm,
        "compute_comm_ms": hidden,
        "exposed_comm_ms": comm - hidden,
        "window_ms": max(free, computing[-1][1]),
        "overlap_ratio": hidden / comm,
    }


@pytest.mark.spec("D8")
@pytest.mark.parametrize("known", TABLE, ids=lambda known: known.name)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_record_says_what_is_known(records: dict[Known, tuple[Step, Step]], known: Known, rank: int) -> None:
    says_what_is_known(records[known][rank], known)


def says_what_is_known(step: Step, known: Known) -> None:
    expected = flow_shop(known.way, known.c, known.d, known.owner, known.blocks)
    assert step.coverage.complete
    assert {row.end_source for row in step.collectives} == {"emulated"}
    measured = {metric: step.overlap[metric] for metric in expected}
    assert measured.pop("overlap_ratio") == pytest.approx(expected.pop("overlap_ratio"), abs=RATIO)
    # A part that should be nothing is compared with the whole it is a part of.
    assert measured == pytest.approx(expected, rel=RELATIVE, abs=RELATIVE * expected["comm_ms"])
