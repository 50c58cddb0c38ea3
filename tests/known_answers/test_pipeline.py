"""K1 and K3 (docs/dev/measuring.md): a pipeline whose overlap, isolated parts and waiting for a late rank are known by
construction, and what the record says of it.

The expectation is a two-machine flow shop, computed here and nowhere else: compute is one machine, the link the other.
Alone (R10), the blocks take their sum, and so do the transfers on their one link.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pandas as pd
import pytest

from aorta.analysis.aggregate import single_values
from aorta.analysis.dataframes import collectives_frame
from aorta.read.record import load_run
from aorta.read.run import Run
from aorta.records.schema import Step
from tests.analysis.builders import write_rank
from tests.known_answers.again import each_undisturbed, undisturbed
from tests.known_answers.program import VALUES, Case
from tests.rank_records import read_rank
from tests.runs import program, succeeded

pytestmark = [pytest.mark.dist, pytest.mark.alone]
RATIO, RELATIVE = 0.02, 0.02
MOST = 0.75
"""Of the steps: others on the machine only lengthen one, and a rank that is held up makes its peer wait, which is
communication that no construction knows.
"""
ROUNDING_NS = 1000
Pairs: TypeAlias = list[tuple[Step, Step]]


def link(transfer_ms: float) -> dict[str, Any]:
    """A fabric on which an all-reduce of one block's gradient takes exactly so long: half latency, half bandwidth.

    On two ranks a ring all-reduce is 2 (n - 1) = 2 latencies, and sends 2 (n - 1) / n = 1 array.
    """
    return {
        "inter_latency_us": transfer_ms * 1e3 / 2 / 2,
        "inter_bandwidth_gb_per_s": VALUES * 4 / (transfer_ms / 2 * 1e6),
    }


def launch(folder: Path, cases: Sequence[Case]) -> None:
    """Run the cases one after another in one launch of two ranks; `folder` then has a run folder for each."""
    succeeded(program("tests.known_answers.program", str(folder), json.dumps([asdict(case) for case in cases])))


class Known(NamedTuple):
    """A case: milliseconds of a block's compute and of its transfer, the one block that has a parameter, if any, and of
    isolated parts (Tc + Tm - T) / min(Tc, Tm) by hand.
    """

    name: str
    way: str
    c: float
    d: float
    owner: int | None = None
    blocks: int = 8
    efficiency: float | None = None

    def case(self) -> Case:
        of_parts: dict[str, Any] = {} if self.efficiency is None else {"steps": 3, "isolated": True}
        return Case(self.name, self.way, self.c, link(self.d), self.blocks, self.owner, **of_parts)


TABLE = [
    Known("shorter", "ddp", 100.0, 60.0),
    Known("longer", "ddp", 60.0, 100.0),
    Known("after_backward", "after", 60.0, 60.0),
    # Where blocks wait, what a busy machine adds to each of them (some 4 ms) adds up: a few long ones.
    Known("waited", "waited", 200.0, 200.0, blocks=4),
    Known("one", "one", 80.0, 360.0, owner=3),
]
ISOLATED = [
    Known("longer", "ddp", 60.0, 100.0, None, 4, 3 / 4),  # 4c + 4d - (c + 4d) over 4c
    Known("waited", "waited", 70.0, 70.0, None, 4, 0.0),  # nothing at the same time
]


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


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[Known, Pairs]:
    """All cases, one after another in one launch: of each the steps of both ranks."""

    def measure(folder: Path, cases: Sequence[Known]) -> dict[Known, Pairs]:
        launch(folder, [known.case() for known in cases])
        return {known: both_ranks(folder / known.name) for known in cases}

    def holds(known: Known, pairs: Pairs) -> None:
        for rank in (0, 1):
            most_steps_say_what_is_known([pair[rank] for pair in pairs], known)

    return each_undisturbed(tmp_path_factory, "pipeline", TABLE, measure, holds)


def both_ranks(folder: Path) -> Pairs:
    ranks = [read_rank(folder / f"rank_{rank}_metrics.jsonl").steps for rank in (0, 1)]
    return [pair for pair in zip(*ranks, strict=True) if not pair[0].warmup]


@pytest.mark.thorough
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


def says_what_is_known(step: Step, known: Known) -> None:
    expected = flow_shop(known.way, known.c, known.d, known.owner, known.blocks)
    assert step.coverage.complete
    assert {row.end_source for row in step.collectives} == {"emulated"}
    measured = {metric: step.overlap[metric] for metric in expected}
    assert measured.pop("overlap_ratio") == pytest.approx(expected.pop("overlap_ratio"), abs=RATIO)
    # A part that should be nothing is compared with the whole it is a part of.
    assert measured == pytest.approx(expected, rel=RELATIVE, abs=RELATIVE * expected["comm_ms"])


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_the_parts_alone_and_the_efficiency_are_as_constructed(tmp_path_factory: pytest.TempPathFactory) -> None:
    def measure(folder: Path, table: Sequence[Known]) -> dict[Known, Run]:
        launch(folder, [known.case() for known in table])
        return {known: middle_steps(load_run(folder / known.name), folder / f"{known.name}-chosen") for known in table}

    for known, run in each_undisturbed(tmp_path_factory, "isolated", ISOLATED, measure, parts_as_constructed).items():
        parts_as_constructed(known, run)


def middle_steps(run: Run, folder: Path) -> Run:
    """The step of each phase that is the middle one by its length, so that most steps are asked."""
    folder.mkdir()
    records = {rank: read_rank(Path(tables.source.path)) for rank, tables in run.ranks.items()}
    steps = [step for record in records.values() for step in (*record.steps, *record.isolated) if not step.warmup]
    chosen: list[Step] = []
    for phase in ("train", "compute_only", "comm_only"):
        lengths: dict[int, int] = {}
        for step in steps:
            if step.phase == phase:
                length_ns = step.end_mono_ns - step.start_mono_ns
                lengths[step.global_step] = lengths.get(step.global_step, 0) + length_ns
        middle = sorted(lengths, key=lengths.__getitem__)[len(lengths) // 2]
        chosen += [step for step in steps if (step.phase, step.global_step) == (phase, middle)]
    for rank, record in records.items():
        write_rank(folder, record.header, [step for step in chosen if step.rank == rank])
    return load_run(folder)


def parts_as_constructed(known: Known, run: Run) -> None:
    values = single_values(run)
    found = values["overlap_efficiency"]
    together = flow_shop(known.way, known.c, known.d, None, known.blocks)["window_ms"]
    alone = {"compute_only_ms": known.blocks * known.c, "comm_only_ms": known.blocks * known.d}
    expected = {"train_ms": together} | alone
    # Where each block begins when its turn comes, the host's own gaps add up, in all three parts alike.
    close = 0.1 if known.way == "waited" else 0.05
    assert {part: getattr(found.phase_times, part) for part in expected} == pytest.approx(expected, rel=close, abs=5)
    assert found.median == pytest.approx(known.efficiency, abs=0.1)
    assert values["compute_slowdown"].median == pytest.approx(0.0, abs=0.03)  # blocks sleep: nothing slows them down


TRANSFER_MS = 40.0
LATE_MS = (0.0, 25.0, 70.0)
"""Shorter and longer than a transfer: a late arrival must not hide inside of one."""


def test_a_straggler_costs_its_peer_waiting_and_no_transfer(tmp_path_factory: pytest.TempPathFactory) -> None:
    waits_as_constructed(undisturbed(tmp_path_factory, "straggler", late_by, waits_as_constructed))


def late_by(folder: Path) -> dict[float, pd.DataFrame]:
    """Delay of rank 1 in milliseconds -> the run's collectives, matched across ranks."""
    delays = {late: {"straggler_rank": 1, "straggler_ms": late} for late in LATE_MS}
    cases = {late: Case(f"{late:g}", "waited", 5.0, link(TRANSFER_MS) | delays[late], blocks=4) for late in LATE_MS}
    launch(folder, [*cases.values()])
    rows = {late: collectives_frame(load_run(folder / case.name)) for late, case in cases.items()}
    return {late: seen[~seen["warmup"]] for late, seen in rows.items()}


def waits_as_constructed(seen: dict[float, pd.DataFrame]) -> None:
    for rows in seen.values():
        assert set(rows["end_source"]) == {"emulated"}
        assert rows["transfer_ms"].median() == pytest.approx(TRANSFER_MS, rel=0.02)
    for late in LATE_MS[1:]:
        assert waited_ms(seen[late], 0) - waited_ms(seen[0.0], 0) == pytest.approx(late, abs=2.0)
        assert waited_ms(seen[late], 1) == pytest.approx(0.0, abs=1.0)


def waited_ms(rows: pd.DataFrame, rank: int) -> float:
    return float(rows.loc[rows["rank"] == rank, "wait_ms"].median())
