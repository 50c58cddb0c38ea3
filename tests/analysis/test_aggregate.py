"""Numbers of one dataset, against numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import aorta.analysis
from aorta.analysis.aggregate import NOTHING_RECORDED, NOTHING_USED, LabelledRun, aggregate
from aorta.documents import known as value_of
from aorta.documents.dataset import DatasetEntry
from aorta.documents.statistics import describe
from aorta.read.record import load_run
from aorta.records.schema import Coverage
from tests.analysis.builders import header, metrics, step, write_rank


def aggregated(folder: Path) -> DatasetEntry:
    return aggregate(LabelledRun("base", load_run(folder)))


@pytest.fixture
def known(tmp_path: Path) -> DatasetEntry:
    """Two ranks, one warm-up step and two more. Rank 0: 2 of 4 ms and 6 of 8 ms hidden; rank 1: 1 of 4 and 8 of 8."""
    hidden = {0: ((4, 2), (8, 6)), 1: ((4, 1), (8, 8))}
    for rank, parts in hidden.items():
        lines = [step(rank, 2, 0, overlap=metrics(500, 400, 300, 0), warmup=True, loss=99.0)]
        lines += [
            step(rank, 2, number, overlap=metrics(20 + 10 * number + rank, 16, comm, inside), loss=number + rank)
            for number, (comm, inside) in enumerate(parts, start=1)
        ]
        write_rank(tmp_path, header(rank, 2, warmup_steps=1), lines)
    return aggregated(tmp_path)


@pytest.mark.spec("D21")
def test_older_keys(known: DatasetEntry) -> None:
    assert known.count == 4
    assert known.mean_loss == 2.0  # 1, 2 on rank 0 and 2, 3 on rank 1
    assert known.mean_overlap_ms == 4.25  # 2, 6, 1, 8
    assert known.mean_compute_ms == 16.0
    assert known.mean_allreduce_overlap_ms == 4.25
    assert known.mean_reducescatter_overlap_ms == 0.0
    assert known.overlap_ratio == 0.625  # the median of 0.5, 0.75, 0.25, 1


def test_a_metric_that_is_made_of_others_is_null_where_one_of_them_is(tmp_path: Path) -> None:
    lines = [step(0, 1, number, overlap=metrics(20, 10, 4, 4)) for number in range(2)]  # idle 10 of 20 ms
    lines.append(step(0, 1, 2, overlap=metrics(20, 10, 4, 4, idle_ms=None), reasons={"idle_ms": "not seen"}))
    write_rank(tmp_path, header(0, 1), lines)
    entry = aggregated(tmp_path).metrics["idle_share"]
    assert (entry.median, entry.count, entry.null_reasons) == (0.5, 2, {"not seen": 1})
    assert aorta.analysis.steps(tmp_path)["idle_share"].tolist()[:2] == [0.5, 0.5]


@pytest.mark.spec("D21")
def test_warmup_is_left_out_and_counted(known: DatasetEntry) -> None:
    steps = known.steps
    assert (steps.rank_steps_read, steps.rank_steps_used, steps.rank_steps_left_out_as_warmup) == (6, 4, 2)
    assert "the first 1 of the run" in steps.warmup_rule
    assert known.metrics["comm_ms"].max == 8


def test_both_ratios_of_a_window_are_given_and_named(known: DatasetEntry) -> None:
    ratio = known.metrics["overlap_ratio"]
    assert ratio.median == 0.625
    assert ratio.ratio_of_sums == 17 / 24
    assert known.metrics["overlap_over_compute"].ratio_of_sums == 17 / 64


def test_the_job_step_is_the_slowest_rank(known: DatasetEntry) -> None:
    job = known.metrics["job_step_ms"]
    assert (job.count, job.min, job.median, job.max) == (2, 31, 36, 41)


def test_a_step_that_a_rank_lacks_is_no_job_step(tmp_path: Path) -> None:
    for rank, numbers in enumerate(((0, 1, 2), (0, 2))):
        lines = [step(rank, 2, number, overlap=metrics(10 + 10 * number + rank, 8, 4, 2)) for number in numbers]
        write_rank(tmp_path, header(rank, 2), lines)
    job = aggregated(tmp_path).metrics["job_step_ms"]
    assert (job.count, job.min, job.max) == (2, 11, 31)


def test_a_ratio_of_sums_leaves_out_steps_in_which_either_part_is_null(tmp_path: Path) -> None:
    lines = [
        step(0, 2, 0, overlap=metrics(10, 8, 4, 2)),
        step(0, 2, 1, overlap=metrics(10, 8, 6, 5, compute_comm_ms=None)),
        step(0, 2, 2, overlap=metrics(10, 8, 6, 5, comm_ms=None)),
        step(0, 2, 3, overlap=metrics(10, 8, 4, 1)),
    ]
    write_rank(tmp_path, header(0, 2), lines)
    assert aggregated(tmp_path).metrics["overlap_ratio"].ratio_of_sums == 3 / 8


@pytest.mark.spec("D21")
def test_ranks_are_set_beside_each_other(known: DatasetEntry) -> None:
    hidden = known.metrics["compute_comm_ms"]
    assert hidden.per_rank_median == {"0": 4.0, "1": 4.5}
    assert hidden.rank_spread == 0.5


def test_a_run_without_a_pipeline_has_null_bubbles_with_the_reason(known: DatasetEntry) -> None:
    for name in ("bubble_ms", "bubble_share"):
        assert known.metrics[name].median is None
        assert known.metrics[name].reason == "the record has no pipeline of stages"


def test_null_steps_are_counted_with_their_reasons(tmp_path: Path) -> None:
    quiet, unseen = "no communication in this window", "2 of 3 collectives seen"
    blind = dict.fromkeys(metrics(10, 8, 4, 2)) | {"window_ms": 10.0, "compute_ms": 8.0}
    lines = [
        step(0, 2, 0, overlap=metrics(10, 8, 4, 2)),
        step(0, 2, 1, overlap=metrics(10, 8, 0, 0), reasons={"overlap_ratio": quiet}),
        step(0, 2, 2, overlap=blind, reasons=dict.fromkeys(blind, unseen), coverage=Coverage(2, 3, False, unseen)),
    ]
    write_rank(tmp_path, header(0, 2), lines)
    found = aggregated(tmp_path).metrics
    assert (found["overlap_ratio"].count, found["overlap_ratio"].nulls) == (1, 2)
    assert found["overlap_ratio"].null_reasons == {quiet: 1, unseen: 1}
    assert found["overlap_ratio"].ratio_of_sums == 0.5
    assert found["compute_ms"].count == 3


def test_a_run_without_communication_has_no_ratio_but_a_reason(tmp_path: Path) -> None:
    reason = "no communication in this window"
    write_rank(
        tmp_path, header(0, 2), [step(0, 2, overlap=metrics(10, 8, 0, 0), reasons={"overlap_ratio": reason}, loss=None)]
    )
    entry = aggregated(tmp_path)
    assert entry.overlap_ratio is None
    assert entry.mean_loss is None
    assert entry.null_reasons == {"mean_loss": "loss is unknown in every step", "overlap_ratio": reason}
    assert entry.metrics["overlap_ratio"].ratio_of_sums is None
    assert entry.metrics["overlap_ratio"].ratio_of_sums_reason == "comm_ms is 0 or unknown in every step"


def test_one_rank_communicates_with_nobody_and_has_no_ratio_but_a_reason(tmp_path: Path) -> None:
    write_rank(tmp_path, header(), [step(overlap=metrics(10, 8, 4, 2))])
    entry = aggregated(tmp_path)
    for name in ("overlap_ratio", "overlap_over_compute"):
        found = entry.metrics[name]
        assert (found.count, found.nulls, found.median, found.ratio_of_sums) == (0, 1, None, None)
        assert found.reason == "one rank: it has no other rank to communicate with, so there is nothing to hide"
    assert entry.overlap_ratio is None
    # What its calls took, and blocked, is no question of ranks.
    assert [entry.metrics[name].median for name in ("comm_ms", "exposed_comm_ms")] == [4, 2]


def test_a_kind_a_step_does_not_mention_was_not_used_in_it(tmp_path: Path) -> None:
    gathered = metrics(10, 8, 4, 2, allgather_ms=3.0, compute_allgather_ms=1.0, exposed_allgather_ms=2.0)
    unseen = metrics(10, 8, 4, 2, comm_ms=None)
    lines = [
        step(0, 1, number, overlap=overlap, reasons={"comm_ms": "not seen"})
        for number, overlap in enumerate([gathered, metrics(10, 8, 4, 2), unseen])
    ]
    write_rank(tmp_path, header(), lines)
    entry = aggregated(tmp_path).metrics["allgather_ms"]
    assert (entry.count, entry.min, entry.max) == (2, 0.0, 3.0)
    assert entry.null_reasons == {"not seen": 1}


@pytest.mark.parametrize(
    ("steps", "reason"),
    [([], NOTHING_RECORDED), ([step(overlap=metrics(10, 8, 4, 2), warmup=True)], NOTHING_USED)],
)
def test_nothing_after_warmup_is_a_count_of_zero(tmp_path: Path, steps: list[Any], reason: str) -> None:
    write_rank(tmp_path, header(), steps)
    entry = aggregated(tmp_path)
    assert entry.count == 0
    assert entry.reason == reason
    assert value_of(entry.metrics) is None


def test_one_rank_has_no_spread() -> None:
    entry = describe([1.0, 2.0], [0, 0])
    assert entry.rank_spread is None
    assert entry.rank_spread_reason == "1 rank(s) with values; a spread needs two"


def test_the_library_gives_frames_with_whole_nanoseconds(tmp_path: Path) -> None:
    write_rank(tmp_path, header(), [step(overlap=metrics(10, 8, 4, 2), warmup=True, loss=None)])
    frame = aorta.analysis.steps(tmp_path)
    assert frame["t_start_ns"].dtype == "int64"
    assert frame["warmup"].tolist() == [True]
    assert frame["loss"].isna().all()
    assert frame["step_ms"].tolist() == [10.0]
