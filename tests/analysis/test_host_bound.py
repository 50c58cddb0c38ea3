"""Which steps a metric is described over where the host sets the pace, what every consumer of it then says, and what is
compared, judged and gated where one of two sides leaves open where its device computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from aorta import analysis
from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.cautions import cautions
from aorta.analysis.compare.launch_set import Launch, LaunchSet, read_subjects
from aorta.analysis.compare.verdict import Rules
from aorta.analysis.gate import evaluate, parse_condition
from aorta.analysis.pace import CONTRADICTED, MOST_UNDECIDED
from aorta.documents import as_json, known
from aorta.documents.comparison import Comparison, Summary
from aorta.documents.dataset import Ends, Statistics
from aorta.documents.metrics import HOST_BOUND
from aorta.errors import InputError
from aorta.read.record import load_run
from aorta.records.schema import CalibrationPlan, Step
from aorta.report.page.elements import verdict_of
from aorta.report.run_tables import collectives_table, comparison_table, metrics_table
from aorta.report.summary import summarize
from aorta.report.tables import text_lines
from aorta.report.text import run_block
from aorta.whatif.read_program import read_program
from tests.analysis.builders import collective, metrics, partial, step
from tests.analysis.run_builders import (
    COMM,
    WINDOW,
    by_kernels,
    calibrated,
    calibration,
    decided,
    entry,
    in_window,
    undecided,
    write,
)

OfRank = Callable[[int, int], Step]
CALIBRATED = calibration(0.375, 0.75)
FEW = int(MOST_UNDECIDED * 38)
"""So many of the 38 steps behind the warm-up may be open."""


def first(count: int, these: OfRank, others: OfRank, begin: int = 0) -> OfRank:
    """Some steps are of one sort, from `begin` on, and all others of another."""
    return lambda rank, number: (these if begin <= number < begin + count else others)(rank, number)


def without_communication(rank: int, number: int) -> Step:
    line = decided(rank, number)
    nothing = dict.fromkeys(("comm_ms", "compute_comm_ms", "exposed_comm_ms", "overlap_ratio"))
    return msgspec.structs.replace(line, overlap=line.overlap | nothing, reasons=dict.fromkeys(nothing, "no comm"))


@pytest.mark.parametrize(
    ("of_rank", "measured", "number", "bounds", "reason"),
    [
        pytest.param(decided, calibration(0.75, 0.752), (0.75, "marks", 76), None, None, id="a host that is ahead"),
        pytest.param(undecided, None, None, Ends(0.25, 0.75), HOST_BOUND, id="undecided"),
        pytest.param(
            undecided,
            calibration(None, 0.75, steps=0, problem="another profiler was running"),
            *(None, Ends(0.25, 0.75), HOST_BOUND),
            id="a calibration that failed",
        ),
        # The median of what is known would be 0.75; of the others at least 0.25 is hidden.
        pytest.param(
            lambda rank, number: (decided if number % 2 else undecided)(rank, number),
            *(None, None, Ends(0.5, 0.75), HOST_BOUND),
            id="decided steps among undecided ones",
        ),
        pytest.param(
            first(FEW, undecided, decided, 2), None, (0.75, "marks", 76 - 2 * FEW), None, None, id="a twentieth open"
        ),
        pytest.param(
            first(FEW + 1, undecided, decided, 2), None, None, Ends(0.75, 0.75), HOST_BOUND, id="more than a twentieth"
        ),
        pytest.param(
            first(4, undecided, first(6, decided, without_communication)),
            *(None, None, Ends(0.5, 0.75), HOST_BOUND),
            id="two of four steps that have a ratio",
        ),
        pytest.param(calibrated, CALIBRATED, (0.375, "kernels", 6), None, None, id="a calibration"),
        pytest.param(
            first(3, by_kernels, decided, 2), CALIBRATED, (0.375, "kernels", 6), None, None, id="marks contradicted"
        ),
        # One rank has no kernels: another's do not stand for it.
        pytest.param(
            lambda rank, number: by_kernels(rank, number) if in_window(number) and rank else decided(rank, number),
            *(CALIBRATED, None, None, CONTRADICTED),
            id="marks contradicted on one rank",
        ),
        pytest.param(
            first(5, by_kernels, undecided), None, (0.375, "kernels", 6), None, None, id="calibrated behind warm-up"
        ),
        pytest.param(
            first(2, by_kernels, undecided), None, None, Ends(0.25, 0.75), HOST_BOUND, id="calibrated in warm-up alone"
        ),
        pytest.param(
            lambda rank, number: (by_kernels if rank else decided)(rank, number),
            *(None, (0.5625, "marks", 76), None, None),
            id="kernels of one rank",
        ),
    ],
)
def test_the_steps_that_a_ratio_is_described_over(tmp_path, of_rank, measured, number, bounds, reason):
    found = entry(write(tmp_path, of_rank, calibrated=measured))
    ratio = found.metrics["overlap_ratio"]
    assert (ratio.bounds, ratio.reason) == (bounds, reason)
    if number is None:
        assert ratio.median is ratio.mean is ratio.max is ratio.source is ratio.ratio_of_sums is None
        assert (ratio.count, ratio.per_rank_median, found.overlap_ratio) == (0, {}, None)
    else:
        assert (ratio.median, ratio.source, ratio.count) == number


def test_a_record_that_does_not_know_the_lead_says_nothing_of_it(tmp_path):
    found = entry(write(tmp_path, lambda rank, number: step(rank, 2, number, overlap=metrics(20, 16, 8, 6))))
    assert found.pace is None
    ratio = found.metrics["overlap_ratio"]
    assert known(ratio.source) is known(ratio.bounds) is None


def test_what_is_said_of_a_host_bound_run(tmp_path):
    dataset = LabelledRun("x", load_run(write(tmp_path, undecided)))
    summary = summarize(read_subjects({"x": tmp_path}, Rules()))
    found = summary.datasets["x"]
    assert cautions(found)[0] == (
        "host-bound: the host is 0.01 ms ahead of the device (median), and in 50 % of the blocks' time marks cannot "
        "say whether kernels ran; overlap_ratio is 25 % to at most 75 %; record with instrument.calibration=3 for a "
        "number; fewer kernels to launch (torch.compile, CUDA graphs) put the host ahead"
    )
    assert "! host-bound: the host is 0.01 ms ahead" in run_block(dataset, found)
    rows = [" ".join(line.split()) for line in text_lines(metrics_table("x", found))]
    assert any(row.startswith("compute_ms 8 to at most 16 ms -") for row in rows)
    assert verdict_of(summary).cards[0].value == "25\u00a0% to at most 75\u00a0%"
    assert found.account.reason == found.stragglers.reason == found.null_reasons["overlap_ratio"] == HOST_BOUND
    assert found.mean_compute_ms is found.mean_overlap_ms is None
    assert found.pace.host_bound is True
    # What no launch can change has its number: the step, and communication, whose bounds are as close as can be.
    assert (found.metrics["comm_ms"].median, found.metrics["job_step_ms"].median) == (COMM, WINDOW)


def test_a_calibration_gives_the_numbers_that_marks_cannot(tmp_path):
    folder = write(tmp_path, calibrated, calibrated=CALIBRATED)
    found = entry(folder)
    assert found.metrics["overlap_ratio"].ratio_of_sums == 0.375
    assert found.metrics["compute_ms"].median == found.mean_compute_ms == 10
    # What rests on no computation is of the steps that no profiler slowed.
    assert (found.metrics["comm_ms"].source, found.metrics["comm_ms"].count) == ("marks", 70)
    steps = found.steps
    assert (steps.rank_steps_read, steps.rank_steps_used, steps.rank_steps_left_out_as_warmup) == (80, 70, 4)
    assert (steps.rank_steps_left_out_as_calibration, steps.rank_steps_not_drawn) == (6, 0)
    facts = found.pace.calibration
    assert (facts.steps, facts.rank_steps, facts.agree, facts.problems) == (3, 6, False, [])
    assert (facts.ratio_by_kernels, facts.ratio_by_marks) == (0.375, 0.75)
    assert facts.window_step_ms == facts.other_step_ms == WINDOW
    frame = analysis.steps(folder)
    after = frame[~frame["warmup"]]
    kernels, marks = after[after["by_kernels"]], after[~after["by_kernels"]]
    assert set(kernels["global_step"]) == {2, 3, 4}
    assert set(kernels["overlap_ratio"]) == {0.375}
    assert kernels[["overlap_ratio_at_least", "overlap_ratio_at_most"]].isna().all(axis=None)
    assert (len(marks), marks["overlap_ratio"].notna().any()) == (2 * 35, False)
    assert (set(marks["overlap_ratio_at_least"]), set(marks["overlap_ratio_at_most"])) == ({0.25}, {0.75})


def test_marks_that_kernels_contradict_are_named(tmp_path):
    found = entry(write(tmp_path, first(3, by_kernels, decided, 2), calibrated=CALIBRATED))
    assert [found.metrics[name].source for name in ("exposed_comm_ms", "comm_ms")] == ["kernels", "marks"]
    assert any(note.startswith("kernels and marks of the same steps disagree") for note in cautions(found))


def test_a_host_that_is_ahead_is_said_nothing_of(tmp_path):
    found = entry(write(tmp_path, decided, calibrated=calibration(0.75, 0.752)))
    pace = found.pace
    assert (pace.host_bound, pace.host_lead_ms, pace.undecided_share) == (False, 4.0, 0.0)
    assert pace.calibration.agree is True
    assert [note for note in cautions(found) if "host" in note or "kernels" in note] == []
    plain = analysis.steps(tmp_path, ["by_kernels", "overlap_ratio_at_most"])
    assert not plain["by_kernels"].any()
    assert plain["overlap_ratio_at_most"].isna().all()


def test_steps_that_the_profiler_made_longer_are_in_no_step_time_and_are_named(tmp_path):
    slow = write(
        tmp_path,
        lambda rank, number: by_kernels(rank, number, window=30) if in_window(number) else undecided(rank, number),
        calibrated=calibration(0.375, 0.75, window_step_ms=30.0),
    )
    found = entry(slow)
    assert found.metrics["job_step_ms"].max == WINDOW
    assert any("took 50 % longer than the others" in note for note in cautions(found))


def test_collectives_whose_launch_is_open_are_upper_bounds(tmp_path):
    """Rank 1 arrives a millisecond late in each of 40 collectives; kernels began at any time in their range."""

    def late(open_ms: float) -> OfRank:
        def made(rank: int, number: int) -> Step:
            rows = [collective(seq=number, start_ms=4 + rank, end_ms=8.0, end_source="event")]
            if not open_ms:
                return decided(rank, number, collectives=rows)
            line = undecided(rank, number, collectives=rows)
            assert not isinstance(line.bounds, msgspec.UnsetType)
            values, bounds = {**line.overlap, "comm_ms": None}, {**line.bounds, "comm_ms": (COMM - open_ms, COMM)}
            return msgspec.structs.replace(line, overlap=values, bounds=bounds)

        return made

    certain, unsure = entry(write(tmp_path / "known", late(0))), entry(write(tmp_path / "open", late(1)))
    assert [each.transfer_is_upper_bound for each in certain.collectives] == [False]
    assert [each.transfer_is_upper_bound for each in unsure.collectives] == [True]
    assert unsure.metrics["comm_ms"].bounds == Ends(7.0, 8.0)
    assert any("the host launches late" in line for line in text_lines(collectives_table({"x": unsure})))
    # A kind that was not used is 0 all the same, and no copy is missing because of the host.
    assert unsure.metrics["reducescatter_ms"].median == 0
    sides = summarize(read_subjects({"a": tmp_path / "known", "b": tmp_path / "open"}, Rules()), "a", "b").comparison
    (pair,) = sides.collectives
    assert {each.judgement for each in (pair.transfer_ms, pair.wait_ms, pair.busbw_gb_per_s)} == {"not judged"}


@pytest.mark.parametrize(
    ("plan", "measured", "why", "said"),
    [
        (CalibrationPlan("auto", 2, 0, "nsys profiles this program"), None, "nsys profiles this program", "no steps"),
        (CalibrationPlan("3", 99, 3), None, "the run ended before step 99, the first to measure", "no steps"),
        (CalibrationPlan("off", 2, 0), None, None, "record with instrument.calibration"),
        (
            CalibrationPlan("3", 2, 3),
            calibration(None, 0.75, steps=0, problem="another profiler was running"),
            *(None, "calibration: another profiler was running"),
        ),
    ],
)
def test_why_no_steps_were_measured_by_kernels_is_said(tmp_path, plan, measured, why, said):
    found = entry(write(tmp_path, undecided, calibration=plan, calibrated=measured))
    notes = " ".join(cautions(found))
    assert known(found.pace.no_calibration) == why
    assert (f"no steps were measured by kernels: {why}" if why else said) in notes
    assert ("record with instrument.calibration" in notes) == (plan.setting == "off")


def test_one_metric_that_marks_leave_open_is_enough_for_a_host_that_sets_the_pace(tmp_path):
    def open_compute(rank: int, number: int) -> Step:
        line = decided(rank, number)
        values, bounds = line.overlap | {"compute_ms": None}, {"compute_ms": (8.0, 16.0)}
        return msgspec.structs.replace(line, overlap=values, bounds=bounds, reasons={"compute_ms": "host-bound"})

    found = entry(write(tmp_path, open_compute))
    assert (found.pace.host_bound, found.metrics["overlap_ratio"].median) == (True, 0.75)


@pytest.mark.parametrize("of_rank", [undecided, calibrated])
def test_no_replay_where_blocks_are_not_computation(tmp_path, of_rank):
    write(tmp_path, of_rank)
    with pytest.raises(InputError, match=r"a replay is not possible: (host-bound|the device's computation)"):
        read_program(tmp_path)
    summary = summarize(read_subjects({"x": tmp_path}, Rules()))
    assert as_json(summary.datasets["x"].what_if).keys() == {"reason"}


@pytest.mark.parametrize(("alone", "slowdown", "why"), [(decided, 0, None), (undecided, None, HOST_BOUND)])
def test_computing_is_not_compared_with_a_baseline_that_marks_leave_open(tmp_path, alone, slowdown, why):
    def two_phases(rank: int, number: int) -> Step:
        return alone(rank, number, phase="compute_only") if number >= 30 else decided(rank, number)

    found = entry(write(tmp_path, two_phases)).metrics["compute_slowdown"]
    assert (found.median, found.reason) == (slowdown, why)


def test_bounds_the_wrong_way_round_are_no_line_of_a_record(tmp_path):
    write(tmp_path, lambda rank, number: undecided(rank, number, 6.0, 2.0) if number == 7 else decided(rank, number))
    problems = load_run(tmp_path).health.problems
    assert problems[0] == ("rank_0_metrics.jsonl:9: compute_comm_ms is at least 6 and at most 2 in its bounds; ignored")


Launches = Callable[[int, int, int], Step]
"""Steps by launch, rank and number."""


def compared(folder: Path, *sides: Launches) -> Comparison:
    """Two sets of four launches that take turns."""
    for side, of_launch in enumerate(sides):
        for launch in range(4):
            shift_ns = (launch * len(sides) + side) * 100 * 10**9

            def shifted(rank: int, number: int, launch: int = launch, of: Any = of_launch, by: int = shift_ns) -> Step:
                line: Step = of(launch, rank, number)
                return msgspec.structs.replace(line, t_start_ns=line.t_start_ns + by, t_end_ns=line.t_end_ns + by)

            write(folder / str(side) / f"{launch:02}", shifted, run=f"run-{side}-{launch}")
    return summarize(read_subjects({"old": folder / "0", "new": folder / "1"}, Rules()), "old", "new").comparison


def ahead(launch: int, rank: int, number: int) -> Step:
    return decided(rank, number, 6.0 + 0.01 * launch)


def test_a_side_that_is_known_in_bounds_only_gets_no_verdict_and_its_host_is_named(tmp_path):
    def behind(launch: int, rank: int, number: int) -> Step:
        return undecided(rank, number, 2.0 + 0.01 * launch, 3.0 + 0.01 * launch)

    found = compared(tmp_path, ahead, behind)
    assert found.verdict == "inconclusive"
    assert found.verdict_reason == f"exposed communication is not judged: candidate: {HOST_BOUND}"
    assert found.headline.startswith("Inconclusive: exposed known in bounds only; step time ")
    ratio = found.metrics["overlap_ratio"]
    assert ratio.test.verdict is ratio.test.p is ratio.test.effect.value is None
    assert ratio.candidate.value is None
    assert ratio.candidate.bounds.at_least == pytest.approx(2.015 / 8)
    assert found.host_bound.side == "candidate"
    assert found.host_bound.host_lead_ms == {"reference": 4.0, "candidate": pytest.approx(0.01)}
    assert found.host_bound.sentence.startswith(
        "the candidate is host-bound: its host is 0.01 ms ahead of the device (median), the reference's 4 ms. "
    )
    assert HOST_BOUND in found.account.reason
    assert not any("measured by kernels" in warning for warning in found.warnings)
    (condition,) = evaluate([parse_condition("overlap_ratio<-10%")], found).conditions
    assert (condition.outcome, condition.value, condition.reason) == ("inconclusive", None, f"candidate: {HOST_BOUND}")
    assert "25.2 % to at most 37.7 %" in "".join(text_lines(comparison_table(found)))
    cards = verdict_of(partial(Summary, comparison=found)).cards
    (card,) = (each for each in cards if each.name == "exposed_comm_ms")
    assert (card.value, card.change) == ("1.99\u00a0ms \u2192 4.99 to at most 5.99\u00a0ms", "")


def test_one_bounded_launch_takes_the_number_of_its_side():
    """Launches that are decided hide less than the one that is not: their median would be a biased choice."""
    of_launches = [partial(Statistics, value=5 / 8, median=5 / 8)] * 3 + [
        partial(Statistics, bounds=Ends(2 / 8, 7.9 / 8))
    ]
    made = [Launch(Path(), f"{at}", {"overlap_ratio": each}, {}, ()) for at, each in enumerate(of_launches)]
    side = LaunchSet(Path(), tuple(made), [])
    assert np.isnan(side.medians("overlap_ratio")).all()
    assert side.statistics["overlap_ratio"].median is None


def test_the_values_of_a_calibrated_side_are_compared_and_its_host_is_named(tmp_path):
    def measured(launch: int, rank: int, number: int) -> Step:
        hidden = 3.0 + 0.01 * launch
        return by_kernels(rank, number, hidden) if in_window(number) else undecided(rank, number)

    found = compared(tmp_path, ahead, measured)
    assert found.verdict == "regression"
    assert found.metrics["overlap_ratio"].candidate.value == pytest.approx(0.3769, abs=1e-4)
    assert found.host_bound.side == "candidate"
    assert found.sentence.endswith(", and may differ in overlap for that reason.")  # as the verdict says
    assert "host-bound" in found.account.reason
    (said,) = (warning for warning in found.warnings if warning.startswith("overlap_ratio is measured by kernels"))
    assert "0 of 4 of the reference, 4 of 4 of the candidate" in said
