"""Curves and spans against numbers worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from aorta.analysis.aggregate import LabelledRun
from aorta.read.record import load_run
from aorta.read.traces.load import load_traces
from aorta.records.clocks import CLOCK_SYNC_FILE, ClockSync, Injected, OffsetSample, RankClock, encode
from aorta.records.schema import Step
from aorta.report.page import charts
from aorta.report.page import timelines as timeline
from aorta.report.page.timelines import BLOCKED, EXPOSED, TimelineSpans, spans_of
from tests.analysis.builders import MS, collective, header, metrics, step, write_rank
from tests.analysis.run_builders import block, comm, made_step, recorded
from tests.read.kineto_files import document, event, kernel
from tests.read.kineto_files import step as kineto_step


def test_a_curve_is_the_median_between_the_lowest_and_the_highest(tmp_path):
    def of_rank(rank: int) -> list[Step]:
        return [step(rank, 3, at, overlap=metrics(10 + at + rank, 8, 4, 0.4 * at), warmup=at < 2) for at in range(5)]

    dataset = recorded(tmp_path, of_rank, 3)
    curves, _ = charts.curves_of(dataset)
    job = curves["job_step"]
    assert (job.x.tolist(), job.low.tolist()) == ([2, 3, 4], [12, 13, 14])
    assert job.middle.tolist() == job.high.tolist() == [14, 15, 16]
    assert curves["overlap_ratio"].middle == pytest.approx([0.2, 0.3, 0.4])
    assert charts.steps_a_point(dataset.global_steps) == 1


def test_ranks_that_a_trace_does_not_tell_are_chosen_in_order(tmp_path):
    for at in range(3):
        events = [kineto_step(0, at, 1000), kernel("gemm", at, 400)]  # the same times would be a copy
        (tmp_path / f"{at}.json").write_text(json.dumps(document(events, distributedInfo=None)))
    found = spans_of(LabelledRun("x", load_traces(str(tmp_path))), budget=1_000, first=2)
    assert (found.ranks, found.shown_first) == ([-3, -2, -1], [-3, -1])


def drawn(found: TimelineSpans, rank: int, place: int) -> set[tuple[str, str, float, float]]:
    """Lane, kind, start and length in ms of the spans of one rank in one step."""
    columns = found.columns
    mine = (columns["rank"] == found.ranks.index(rank)) & (columns["step"] == place)
    return {
        (
            found.lanes[columns["lane"][at]],
            list(found.kinds)[columns["kind"][at]],
            round(float(columns["start"][at]), 3),
            round(float(columns["length"][at]), 3),
        )
        for at in np.flatnonzero(mine)
    }


def detailed(folder: Path, ranks: int = 2, parts: int = 1) -> LabelledRun:
    """Compute 0 to 4 ms, an all-reduce 3 to 6, blocked 4 to 6, the optimizer 6 to 7; `parts`: pieces of compute."""
    blocks = [block("block0", "forward", 4 * piece / parts, 4 * (piece + 1) / parts) for piece in range(parts)]

    def of_rank(rank: int) -> Iterator[Step]:
        for at in range(3):
            rows = [comm("allreduce", min(3.0 + 0.5 * rank, 5.5), 6.0, seq=at, group="world")]
            yield made_step(rank, ranks, at, 7 + (at == 1), blocks, rows, [(4, 6)], [("optimizer", 6, 7)])

    return recorded(folder, of_rank, ranks)


def test_the_spans_of_a_step_are_those_of_the_record(tmp_path):
    found = spans_of(detailed(tmp_path), budget=1000, first=8)
    assert [(each.why, each.global_step) for each in found.steps] == [
        ("median job step", 2),  # of steps that take 7, 7 and 8 ms
        ("slowest job step", 1),
        ("fastest job step", 0),
    ]
    assert drawn(found, 0, 0) == {
        ("compute", "forward", 0.0, 4.0),
        ("compute", BLOCKED, 4.0, 2.0),
        ("group world", "allreduce", 3.0, 3.0),
        (EXPOSED, EXPOSED, 4.0, 2.0),
        ("optimizer, data", "optimizer", 6.0, 1.0),
    }
    late = found.columns["wait"][(found.columns["seq"] == 2) & (found.columns["rank"] == 0)]
    assert late.tolist() == [0.5]  # rank 1 came 0.5 ms later
    assert found.notes == []
    names = ["optimizer, data", "group 10", EXPOSED, "group 9", "compute", "allgather"]
    order = ["compute", "allgather", "group 9", "group 10", EXPOSED, "optimizer, data"]
    assert sorted(names, key=timeline.lane_order) == order


HOST, OTHER = {"host": "node0", "boot": "one"}, {"host": "node1", "boot": "two"}


def skewed(folder: Path, places: Sequence[Mapping[str, str]], ahead_ms: float, bound_ms: float | None) -> LabelledRun:
    """An all-reduce that both ranks leave at the same instant. Rank 1 begins the step 4 ms late, its wall clock is
    `ahead_ms` ahead; `bound_ms`: how well that was measured, None where it was not.
    """
    lines = []
    for rank, late_ms in ((0, 0), (1, 4)):
        rows = [collective(start_ms=6.0 - late_ms, end_ms=9.0 - late_ms)]
        line = step(rank, 2, overlap=metrics(12 - late_ms, 4, 3, 0), collectives=rows)
        late = {name: getattr(line, name) + late_ms * MS for name in ("start_mono_ns", "end_mono_ns")}
        ahead_ns = round((late_ms + rank * ahead_ms) * MS)
        late |= {name: getattr(line, name) + ahead_ns for name in ("t_start_ns", "t_end_ns")}
        lines.append(msgspec.structs.replace(line, **late))
        where = places[rank]
        write_rank(folder, header(rank, 2, host=where["host"], boot_id=where["boot"]), [lines[-1]])
    if bound_ms is not None:
        clocks = []
        for rank, line in enumerate(lines):
            ahead_ns, bound_ns = round(rank * ahead_ms * MS), round(rank * bound_ms * MS)
            ends = [OffsetSample(line.t_start_ns + at * 10**9, ahead_ns, 2 * bound_ns, bound_ns, 32) for at in (-1, 1)]
            clocks.append(RankClock(rank, places[rank]["host"], places[rank]["boot"], *ends))
        sync = ClockSync(1, "run-1", 0, 0, "CLOCK_REALTIME", "gloo", True, clocks)
        (folder / CLOCK_SYNC_FILE).write_bytes(encode(sync))
    return LabelledRun("x", load_run(folder))


@pytest.mark.parametrize(
    ("places", "bound_ms", "ends", "starts", "bounds", "said"),
    [
        ((HOST, OTHER), 0.25, [9, 9], [0, 4], [0, 0.25], "by their measured offsets, known to 0.25 ms"),
        ((HOST, HOST), None, [9, 9], [0, 4], [0, 0], "on one clock, that of their host"),
        ((HOST, OTHER), None, [9, 5], [0, 0], [np.nan] * 2, "at its own zero: there is no clock_sync.json"),
    ],
)
def test_a_collective_ends_at_one_place_on_ranks_whose_clocks_are_known(
    places, bound_ms, ends, starts, bounds, said, tmp_path
):
    found = spans_of(skewed(tmp_path, places, 7_000.0, bound_ms), budget=1000, first=8)
    shared = found.columns["seq"] == 0
    assert (found.columns["start"] + found.columns["length"])[shared] == pytest.approx(ends)
    assert found.windows["start"] == pytest.approx(starts)
    assert found.windows["length"] == pytest.approx([12, 8])
    np.testing.assert_allclose(found.windows["bound"], bounds)
    assert said in found.clock


def test_the_bound_of_a_clock_with_an_injected_skew_is_that_at_the_time_it_shows(tmp_path):
    run = skewed(tmp_path, (HOST, OTHER), 7_000.0, 0.25).run
    measured, start_ns = run.clocks[1], int(run.ranks[1].steps.t_start_ns[0])
    ends = [OffsetSample(start_ns + at * 10**9, 0, 0, bound_ns, 32) for at, bound_ns in ((0, 0), (1, MS))]
    replaced = msgspec.structs.replace(measured, start=ends[0], end=ends[1], injected=Injected(10**9, 0.0, 0))
    run.clocks[1] = replaced  # which is a second ahead
    starts, _ = timeline.windows(run, 0, [0, 1])
    assert starts[1][2] == 1.0


@pytest.mark.parametrize(
    ("budget", "first", "named", "ranks", "shown_first", "notes"),
    [
        (5 * 3 * 3, 2, [7], [0, 4, 7, 8], [0, 7], []),
        (10_000, 20, [], list(range(9)), list(range(9)), []),
        (
            5 * 3 * 2,
            2,
            [7, 6, 5, 4],
            [0, 6, 7, 8],
            [0, 6],
            ["for lack of room 2 stragglers not drawn, the first: rank 4"],
        ),
    ],
)
def test_fewer_ranks_than_there_are_is_said_and_named_ranks_stay(
    tmp_path, budget, first, named, ranks, shown_first, notes
):
    found = spans_of(detailed(tmp_path, ranks=9), budget=budget, first=first, named=named)
    assert (found.ranks, found.ranks_in_run, found.shown_first, found.notes) == (ranks, 9, shown_first, notes)


def test_the_ranks_of_a_run_are_those_it_had(tmp_path):
    dataset = detailed(tmp_path, ranks=3)
    (tmp_path / "rank_1_metrics.jsonl").unlink()
    found = spans_of(LabelledRun("x", load_run(tmp_path)), budget=1000, first=8)
    assert (found.ranks, found.ranks_read, found.ranks_in_run) == ([0, 2], 2, 3)
    assert {each.job_step_ms for each in found.steps} == {None}
    assert {each.job_step_ms for each in spans_of(dataset, budget=1000, first=8).steps} == {7.0, 8.0}


def test_spans_closer_than_a_pixel_are_drawn_as_one_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "RANK_STEP_SPANS", 50)
    found = spans_of(detailed(tmp_path, ranks=1, parts=100), budget=10_000, first=8)
    assert ("compute", "forward", 0.0, 4.0) in drawn(found, 0, 0)
    assert found.notes == ["drawn as one with a neighbour closer than a pixel: 297 spans"]


def of_trace(folder: Path, event: dict[str, Any]) -> LabelledRun:
    """A step of 1 ms of a trace: what is given, and an all-reduce from 0.3 to 0.6 ms."""
    allreduce = kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 300, 300, stream=20)
    (folder / "rank0.json").write_text(json.dumps(document([kineto_step(0, 0, 1000), event, allreduce])))
    return LabelledRun("x", load_traces(str(folder / "rank0.json")))


def test_a_trace_of_another_tool_is_drawn_from_its_segments(tmp_path):
    found = spans_of(of_trace(tmp_path, kernel("gemm", 0, 400)), budget=1000, first=8)
    rank = found.ranks[0]
    assert ("compute", "compute", 0.0, 0.4) in drawn(found, rank, 0)
    assert (EXPOSED, EXPOSED, 0.4, 0.2) in drawn(found, rank, 0)
    assert {(kind, start, length) for _, kind, start, length in drawn(found, rank, 0)} >= {("allreduce", 0.3, 0.3)}


def test_what_a_trace_does_not_show_is_not_drawn(tmp_path):
    """A graph's kernels are lost, so what ran beside the collective is not known."""
    dataset = of_trace(tmp_path, event("cuda_runtime", "cudaGraphLaunch", 10, 5, 4242, 4242, correlation=9))
    found = spans_of(dataset, budget=1000, first=8)
    assert {kind for _, kind, *_ in drawn(found, found.ranks[0], 0)} == {"allreduce"}
    assert found.notes == [
        f"not drawn, as it is not known: {what} of rank 0" for what in ("computation", "exposed communication")
    ]
    assert not dataset.pace.drawn_as_ranges
