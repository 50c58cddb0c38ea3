"""Every breakdown of exposed time adds up to the nanosecond, whatever a record holds; which of its rows are causes."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.attribution.breakdown import SHOWN_ROWS, Means, Totals, dimensions, ranked
from aorta.documents import known
from aorta.read.record import load_run
from aorta.read.run import ExposedSums
from tests.analysis.attribution.records import block, comm, dataset, exact, made_step
from tests.analysis.attribution.test_sentence_numbers import OVERLAP_OFF, held
from tests.analysis.by_json import attribute
from tests.strategies import interval_lists


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("random")


KINDS = st.sampled_from(["allreduce", "allgather", "reducescatter", "send"])
STEPS = st.lists(st.tuples(interval_lists, interval_lists, interval_lists, st.lists(KINDS, min_size=8, max_size=8)),
                 min_size=1, max_size=4)  # fmt: skip


def two_sides(folder: Path, sides: Any) -> list[LabelledRun]:
    """Records of two sides, from what `STEPS` draws for each rank."""
    made = []
    for side, ranks in enumerate(sides):
        lines = [
            [
                made_step(
                    rank,
                    2,
                    number,
                    40,
                    [block(f"b{k % 2}", "forward", *span) for k, span in enumerate(blocks)],
                    [comm(kinds[k], *span, 8, k) for k, span in enumerate(rows)],
                    stalls,
                )
                for number, (blocks, rows, stalls, kinds) in enumerate(steps)
            ]
            for rank, steps in enumerate(ranks)
        ]
        for old in (folder / str(side)).glob("rank_*"):
            old.unlink()
        made.append(dataset(folder / str(side), str(side), lines))
    return made


@given(st.lists(st.lists(STEPS, min_size=2, max_size=2), min_size=2, max_size=2), st.booleans())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_every_breakdown_of_any_record_adds_up_exactly(folder: Path, sides: Any, toggled: bool) -> None:
    """Two sides of two ranks, steps of 40 ms, collectives and blocks wherever chance puts them."""
    made = two_sides(folder, sides)
    found = attribute(*made, differences=[OVERLAP_OFF] if toggled else [])
    exact(found)
    held(found)
    assert all(float(share) <= 100 for share in re.findall(r"([\d.]+) %", found["sentence"]))
    for side, loaded in zip(("reference", "candidate"), made, strict=True):
        recorded = sum(round(value * 1e6) for value in loaded.values("exposed_comm_ms"))
        assert found[side]["exposed_comm_ns"] == recorded
        assert found[side]["untold_ns"] == 0
        assert found[side]["exposed_comm_ms"] == pytest.approx(loaded.values("exposed_comm_ms").mean())
    assert load_run(folder / "0").source.rank == 0


def ranks_of(exposed_ns: dict[int, int]) -> Totals:
    return Totals(sums=ExposedSums(rank_steps=1, exposed_ns=sum(exposed_ns.values())), ranks=Counter(exposed_ns))


def test_an_even_part_is_that_of_all_ranks_not_of_those_that_are_listed() -> None:
    """One of 100 ranks has 5.5 times an even part; of the 24 that are listed that would be less than 1.5 times."""
    exposed = dict.fromkeys(range(99), 945_000_000 // 99) | {99: 55_000_000}
    means = Means(ranks_of({}), ranks_of(exposed))
    rows = means.rows("rank", {}, means.candidate.ranks, lambda rank: (f"rank {rank}", {"rank": rank}))
    assert len(rows) == SHOWN_ROWS + 1
    found = {**dimensions(means, ""), "balance": [], "rank": rows}
    lead = means.row("collective", "lead", 0, means.candidate.sums.exposed_ns)
    assert [known(row.rank) for row in ranked(found, [], lead)] == [None, 99]
