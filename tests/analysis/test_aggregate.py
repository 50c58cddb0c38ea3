"""Numbers of one dataset, isolated baselines and samples of steps among them, against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aorta.analysis
from aorta.analysis.aggregate import NOTHING_RECORDED, NOTHING_USED, LabelledRun, aggregate
from aorta.analysis.compare.run_comparison import OBSERVED
from aorta.documents import as_json
from aorta.documents import known as value_of
from aorta.documents.dataset import DatasetEntry, PhaseTimes
from aorta.records.schema import Coverage, Step
from aorta.report.page.charts import curves_of
from aorta.report.page.elements import measured_over
from aorta.report.page.timelines import chosen_steps
from aorta.report.run_tables import metrics_table
from aorta.report.tables import text_lines
from aorta.timeline.overlap import NOT_SAMPLED
from tests.analysis.builders import collective, metrics, step
from tests.analysis.run_builders import recorded
from tests.analysis.test_compare import compared


@pytest.fixture
def known(tmp_path):
    """Two ranks, one warm-up step and two more. Rank 0: 2 of 4 ms and 6 of 8 ms hidden; rank 1: 1 of 4 and 8 of 8."""
    hidden = {0: ((4, 2), (8, 6)), 1: ((4, 1), (8, 8))}

    def of_rank(rank: int) -> Iterator[Step]:
        yield step(rank, 2, 0, overlap=metrics(500, 400, 300, 0), warmup=True, loss=99.0)
        for number, (comm, inside) in enumerate(hidden[rank], start=1):
            overlap = metrics(20 + 10 * number + rank, 16, comm, inside)
            yield step(rank, 2, number, overlap=overlap, loss=number + rank)

    return aggregate(recorded(tmp_path, of_rank, 2, warmup_steps=1))


def of_steps(folder: Path, *overlaps: dict[str, float | None], world: int = 2, **more: Any) -> DatasetEntry:
    """One rank, whose steps have these metrics; `more`: what all of them have besides."""
    lines = [step(0, world, number, overlap=overlap, **more) for number, overlap in enumerate(overlaps)]
    return aggregate(recorded(folder, lambda rank: lines, world=world))


@pytest.mark.spec("D21")
def test_the_numbers_of_a_run_are_those_worked_out_by_hand(known):
    assert (known.count, known.mean_loss) == (4, 2.0)  # 1, 2 on rank 0 and 2, 3 on rank 1
    assert (known.mean_overlap_ms, known.mean_allreduce_overlap_ms) == (4.25, 4.25)  # 2, 6, 1, 8
    assert (known.mean_compute_ms, known.mean_reducescatter_overlap_ms) == (16.0, 0.0)
    ratio, job, hidden = (known.metrics[name] for name in ("overlap_ratio", "job_step_ms", "compute_comm_ms"))
    assert known.overlap_ratio == ratio.median == 0.625  # of 0.5, 0.75, 0.25, 1
    assert (ratio.ratio_of_sums, known.metrics["overlap_over_compute"].ratio_of_sums) == (17 / 24, 17 / 64)
    assert (job.count, job.min, job.median, job.max) == (2, 31, 36, 41)  # of the slowest rank
    assert (hidden.per_rank_median, hidden.rank_spread) == ({"0": 4.0, "1": 4.5}, 0.5)
    bubbles = {known.metrics[name].reason for name in ("bubble_ms", "bubble_share")}
    assert bubbles == {"the record has no pipeline of stages"}
    steps = known.steps
    assert (steps.rank_steps_read, steps.rank_steps_used, steps.rank_steps_left_out_as_warmup) == (6, 4, 2)
    assert "the first 1 of the run" in steps.warmup_rule
    assert known.metrics["comm_ms"].max == 8


def test_a_metric_that_is_made_of_others_is_null_where_one_of_them_is(tmp_path):
    idle = metrics(20, 10, 4, 4)  # idle 10 of 20 ms
    unseen = idle | {"idle_ms": None}
    entry = of_steps(tmp_path, idle, idle, unseen, world=1, reasons={"idle_ms": "not seen"}).metrics["idle_share"]
    assert (entry.median, entry.count, entry.null_reasons) == (0.5, 2, {"not seen": 1})
    assert aorta.analysis.steps(tmp_path)["idle_share"].tolist()[:2] == [0.5, 0.5]


def test_a_step_that_a_rank_lacks_is_no_job_step(tmp_path):
    def of_rank(rank: int) -> Iterator[Step]:
        for number in ((0, 1, 2), (0, 2))[rank]:
            yield step(rank, 2, number, overlap=metrics(10 + 10 * number + rank, 8, 4, 2))

    job = aggregate(recorded(tmp_path, of_rank, 2)).metrics["job_step_ms"]
    assert (job.count, job.min, job.max) == (2, 11, 31)


def test_null_steps_are_counted_with_their_reasons_and_left_out_of_a_ratio_of_sums(tmp_path):
    blind = dict.fromkeys(metrics(10, 8, 4, 2)) | {"window_ms": 10.0, "compute_ms": 8.0}
    lines = [
        step(0, 2, 0, overlap=metrics(10, 8, 4, 2)),
        step(0, 2, 1, overlap=metrics(10, 8, 0, 0), reasons={"overlap_ratio": QUIET}),
        step(0, 2, 2, overlap=blind, reasons=dict.fromkeys(blind, "unseen"), coverage=Coverage(2, 3, False, "unseen")),
    ]
    for number, part in enumerate(("compute_comm_ms", "comm_ms"), start=3):
        lacking = metrics(10, 8, 6, 5) | {part: None, "overlap_ratio": None}
        lines.append(step(0, 2, number, overlap=lacking, reasons={"overlap_ratio": "unseen"}))
    found = aggregate(recorded(tmp_path, lambda rank: lines, world=2)).metrics
    ratio = found["overlap_ratio"]
    assert (ratio.count, ratio.nulls, ratio.null_reasons) == (1, 4, {QUIET: 1, "unseen": 3})
    assert (ratio.ratio_of_sums, found["compute_ms"].count) == (0.5, 5)


def test_a_run_without_communication_has_no_ratio_but_a_reason(tmp_path):
    entry = of_steps(tmp_path, metrics(10, 8, 0, 0), reasons={"overlap_ratio": QUIET}, loss=None)
    assert entry.overlap_ratio is entry.mean_loss is entry.metrics["overlap_ratio"].ratio_of_sums is None
    assert entry.null_reasons == {"mean_loss": "loss is unknown in every step", "overlap_ratio": QUIET}
    assert entry.metrics["overlap_ratio"].ratio_of_sums_reason == "comm_ms is 0 or unknown in every step"


def test_one_rank_communicates_with_nobody_and_has_no_ratio_but_a_reason(tmp_path):
    entry = of_steps(tmp_path, metrics(10, 8, 4, 2), world=1)
    for name in ("overlap_ratio", "overlap_over_compute"):
        found = entry.metrics[name]
        assert (found.count, found.nulls, found.median, found.ratio_of_sums) == (0, 1, None, None)
        assert found.reason == "one rank: it has no other rank to communicate with, so there is nothing to hide"
    assert entry.overlap_ratio is None
    # What its calls took, and blocked, is no question of ranks.
    assert [entry.metrics[name].median for name in ("comm_ms", "exposed_comm_ms")] == [4, 2]


def test_a_kind_a_step_does_not_mention_was_not_used_in_it(tmp_path):
    gathered = metrics(10, 8, 4, 2, allgather_ms=3.0, compute_allgather_ms=1.0, exposed_allgather_ms=2.0)
    others = metrics(10, 8, 4, 2), metrics(10, 8, 4, 2, comm_ms=None)
    entry = of_steps(tmp_path, gathered, *others, world=1, reasons={"comm_ms": "not seen"}).metrics["allgather_ms"]
    assert (entry.count, entry.min, entry.max, entry.null_reasons) == (2, 0.0, 3.0, {"not seen": 1})


@pytest.mark.parametrize(("overlaps", "reason"), [([], NOTHING_RECORDED), ([metrics(10, 8, 4, 2)], NOTHING_USED)])
def test_nothing_after_warmup_is_a_count_of_zero(tmp_path, overlaps, reason):
    entry = of_steps(tmp_path, *overlaps, warmup=True)
    assert (entry.count, entry.reason, value_of(entry.metrics)) == (0, reason, None)


QUIET = "no communication in this window"
BLIND = Coverage(2, 3, False, "the backends counted 3 collectives, AORTA saw 2")


def train(rank: int, number: int, wall: float, busy: float | None, **changes: Any) -> Step:
    values = metrics(wall, busy or 0, 4, 2) | {"compute_ms": busy}
    fields: dict[str, Any] = {"overlap": values, "collectives": [collective(seq=number)]} | changes
    return step(rank, 2, number, **fields)


def alone(rank: int, phase: str, number: int, wall: float, busy: float = 0, **changes: Any) -> Step:
    return step(rank, 2, number, overlap=metrics(wall, busy, 0, 0), phase=phase, **changes)


def steps_of(rank: int) -> list[Step]:
    """T: medians 100 and 104. Tc: 70 and 60. Tm: 50 and 56. Busy: 66 over 60, and 62 over 50. The first step of each
    phase is warm-up, far off.
    """
    together, compute, comm = {
        0: ((98, 100, 110), (69, 70, 72), (48, 50, 51)),
        1: ((104, 103, 190), (60, 58, 61), (56, 56, 57)),
    }[rank]
    overlapped, isolated = {0: ((66, 65, 80), (60, 59, 61)), 1: ((62, 62, 62), (50, 50, 50))}[rank]
    lines = [train(rank, 0, 900, 800, warmup=True)]
    lines += [train(rank, n, wall, busy) for n, (wall, busy) in enumerate(zip(together, overlapped, strict=True), 1)]
    lines += [alone(rank, "compute_only", 0, 900, 800, warmup=True)]
    lines += [alone(rank, "compute_only", n, *pair) for n, pair in enumerate(zip(compute, isolated, strict=True), 1)]
    lines += [alone(rank, "comm_only", 0, 900, warmup=True)]
    lines += [alone(rank, "comm_only", n, wall) for n, wall in enumerate(comm, 1)]
    return lines


def phases(folder: Path, lines: dict[int, list[Step]]) -> DatasetEntry:
    return aggregate(recorded(folder, lines.__getitem__, len(lines), world=2, warmup_steps=1))


@pytest.fixture
def whole(tmp_path):
    return phases(tmp_path / "run", {rank: steps_of(rank) for rank in (0, 1)})


def test_efficiency_is_of_the_slowest_ranks_median_steps_and_slowdown_of_each_rank_s_busy_time(whole):
    found = whole.metrics["overlap_efficiency"]
    assert found.phase_times == PhaseTimes(train_ms=104, compute_only_ms=70, comm_only_ms=56)
    assert found.median == pytest.approx((70 + 56 - 104) / 56)
    assert (found.count, found.nulls, found.reason) == (1, 0, None)
    slowdown = whole.metrics["compute_slowdown"]
    assert slowdown.per_rank_median == pytest.approx({"0": 0.1, "1": 0.24})
    assert (slowdown.median, slowdown.count, slowdown.reason) == (pytest.approx(0.17), 2, None)


def test_nothing_else_sees_the_other_phases(whole, tmp_path):
    bare = {rank: [line for line in steps_of(rank) if line.phase == "train"] for rank in (0, 1)}
    without = phases(tmp_path / "bare", bare)
    assert whole.steps.isolated_rank_steps == {"comm_only": 8, "compute_only": 8}
    for entry in (whole, without):
        del entry.metrics["overlap_efficiency"], entry.metrics["compute_slowdown"]
        entry.source.path, entry.steps.isolated_rank_steps = "", {}
    assert as_json(whole) == as_json(without)
    assert whole.health.problems == []  # the footer's count is of all phases
    assert len(aorta.analysis.steps(tmp_path / "run")) == len(aorta.analysis.collectives(tmp_path / "run")) == 8


def without_phase(phase: str) -> dict[int, list[Step]]:
    return {rank: [line for line in steps_of(rank) if line.phase != phase] for rank in (0, 1)}


def short(
    wall: float, busy: float | None, compute: tuple[float, float] | None, comm: float | None, **changes: Any
) -> dict[int, list[Step]]:
    """One step of each phase on both ranks; `compute`: wall and busy time alone. None: the phase was not run."""
    return {
        rank: [
            train(rank, 0, wall, busy, **changes),
            *([] if compute is None else [alone(rank, "compute_only", 0, *compute)]),
            *([] if comm is None else [alone(rank, "comm_only", 0, comm)]),
        ]
        for rank in (0, 1)
    }


NOT_RUN = "no isolated baseline in this run"
NO_COMPUTE = "rank 0 has no compute_only step after warm-up"
MISSING = "1 of 2 ranks are missing; the slowest may be among them"
NO_COMM = "no collective in a step: there is no communication to run alone"
PAUSED = {"reasons": {"compute_ms": "the instrument was paused"}}
UNSEEN = "computation was not seen apart from stalls: the backends counted 3 collectives, AORTA saw 2"


@pytest.mark.parametrize(
    ("lines", "efficiency", "slowdown"),
    [
        pytest.param(short(100, 90, None, None), NOT_RUN, NOT_RUN, id="not run"),
        pytest.param(without_phase("comm_only"), "rank 0 has no comm_only step after warm-up", None, id="no comm"),
        pytest.param(without_phase("compute_only"), NO_COMPUTE, NO_COMPUTE, id="no compute"),
        pytest.param(
            {0: steps_of(0), 1: [line for line in steps_of(1) if line.phase != "comm_only" or line.warmup]},
            "rank 1 has no comm_only step after warm-up",
            None,
            id="only warm-up on a rank",
        ),
        pytest.param({0: steps_of(0)}, MISSING, MISSING, id="rank missing"),
        pytest.param(short(100, 90, (99, 88), None, collectives=[]), NO_COMM, None, id="no communication"),
        pytest.param(short(100, 90, (99, 88), 1.9), "the shorter of Tc and Tm is below 2 % of T", None, id="too short"),
        pytest.param(
            short(100, None, (80, 70), 50, **PAUSED),
            None,
            "computation was not seen: the instrument was paused",
            id="paused",
        ),
        pytest.param(short(100, 90, (80, 70), 50, coverage=BLIND), None, UNSEEN, id="coverage"),
        pytest.param(
            short(100, 90, (80, 0), 50), None, "rank 0 computed nothing in its compute_only steps", id="no computation"
        ),
    ],
)
def test_every_null_has_its_reason(tmp_path, lines, efficiency, slowdown):
    found = phases(tmp_path, lines).metrics
    for name, reason in (("overlap_efficiency", efficiency), ("compute_slowdown", slowdown)):
        assert found[name].reason == reason
        assert (found[name].median is None) == (reason is not None)


@pytest.mark.parametrize(
    ("lines", "efficiency"),
    [
        (short(100, 9, (99, 8), 2), 0.5),  # exactly 2 % of T
        (short(200, 80, (70, 60), 50), -80 / 50),  # contention is not clamped
    ],
)
def test_an_efficiency_worked_out_by_hand(tmp_path, lines, efficiency):
    assert phases(tmp_path, lines).metrics["overlap_efficiency"].median == pytest.approx(efficiency)


# --- runs of which one of several steps is observed


PASSED_OVER = Coverage(seen=0, issued=None, complete=False, reason=NOT_SAMPLED)
STEPS, EVERY, WARM_UP = 80, 10, 4


def line(rank: int, number: int, every: int) -> Step:
    """Steps become longer, and communication with them; one step of each ten is observed, at another place in each."""
    length = 100.0 + number
    if every == 1 or number < WARM_UP:
        observed, drawn = True, {} if every == 1 else {"drawn": 0}
    else:
        block, place = divmod(number, every)
        observed, drawn = place == (7 * block) % every, {"drawn": every}
    warmup = number < WARM_UP
    if not observed:
        overlap = {"window_ms": length, "aorta_ms": 0.02}
        return step(rank, 2, number, overlap=overlap, warmup=warmup, coverage=PASSED_OVER)
    overlap = metrics(length, 50, length / 2, length / 4, aorta_ms=0.2)
    return step(rank, 2, number, overlap=overlap, warmup=warmup, collectives=[collective()], **drawn)


def run_of(folder: Path, every: int = EVERY, asked: str | None = None) -> LabelledRun:
    name, asked = folder.name, asked or str(every)
    manifest = {"config": {"workload": {"name": "mlp"}, "instrument": {"every": asked}}, "run_id": name}
    head = {"run_id": name, "label": name, "warmup_steps": WARM_UP, "every": asked, "manifest": manifest}
    return recorded(folder, lambda rank: [line(rank, number, every) for number in range(STEPS)], 2, **head)


def numbers_drawn() -> list[int]:
    return [number for number in range(WARM_UP, STEPS) if number % EVERY == 7 * (number // EVERY) % EVERY]


def test_what_was_observed_is_of_drawn_steps_and_step_times_are_of_all(tmp_path):
    dataset = run_of(tmp_path / "sampled")
    entry, drawn = aggregate(dataset), numbers_drawn()
    exposed, step_ms, job = (entry.metrics[name] for name in ("exposed_comm_ms", "window_ms", "job_step_ms"))
    assert exposed.median == pytest.approx(np.median([25 + number / 4 for number in drawn]))
    assert (exposed.count, exposed.nulls) == (2 * len(drawn), 0)
    assert step_ms.median == job.median == 100 + (WARM_UP + STEPS - 1) / 2
    assert (step_ms.count, job.count) == (2 * (STEPS - WARM_UP), STEPS - WARM_UP)
    counts = entry.steps
    assert (counts.global_steps_used, counts.rank_steps_used) == (len(drawn), 2 * len(drawn))
    assert (counts.rank_steps_not_drawn, counts.rank_steps_left_out_as_warmup) == (
        2 * (STEPS - WARM_UP - len(drawn)),
        2 * WARM_UP,
    )
    assert counts.rank_steps_left_out_as_calibration == 0
    assert [(row.collectives, row.rows) for row in entry.collectives] == [(len(drawn), 2 * len(drawn))]


def test_the_design_is_stated_with_intervals(tmp_path):
    dataset, drawn = run_of(tmp_path / "sampled", asked="auto"), numbers_drawn()
    entry, health = aggregate(dataset), dataset.run.health
    assert (health.gaps, health.notes, health.steps_not_on_all_ranks) == ([], [], [])
    found = value_of(entry.sampling)
    assert found is not None
    assert (found.asked, found.every, found.steps_drawn, found.steps) == ("auto", EVERY, 7, STEPS - WARM_UP)
    mean_ms = (7 * 0.2 + (STEPS - WARM_UP - 7) * 0.02) / (STEPS - WARM_UP)
    assert found.known_share == pytest.approx(mean_ms / entry.metrics["window_ms"].median)
    assert f"(1 in 10 steps observed at random: 7 of {STEPS - WARM_UP})" in measured_over(entry)
    ends = entry.metrics["exposed_comm_ms"].interval
    assert ends is not None
    assert (ends.at_least, ends.at_most) == (25 + drawn[0] / 4, 25 + drawn[-1] / 4)  # of seven: all of them
    assert not value_of(entry.metrics["job_step_ms"].interval)
    table = "\n".join(text_lines(metrics_table("sampled", entry)))
    assert "95 % interval" in table
    assert "29.2 to 44.8 ms" in table
    whole = aggregate(run_of(tmp_path / "whole", 1))
    assert not value_of(whole.sampling)
    assert not value_of(whole.metrics["exposed_comm_ms"].interval)
    assert "95 % interval" not in "\n".join(text_lines(metrics_table("whole", whole)))


def test_the_page_draws_observed_steps_and_the_time_of_all(tmp_path):
    dataset = run_of(tmp_path / "sampled")
    curves, _ = curves_of(dataset)
    assert curves["overlap_ratio"].x.tolist() == numbers_drawn()
    assert curves["job_step"].x.tolist() == list(range(WARM_UP, STEPS))
    assert {each.global_step for each in chosen_steps(dataset)} <= set(numbers_drawn())


def test_steps_of_a_profilers_window_are_not_among_those_drawn(tmp_path):
    def of_rank(rank: int) -> Iterator[Step]:
        for number in range(STEPS):
            if 20 <= number < 28:
                overlap = metrics(500, 50, 400, 0)
                yield step(rank, 2, number, overlap=overlap, drawn=0, collectives=[collective()])
            else:
                yield line(rank, number, EVERY)

    entry = aggregate(recorded(tmp_path, of_rank, 2, warmup_steps=WARM_UP, every="10"))
    assert entry.metrics["exposed_comm_ms"].max < 100


def test_a_run_in_which_no_step_was_drawn_says_so(tmp_path):
    def of_rank(rank: int) -> Iterator[Step]:
        for number in range(6):
            overlap = {"window_ms": 100.0}
            yield step(rank, 2, number, overlap=overlap, coverage=PASSED_OVER, warmup=number < 2)

    entry = aggregate(recorded(tmp_path, of_rank, 2, warmup_steps=2, every="auto"))
    assert entry.metrics["job_step_ms"].median == 100
    assert "none of 4 steps observed (instrument.every=auto)" in measured_over(entry)
    assert "overlap_ratio" not in entry.metrics


def measuring_off(folder: Path) -> LabelledRun:
    head = {"instrument_mode": "off", "label": "off", "run_id": "off"}
    lines = {rank: [step(rank, 2, at, overlap=metrics(99, 50, 50, 25)) for at in range(STEPS)] for rank in range(2)}
    manifest = {"config": {"workload": {"name": "mlp"}}, "run_id": "off"}
    return recorded(folder, lines.__getitem__, 2, manifest=manifest, **head)


@pytest.mark.parametrize(
    ("reference", "unlike", "name", "judgement"),
    [
        pytest.param(lambda at: run_of(at, asked="auto"), [], "exposed_comm_ms", "equal", id="another sample"),
        pytest.param(lambda at: run_of(at, 1), [OBSERVED], "job_step_ms", "not judged", id="every step observed"),
        pytest.param(measuring_off, [], "job_step_ms", "worse", id="measuring off: what a sample costs"),
    ],
)
def test_what_a_sample_is_compared_with(tmp_path, reference, unlike, name, judgement):
    found = compared(reference(tmp_path / "a"), run_of(tmp_path / "b"))
    assert (found.unlike, found.metrics[name].judgement) == (unlike, judgement)
    assert ("measuring costs each step" in str(found.metrics[name].judgement_reason)) == bool(unlike)
