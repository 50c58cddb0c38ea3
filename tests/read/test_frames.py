"""Frames refuse what is not declared, and those of ranks that differ are joined without inventing a value."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from aorta.read.frames import NO_TIME, Collectives, Lane
from aorta.read.record import load_run
from aorta.read.run import NO_STEPS
from aorta.records.schema import AuxRange, ComputeRange, Stall, Wait
from tests.analysis.builders import collective, footer, header, metrics, step, write_rank

ROWS = {name: np.zeros(2, np.int64) for name in ("step", "name", "seq", "issue_ns", "start_ns", "end_ns")}


@pytest.mark.parametrize(
    ("columns", "error", "said"),
    [
        ({"wait_ns": np.zeros(2, np.int64)}, TypeError, "wait_ns"),
        ({"seq": np.zeros(3, np.int64)}, ValueError, "different lengths"),
        ({"name": np.array([0, 2**40])}, ValueError, "name: int64 does not fit int32"),
        ({"issue_ns": np.array([0.5, 1.0])}, ValueError, "issue_ns: float64 does not fit int64"),
    ],
)
def test_a_column_that_is_not_declared_or_does_not_fit_is_refused(columns, error, said) -> None:
    with pytest.raises(error, match=said):
        Collectives(**ROWS | columns)


def test_columns_have_the_declared_dtype() -> None:
    rows = Collectives(**ROWS)
    assert (rows.step.dtype, rows.end_ns.dtype, rows.backend_end_ns) == (np.int32, np.int64, None)


def test_ranks_that_differ_are_joined(tmp_path: Path) -> None:
    """Rank 0 gathers and has no bounds; rank 1 does neither, and its communication is unknown in its second step."""
    gathers = metrics(10, 8, 4, 2, allgather_ms=3.0, compute_allgather_ms=1.0, exposed_allgather_ms=2.0)
    unknown = metrics(10, 8, 4, 2, comm_ms=None, allreduce_ms=None)
    rows = [collective(seq=number, backend_end_ns=number) for number in range(2)]
    write_rank(tmp_path, header(0, 2), [step(0, 2, 0, overlap=gathers, collectives=rows)], footer(1, 2))
    lines = [step(1, 2, number, overlap=overlap) for number, overlap in enumerate([metrics(10, 8, 4, 2), unknown])]
    write_rank(tmp_path, header(1, 2), lines, footer(2, 2))
    run = load_run(tmp_path)
    assert run.rank_of_step.tolist() == [0, 1, 1]
    assert run.steps.metrics["allgather_ms"].tolist()[:2] == [3.0, 0.0]
    assert np.isnan(run.steps.metrics["allgather_ms"][2])
    assert run.collectives.backend_end_ns is not None
    assert run.collectives.backend_end_ns.tolist() == [NO_TIME if number is None else number for number in (0, 1)]
    assert [len(tables.collectives) for tables in run.ranks.values()] == [2, 0]
    assert run.ranks[0].isolated.global_step.tolist() == NO_STEPS.global_step.tolist()


def test_spans_of_steps_out_of_order_are_those_of_their_step(tmp_path: Path) -> None:
    """In the order of lanes, waits in the order of time whichever their group; read with the steps or again."""

    def line(number: int) -> object:
        return step(
            0,
            1,
            number,
            overlap=metrics(10, 8, 0, 0),
            compute=[ComputeRange("a", "forward", number, 9)],
            aux=[AuxRange("optimizer", 9, 10)],
            stalls=[Stall(1, 2, "hand_over")],
            waits=[Wait("b", 0, 1, 2), Wait("a", 0, 3, 4), Wait("b", 1, 5, 6)],
        )

    write_rank(tmp_path, header(0, 1), [line(2), line(0), line(1)])
    tables = load_run(tmp_path, spans=True).ranks[0]
    for spans in (tables.spans, tables.details.spans(np.arange(3))):
        assert [spans.of_step(place).of_lanes(Lane.COMPUTE).start_ns.tolist() for place in range(3)] == [[0], [1], [2]]
        mine = spans.of_step(1)
        assert mine.lane.tolist() == [Lane.COMPUTE, Lane.AUX, Lane.HAND_OVER, Lane.WAIT, Lane.WAIT, Lane.WAIT]
        assert [spans.names[name].name for name in mine.of_lanes(Lane.WAIT).name] == ["b", "a", "b"]
        assert spans.waits_known.tolist() == [True] * 3
