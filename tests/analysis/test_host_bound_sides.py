"""Two sides of which one leaves open where its device computed: what is compared, judged, gated and said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aorta.analysis.compare.launch_set import read_subjects
from aorta.analysis.compare.verdict import Rules
from aorta.analysis.gate import evaluate, parse_condition
from aorta.documents.comparison import Comparison, Summary
from aorta.documents.metrics import HOST_BOUND
from aorta.records.schema import Step
from aorta.report.page.verdict_cards import verdict_of
from aorta.report.run_tables import comparison_table
from aorta.report.summary import summarize
from aorta.report.tables import text_lines
from tests.analysis.builders import partial
from tests.analysis.host_bound_runs import by_kernels, decided, in_window, undecided, write


def sets(folder: Path, *sides: Callable[[int, int, int], Step], launches: int = 4) -> list[Path]:
    """Launch sets whose launches take turns; steps by launch, rank and number."""
    for side, of_launch in enumerate(sides):
        for launch in range(launches):
            shift_ns = (launch * len(sides) + side) * 100 * 10**9

            def one(rank: int, number: int, launch: int = launch, of: Any = of_launch, shift: int = shift_ns) -> Step:
                line: Step = of(launch, rank, number)
                times = {"t_start_ns": line.t_start_ns + shift, "t_end_ns": line.t_end_ns + shift}
                return msgspec.structs.replace(line, **times)

            write(folder / str(side) / f"{launch:02}", one, run=f"run-{side}-{launch}")
    return [folder / str(side) for side in range(len(sides))]


def compared(folder: Path, *sides: Callable[[int, int, int], Step], launches: int = 4) -> Comparison:
    reference, candidate = sets(folder, *sides, launches=launches)
    subjects = read_subjects({"old": reference, "new": candidate}, Rules())
    return summarize(subjects, "old", "new").comparison


def test_launches_of_kernels_beside_launches_of_marks_are_warned_of(tmp_path: Path) -> None:
    found = compared(tmp_path, ahead, lambda launch, rank, number: by_kernels(rank, number, 3.0 + 0.01 * launch))
    (said,) = (warning for warning in found.warnings if warning.startswith("overlap_ratio is measured by kernels"))
    assert "0 of 4 of the reference, 4 of 4 of the candidate" in said
    alike = compared(tmp_path / "alike", ahead, ahead)
    assert not any("measured by kernels" in warning for warning in alike.warnings)


def ahead(launch: int, rank: int, number: int) -> Step:
    return decided(rank, number, 6.0 + 0.01 * launch)


def behind(low: float, high: float) -> Callable[[int, int, int], Step]:
    return lambda launch, rank, number: undecided(rank, number, low + 0.01 * launch, high + 0.01 * launch)


@pytest.mark.parametrize(("low", "high"), [(2.0, 6.2), (2.0, 3.0)], ids=["reach the other side", "lie apart"])
def test_a_side_that_is_known_in_bounds_only_gets_no_verdict_and_its_host_is_named(
    tmp_path: Path, low: float, high: float
) -> None:
    found = compared(tmp_path, ahead, behind(low, high))
    assert found.verdict == "inconclusive"
    assert found.verdict_reason == f"exposed communication is not judged: candidate: {HOST_BOUND}"
    assert found.headline.startswith("Inconclusive: exposed known in bounds only; step time ")
    assert found.numbers.startswith("The candidate is host-bound, the reference is not. ")
    ratio = found.metrics["overlap_ratio"]
    assert ratio.test.verdict is ratio.test.p is ratio.test.effect.value is None
    assert ratio.candidate.value is None
    assert ratio.candidate.bounds.at_least == pytest.approx((low + 0.015) / 8)
    assert found.host_bound.side == "candidate"
    assert found.host_bound.host_lead_ms == {"reference": 4.0, "candidate": pytest.approx(0.01)}
    assert found.host_bound.sentence.startswith(
        "the candidate is host-bound: its host is 0.01 ms ahead of the device (median), the reference's 4 ms. "
    )
    assert HOST_BOUND in found.account.reason


def test_one_bounded_launch_takes_the_number_of_its_side(tmp_path: Path) -> None:
    """Three launches are decided and hide less than the one that is not: their median would be a biased choice."""

    def mixed(launch: int, rank: int, number: int) -> Step:
        return undecided(rank, number, 2.0, 7.9) if launch == 3 else decided(rank, number, 5.0)

    ratio = compared(tmp_path, ahead, mixed).metrics["overlap_ratio"]
    assert (ratio.candidate.value, ratio.test.verdict) == (None, None)


def test_the_values_of_a_calibrated_side_are_compared_and_its_host_is_named(tmp_path: Path) -> None:
    def measured(launch: int, rank: int, number: int) -> Step:
        hidden = 3.0 + 0.01 * launch
        return by_kernels(rank, number, hidden) if in_window(number) else undecided(rank, number)

    found = compared(tmp_path, ahead, measured)
    assert found.verdict == "regression"
    assert found.metrics["overlap_ratio"].candidate.value == pytest.approx(0.3769, abs=1e-4)
    assert found.headline.startswith("More exposed communication: ")
    assert found.numbers.startswith("The candidate is host-bound, the reference is not. Hidden 75 % -> 38 % (signif")
    assert "host-bound" in found.account.reason


@pytest.mark.parametrize("launches", [1, 4])
def test_a_gate_neither_passes_nor_fails_on_bounds(tmp_path: Path, launches: int) -> None:
    if launches > 1:
        found = compared(tmp_path, ahead, behind(2.0, 3.0))
    else:
        sides = {"old": write(tmp_path / "a", decided), "new": tmp_path / "b"}
        write(tmp_path / "b", lambda rank, number: undecided(rank, number, 2.0, 3.0), run="run-2")
        found = summarize(read_subjects(sides, Rules()), "old", "new").comparison
    for condition in ("overlap_ratio<-0.1", "overlap_ratio<-10%"):
        result = evaluate([parse_condition(condition)], found)
        assert (result.outcome, result.exit_code) == ("inconclusive", 4)
        (judged,) = result.conditions
        assert (judged.value, judged.reason) == (None, f"candidate: {HOST_BOUND}")


def test_the_table_of_a_comparison_shows_bounds_as_bounds(tmp_path: Path) -> None:
    found = compared(tmp_path, ahead, behind(2.0, 6.2))
    assert "25.2 % to at most 77.7 %" in "".join(text_lines(comparison_table(found)))
    cards = verdict_of(partial(Summary, comparison=found)).cards
    (card,) = (each for each in cards if each.name == "exposed_comm_ms")
    assert (card.value, card.change) == ("1.99\u00a0ms \u2192 1.79 to at most 5.99\u00a0ms", "")
