"""K1 (docs/measuring.md): a pipeline whose overlap is known by construction, and what the record says of it.

The expectation is a two-machine flow shop, computed here and nowhere else: compute is one machine, the link the other.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from aorta.telemetry.reader import read_rank
from aorta.telemetry.schema import Step
from tests.known_answers.again import undisturbed
from tests.known_answers.launch import launch, link
from tests.known_answers.program import Case

pytestmark = pytest.mark.dist
RATIO, RELATIVE = 0.02, 0.02


# name, way, c, d in milliseconds, and the one block with a parameter
TABLE: list[tuple[str, str, float, float, int | None]] = [
    ("shorter", "ddp", 100.0, 60.0, None),
    ("equal", "ddp", 90.0, 90.0, None),
    ("longer", "ddp", 60.0, 100.0, None),
    ("after_backward", "after", 60.0, 60.0, None),
    ("waited", "waited", 100.0, 100.0, None),
    ("one", "one", 80.0, 360.0, 3),
]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases, one after another in one launch."""

    def measure(folder: Path) -> Path:
        launch(folder, [Case(name, way, c, link(d), owner=owner) for name, way, c, d, owner in TABLE])
        return folder

    def holds(folder: Path) -> None:
        for name, way, c, d, owner in TABLE:
            for step in least_disturbed(folder / name):
                says_what_is_known(step, way, c, d, owner)

    return undisturbed(tmp_path_factory, "pipeline", measure, holds)


def least_disturbed(folder: Path) -> tuple[Step, Step]:
    """The step of both ranks in which the machine took the least time for itself: others only lengthen a step, and a
    rank that is held up makes its peer wait, which is communication that no construction knows.
    """
    ranks = [read_rank(folder / f"rank_{rank}_metrics.jsonl").steps for rank in (0, 1)]
    pairs = [pair for pair in zip(*ranks, strict=True) if not pair[0].warmup]
    return min(pairs, key=lambda pair: sum(step.end_mono_ns - step.start_mono_ns for step in pair))


def flow_shop(way: str, c: float, d: float, owner: int | None, blocks: int = 8) -> dict[str, float]:
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


@pytest.mark.parametrize(("name", "way", "c", "d", "owner"), TABLE, ids=[row[0] for row in TABLE])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_record_says_what_is_known(
    records: Path, name: str, way: str, c: float, d: float, owner: int | None, rank: int
) -> None:
    says_what_is_known(least_disturbed(records / name)[rank], way, c, d, owner)


def says_what_is_known(step: Step, way: str, c: float, d: float, owner: int | None) -> None:
    expected = flow_shop(way, c, d, owner)
    assert step.coverage.complete
    assert {row.end_source for row in step.collectives} == {"emulated"}
    measured = {metric: step.overlap[metric] for metric in expected}
    assert measured.pop("overlap_ratio") == pytest.approx(expected.pop("overlap_ratio"), abs=RATIO)
    # A part that should be nothing is compared with the whole it is a part of.
    assert measured == pytest.approx(expected, rel=RELATIVE, abs=RELATIVE * expected["comm_ms"])
