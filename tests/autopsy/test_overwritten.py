"""A ring that overwrote its rows: what a rank may have issued is unknown, and not held against it."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from aorta.autopsy.job import WaitGraph
from aorta.autopsy.joining import join
from aorta.autopsy.processes import progress_evidence
from aorta.records.ring_file import RANGE, RingGroup
from tests.records.test_progress import Rank, facts

SLOTS = 16


@pytest.mark.parametrize(
    ("issues", "more_rows", "told"),
    [
        pytest.param(True, SLOTS, "unknown", id="overwritten, and perhaps open"),
        pytest.param(False, SLOTS, "behind", id="it has never used the group"),
        pytest.param(True, SLOTS - 2, "behind", id="its last one is seen, and the next one is not there"),
    ],
)
def test_a_rank_whose_rows_were_overwritten_is_not_said_to_be_behind(
    tmp_path: Path, issues: bool, more_rows: int, told: str
) -> None:
    for number in range(2):
        rank = Rank(tmp_path / "progress" / f"rank_{number}.bin", SLOTS, structs.replace(facts(number), host="here"))
        rank.progress.begin_step(0)
        if number == 0 or issues:
            group = rank.ring.group(RingGroup("dp", 1, False, (0, 1)))
            rank.rows.complete(rank.issue(0, group=group), 9, by_wait=False)
        if number == 0:
            rank.issue(1, group=group)
        for _ in range(more_rows if number else 0):
            rank.rows.append(RANGE)
    (one,) = WaitGraph.of(join(progress_evidence(tmp_path))).open
    assert (one.rank, one.collective.number) == (0, 1)
    assert {"behind": one.behind, "unknown": one.unknown} == {"behind": set(), "unknown": set()} | {told: {1}}
