"""K1 (docs/dev/measuring.md): a pipeline whose overlap is known by construction, and what the record says of it.

The expectation is a two-machine flow shop, computed here and nowhere else: compute is one machine, the link the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import pytest

from aorta.records.schema import Step
from tests.known_answers.again import each_undisturbed
from tests.known_answers.launch import launch, link
from tests.known_answers.program import Case
from tests.rank_records import read_rank

pytestmark = [pytest.mark.dist, pytest.mark.alone, pytest.mark.thorough]
RATIO, RELATIVE = 0.02, 0.02
MOST = 0.75
"""Of the steps: others on the machine only lengthen one, and a rank that is held up makes its peer wait, which is
communication that no construction knows.
"""
ROUNDING_NS = 1000
Pairs: TypeAlias = list[tuple[Step, Step]]


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
    Known("longer", "ddp", 60.0, 100.0),
    Known("after_backward", "after", 60.0, 60.0),
    # Where blocks wait, what a busy machine adds to each of them (some 4 ms) adds up: a few long ones.
    Known("waited", "waited", 200.0, 200.0, blocks=4),
    Known("one", "one", 80.0, 360.0, owner=3),
]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[Known, Pairs]:
    """All cases, one after another in one launch: of each the steps of both ranks."""

    def measure(folder: Path, cases: Sequence[Known]) -> dict[Known, Pairs]:
        launch(folder, [Case(k.name, k.way, k.c, link(k.d), k.blocks, k.owner) for k in cases])
        return {known: both_ranks(folder / known.name) for known in cases}

    def holds(known: Known, pairs: Pairs) -> None:
        for rank in (0, 1):
            most_steps_say_what_is_known([pair[rank] for pair in pairs], known)

    return each_undisturbed(tmp_path_factory, "pipeline", TABLE, measure, holds)


def both_ranks(folder: Path) -> Pairs:
    ranks = [read_rank(folder / f"rank_{rank}_metrics.jsonl").steps for rank in (0, 1)]
    return [pair for pair in zip(*ranks, strict=True) if not pair[0].warmup]


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
def test_most_steps_say_what_is_known(records: dict[Known, Pairs], known: Known, rank: int) -> None:
    most_steps_say_what_is_known([pair[rank] for pair in records[known]], known)


def most_steps_say_what_is_known(steps: Sequence[Step], known: Known) -> None:
    wrong = []
    for step in steps:
        try:
            says_what_is_known(step, known)
        except AssertionError as error:
            wrong.append(f"step {step.step}: {error}")
    assert len(wrong) <= (1 - MOST) * len(steps), "\n".join([f"{len(wrong)} of {len(steps)} steps", *wrong])


@pytest.mark.parametrize("known", TABLE, ids=lambda known: known.name)
def test_every_end_is_where_the_link_puts_it(records: dict[Known, Pairs], known: Known) -> None:
    """However disturbed the machine is: a transfer begins when both ranks have come and the one before it has ended,
    and takes as long as the link says.
    """
    for pair in records[known]:
        both = [[(each, row) for row in each.collectives] for each in pair]
        for mine in both:
            free_ns = 0
            for (step, row), came in zip(mine, zip(*both, strict=True), strict=True):
                last_ns = max(peer.start_mono_ns + theirs.issue_ns for peer, theirs in came)
                end_ns = step.start_mono_ns + row.end_ns
                if row.end_source == "emulated":  # otherwise the backend was slower than the link
                    assert end_ns == pytest.approx(max(last_ns, free_ns) + known.d * 1e6, abs=ROUNDING_NS)
                free_ns = end_ns


def says_what_is_known(step: Step, known: Known) -> None:
    expected = flow_shop(known.way, known.c, known.d, known.owner, known.blocks)
    assert step.coverage.complete
    assert {row.end_source for row in step.collectives} == {"emulated"}
    measured = {metric: step.overlap[metric] for metric in expected}
    assert measured.pop("overlap_ratio") == pytest.approx(expected.pop("overlap_ratio"), abs=RATIO)
    # A part that should be nothing is compared with the whole it is a part of.
    assert measured == pytest.approx(expected, rel=RELATIVE, abs=RELATIVE * expected["comm_ms"])
