"""Every breakdown of exposed time adds up to the nanosecond, whatever a record holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.attribution.attribute import attribute
from aorta.read.record import load_run
from tests.analysis.attribution.records import block, comm, dataset, exact, made_step
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


@given(st.lists(st.lists(STEPS, min_size=2, max_size=2), min_size=2, max_size=2))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_every_breakdown_of_any_record_adds_up_exactly(folder: Path, sides: Any) -> None:
    """Two sides of two ranks, steps of 40 ms, collectives and blocks wherever chance puts them."""
    made = two_sides(folder, sides)
    found = attribute(*made)
    exact(found)
    for side, loaded in zip(("reference", "candidate"), made, strict=True):
        recorded = sum(round(value * 1e6) for value in loaded.values("exposed_comm_ms"))
        told = getattr(found, side)
        assert (told.exposed_comm_ns, told.untold_ns) == (recorded, 0)
        assert told.exposed_comm_ms == pytest.approx(loaded.values("exposed_comm_ms").mean())
    assert load_run(folder / "0").source.rank == 0
