"""How much slower kernels are under communication, and how much of an interval others cover."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given

from aorta.analysis.load import trace_tables
from aorta.analysis.load.interval_table import by_device
from aorta.analysis.load.kernels import FEWEST, slowdowns
from aorta.analysis.load.traces import load_traces
from aorta.timeline.arrays import covered_ns, merge, spans
from tests.analysis.load.tables import COMM, COMPUTE, row, trace
from tests.strategies import bases, interval_lists


@given(rows=interval_lists, cover=interval_lists, base=bases)
def test_covered_time_is_what_counting_nanoseconds_gives(
    rows: list[tuple[int, int]], cover: list[tuple[int, int]], base: int
) -> None:
    counted = [sum(any(low <= t < high for low, high in cover) for t in range(start, end)) for start, end in rows]
    moved = [spans((start + base, end + base) for start, end in each) for each in (rows, cover)]
    assert covered_ns(moved[0], merge(moved[1])).tolist() == counted


def kernels(count: int, at: int, length: int, **where: int) -> list[dict[str, object]]:
    return [row(COMPUTE, at + 1000 * each, at + 1000 * each + length, name="gemm", **where) for each in range(count)]


def test_the_median_of_covered_kernels_is_set_against_that_of_those_alone() -> None:
    rows = [*kernels(6, 0, 400), *kernels(7, 100_000, 500), row(COMM, 100_000, 200_000, kind="allreduce")]
    (found,) = slowdowns(trace(rows))
    assert (found.name, found.rank, found.device) == ("gemm", 0, 0)
    assert (found.alone_count, found.overlapped_count, found.partly_count) == (6, 7, 0)
    assert found.alone_median_ms == pytest.approx(400e-6)
    assert found.overlapped_median_ms == pytest.approx(500e-6)
    assert found.slowdown == pytest.approx(0.25)
    assert found.excess_ms == pytest.approx(7 * 100e-6)
    assert found.reason is None


def test_too_few_kernels_on_a_side_give_null_and_the_counts() -> None:
    rows = [*kernels(FEWEST - 1, 0, 400), *kernels(7, 100_000, 500), row(COMM, 100_000, 200_000, kind="allreduce")]
    (found,) = slowdowns(trace(rows))
    assert (found.slowdown, found.excess_ms) == (None, None)
    assert found.alone_median_ms is not None
    assert found.reason == "5 alone and 7 overlapped; at least 6 of each are needed"


def test_kernels_that_communication_merely_touches_are_on_neither_side() -> None:
    # [900, 1000) touches the first kernel for 100 of its 400 ns.
    rows = [*kernels(8, 600, 400), row(COMM, 900, 1000, kind="allreduce")]
    (found,) = slowdowns(trace(rows))
    assert (found.alone_count, found.overlapped_count, found.partly_count) == (7, 0, 1)


def test_communication_of_another_device_overlaps_nothing_here() -> None:
    rows = [*kernels(12, 0, 400, device=0), row(COMM, 0, 12_000, kind="allreduce", device=1)]
    (found,) = slowdowns(trace(rows))
    assert (found.alone_count, found.overlapped_count) == (12, 0)
    assert found.reason == "no communication on this device"


def test_every_device_has_its_rows() -> None:
    rows = [row(COMPUTE, at, 9, device=device) for at, device in enumerate((0, -1, 0, 3))]
    found = [(device, own.start_ns.tolist()) for device, own in by_device(trace(rows).intervals)]
    assert found == [(-1, [1]), (0, [0, 2]), (3, [3])]


def test_an_empty_table_has_no_kernels() -> None:
    assert slowdowns(trace([])) == []


def test_kernels_that_became_faster_stand_before_those_that_cannot_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cover = row(COMM, 100_000, 200_000, kind="allreduce")
    named = [
        {**each, "name": name}
        for name, alone, overlapped in (("slower", 400, 500), ("faster", 400, 300))
        for each in (*kernels(6, 0, alone), *kernels(6, 100_000, overlapped))
    ]
    made = trace([*named, row(COMPUTE, 0, 5, name="a"), row(COMPUTE, 0, 5, name="b"), cover])
    assert [each.name for each in slowdowns(made)] == ["slower", "faster", "a", "b"]
    monkeypatch.setattr(trace_tables, "read_unit", lambda unit: iter([made]))
    monkeypatch.setattr(trace_tables, "SHOWN_SLOWDOWNS", 2)
    (tmp_path / "t.json").write_text('{"traceEvents": []}')
    run = load_traces(str(tmp_path / "t.json"))
    assert [each.name for each in run.traces.slowdowns] == ["slower", "faster"]
    assert any("2 left out" in note for note in run.health.notes())
