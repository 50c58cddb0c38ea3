"""Runs of which one of several steps is observed: what metrics are of which steps, what is said of it, and what such
runs are compared with.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from aorta.analysis.aggregate import LabelledRun, aggregate
from aorta.analysis.compare.run_comparison import OBSERVED
from aorta.documents import known
from aorta.errors import InputError
from aorta.records.schema import Coverage, Step
from aorta.report.page.charts import curves_of
from aorta.report.page.timelines import chosen_steps
from aorta.report.page.verdict_cards import measured_over
from aorta.report.run_tables import metrics_table
from aorta.report.tables import text_lines
from aorta.timeline.overlap import NOT_SAMPLED
from tests.analysis.builders import collective, metrics, step
from tests.analysis.compare.test_launch_comparison import compared as of_sets
from tests.analysis.run_builders import recorded
from tests.analysis.test_compare import compared

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
    found = known(entry.sampling)
    assert found is not None
    assert (found.asked, found.every, found.steps_drawn, found.steps) == ("auto", EVERY, 7, STEPS - WARM_UP)
    mean_ms = (7 * 0.2 + (STEPS - WARM_UP - 7) * 0.02) / (STEPS - WARM_UP)
    assert found.known_share == pytest.approx(mean_ms / entry.metrics["window_ms"].median)
    assert f"(1 in 10 steps observed at random: 7 of {STEPS - WARM_UP})" in measured_over(entry)
    ends = entry.metrics["exposed_comm_ms"].interval
    assert ends is not None
    assert (ends.at_least, ends.at_most) == (25 + drawn[0] / 4, 25 + drawn[-1] / 4)  # of seven: all of them
    assert not known(entry.metrics["job_step_ms"].interval)
    table = "\n".join(text_lines(metrics_table("sampled", entry)))
    assert "95 % interval" in table
    assert "29.2 to 44.8 ms" in table
    whole = aggregate(run_of(tmp_path / "whole", 1))
    assert not known(whole.sampling)
    assert not known(whole.metrics["exposed_comm_ms"].interval)
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


def test_launches_that_observe_unlike_are_refused_unless_allowed(tmp_path):
    for side, every in (("whole", 1), ("sampled", EVERY)):
        for launch in range(4):
            run_of(tmp_path / side / f"launch_{launch}", every)
    with pytest.raises(
        InputError, match=r"NOT COMPARABLE: header.observed_steps is 'all' in .*'a sample' in .*few of the other"
    ):
        of_sets(tmp_path / "whole", tmp_path / "sampled")


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
