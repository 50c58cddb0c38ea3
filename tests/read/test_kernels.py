"""Kernels by name, launch gaps and slowdowns: hand-made traces with known answers; and the self time of operators:
what counts as computation in the trace of a CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.read.traces.kernels import (
    FEWEST,
    by_name,
    entries,
    kernel_facts,
    kernel_totals,
    slowdowns,
    stream_gaps,
)
from aorta.read.traces.load import load_traces
from aorta.timeline.arrays import IntervalArray, covered_ns, interval_array, merge, self_times
from tests.read import test_rocprof
from tests.read.tables import COMM, COMPUTE, COPY, UNKNOWN, row, trace
from tests.strategies import bases, interval_lists

MS = 1_000_000


def test_kernels_are_summed_by_name_on_each_device_with_their_share_of_its_kernel_time() -> None:
    rows = [
        *(row(COMPUTE, start * MS, (start + length) * MS, name="gemm") for start, length in ((0, 1), (10, 3))),
        row(COMM, 2 * MS, 10 * MS, name="nccl", kind="allreduce"),
        row(COPY, 20 * MS, 24 * MS, name="memcpy"),
        row(UNKNOWN, 30 * MS, 46 * MS, name=""),
        row(COMPUTE, 0, 5 * MS, name="gemm", device=1),
    ]
    names = ("device", "name", "rank", "cls", "count", "total_ms", "mean_ms", "min_ms", "max_ms", "std_ms", "share")
    assert [tuple(getattr(each, name) for name in names) for each in kernel_totals(trace(rows))] == [
        (0, "", 0, "unknown", 1, 16.0, 16.0, 16.0, 16.0, None, 0.5),
        (0, "nccl", 0, "comm", 1, 8.0, 8.0, 8.0, 8.0, None, 0.25),
        (0, "gemm", 0, "compute", 2, 4.0, 2.0, 1.0, 3.0, pytest.approx(2**0.5), 0.125),
        (0, "memcpy", 0, "copy", 1, 4.0, 4.0, 4.0, 4.0, None, 0.125),
        (1, "gemm", 0, "compute", 1, 5.0, 5.0, 5.0, 5.0, None, 1.0),
    ]


def test_all_devices_together_are_what_one_device_with_all_kernels_would_be() -> None:
    generator = np.random.default_rng(5)
    apart, together = [], []
    for device in range(3):
        for at, length in enumerate(generator.integers(1, 1000, 7 + device).tolist()):
            for device_told, rows in ((device, apart), (0, together)):
                rows.append(row(COMPUTE, 10_000 * at, 10_000 * at + length, name=f"k{at % 2}", device=device_told))
    totals, expected = kernel_totals(trace(apart)), kernel_totals(trace(together))
    found = by_name(totals, sum(row.total_ms for row in totals))
    for one, other in zip(found, expected, strict=True):
        assert (one.rank, one.device, one.name, one.count) == (None, None, other.name, other.count)
        for name in ("total_ms", "mean_ms", "std_ms", "min_ms", "max_ms", "share"):
            assert getattr(one, name) == pytest.approx(getattr(other, name))


@pytest.mark.parametrize("source", ["json", "csv-direct", "rocpd"])
def test_every_output_of_rocprofv3_tells_what_was_launched_late(source: str, tmp_path: Path) -> None:
    first = next(each for each in stream_gaps(test_rocprof.read(source, tmp_path))[0] if each.stream == 1)
    # Before the copy 350 ns, of unknown launch; before the fill 10 ns and before the second gemm 170 ns, both late.
    assert (first.kernels, first.gaps, first.gap_ms, first.busy_ms) == (4, 3, 530e-6, 670e-6)
    assert (first.gaps_known, first.launch_bound) == (2, 2)
    assert first.launch_bound_ms == pytest.approx(180e-6)


def test_rows_beyond_the_kept_ones_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aorta.read.traces.kernels.SHOWN_ROWS", 2)
    rows = [[row(COMPUTE, 0, 10 + at, name=f"k{at}", rank=rank) for at in range(5)] for rank in (0, 1)]
    kept = entries([kernel_facts(trace(rows[0])), kernel_facts(trace(rows[1]))])
    assert (len(kept.totals), kept.left_out) == (4, {"totals": 6, "slowdowns": 6})
    assert sum(kernel.share for kernel in kept.by_name) <= 1


@given(rows=interval_lists, cover=interval_lists, base=bases)
def test_covered_time_is_what_counting_nanoseconds_gives(
    rows: list[tuple[int, int]], cover: list[tuple[int, int]], base: int
) -> None:
    counted = [sum(any(low <= t < high for low, high in cover) for t in range(start, end)) for start, end in rows]
    moved = [interval_array((start + base, end + base) for start, end in each) for each in (rows, cover)]
    assert covered_ns(moved[0], merge(moved[1])).tolist() == counted


def gemms(count: int, at: int, length: int, **where: int) -> list[dict[str, object]]:
    return [row(COMPUTE, at + 1000 * each, at + 1000 * each + length, name="gemm", **where) for each in range(count)]


COVER = row(COMM, 100_000, 200_000, kind="allreduce")
TOO_FEW = "{} alone and {} overlapped; at least 6 of each are needed"


@pytest.mark.parametrize(
    ("rows", "counts", "slower", "reason"),
    [
        ([*gemms(6, 0, 400), *gemms(7, 100_000, 500), COVER], (6, 7, 0), (0.25, 7 * 100e-6), None),
        # A larger shape beside it, alone and overlapped alike: nothing became slower.
        (
            [*gemms(8, 0, 400), *gemms(3, 20_000, 900), *gemms(8, 100_000, 400), *gemms(3, 120_000, 900), COVER],
            (11, 11, 0),
            (0, 0),
            None,
        ),
        ([*gemms(FEWEST - 1, 0, 400), *gemms(7, 100_000, 500), COVER], (5, 7, 0), None, TOO_FEW.format(5, 7)),
        # [900, 1000) touches the first kernel for 100 of its 400 ns.
        ([*gemms(8, 600, 400), row(COMM, 900, 1000, kind="allreduce")], (7, 0, 1), None, TOO_FEW.format(7, 0)),
        (
            [*gemms(12, 0, 400, device=0), row(COMM, 0, 12_000, kind="allreduce", device=1)],
            (12, 0, 0),
            None,
            "no communication on this device",
        ),
    ],
)
def test_the_median_of_covered_kernels_is_set_against_that_of_those_alone(
    rows: list[Any], counts: tuple[int, int, int], slower: tuple[float, float] | None, reason: str | None
) -> None:
    (found,) = slowdowns(trace(rows))
    assert (found.name, found.rank, found.device, found.reason) == ("gemm", 0, 0, reason)
    assert (found.alone_count, found.overlapped_count, found.partly_count) == counts
    assert found.alone_median_ms == pytest.approx(400e-6)
    assert (found.slowdown, found.excess_ms) == ((None, None) if slower is None else pytest.approx(slower))


def test_kernels_that_became_faster_stand_before_those_that_cannot_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = [
        {**each, "name": name}
        for name, alone, overlapped in (("slower", 400, 500), ("faster", 400, 300))
        for each in (*gemms(6, 0, alone), *gemms(6, 100_000, overlapped))
    ]
    made = trace([*named, row(COMPUTE, 0, 5, name="a"), row(COMPUTE, 0, 5, name="b"), COVER])
    assert [each.name for each in slowdowns(made)] == ["slower", "faster", "a", "b"]
    monkeypatch.setattr("aorta.read.traces.tables.read_unit", lambda unit: iter([made]))
    monkeypatch.setattr("aorta.read.traces.kernels.SHOWN_ROWS", 2)
    (tmp_path / "t.json").write_text('{"traceEvents": []}')
    run = load_traces(str(tmp_path / "t.json"))
    assert [each.name for each in run.traces.slowdowns] == ["slower", "faster"]
    assert run.traces.kernels.left_out["slowdowns"] == 2


times = st.integers(0, 30)
flat = st.lists(st.tuples(times, times, st.integers(1, 2)).map(lambda row: (*sorted(row[:2]), row[2])), max_size=9)


@st.composite
def nested_rows(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Rows of two threads that nest, as brackets do."""
    rows: list[tuple[int, int, int]] = []
    for thread in (1, 2):
        begun: list[int] = []
        for place, begins in enumerate(draw(st.lists(st.booleans(), max_size=24))):
            if begins:
                begun.append(place // 3)
            elif begun:
                rows.append((begun.pop(), place // 3, thread))
    return rows


def by_moment(rows: list[tuple[int, int, int]]) -> dict[tuple[int, int], int]:
    """For each thread and moment the innermost row that runs then."""
    order = sorted(range(len(rows)), key=lambda at: (rows[at][0], -rows[at][1], at))
    return {(rows[at][2], moment): at for at in order for moment in range(rows[at][0], rows[at][1])}


def owners(rows: list[tuple[int, int, int]]) -> dict[tuple[int, int], int]:
    start, end, thread = (np.array([row[place] for row in rows], np.int64) for place in range(3))
    owner, pieces = self_times(IntervalArray(start, end), thread)
    found: dict[tuple[int, int], int] = {}
    for at, low, high in zip(owner.tolist(), pieces.start.tolist(), pieces.end.tolist(), strict=True):
        assert low < high
        for moment in range(low, high):
            assert found.setdefault((rows[at][2], moment), at) == at
    return found


@given(nested_rows())
def test_each_moment_of_a_thread_belongs_to_the_innermost_row(rows: list[tuple[int, int, int]]) -> None:
    assert owners(rows) == by_moment(rows)


@given(flat)
def test_rows_that_overlap_without_nesting_lose_no_time(rows: list[tuple[int, int, int]]) -> None:
    assert owners(rows).keys() == by_moment(rows).keys()
