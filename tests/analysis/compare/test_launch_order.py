"""Launches that did not take turns in time get no verdict, and the reader is told why and what to do (W27)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aorta.analysis.compare.launch_set import (
    MOST,
    Launch,
    LaunchSet,
    concurrent,
    drift_inflation,
    inflation,
    launch_order,
)
from aorta.analysis.report.report_command import overlap_report
from aorta.analysis.tables import Floats
from tests.analysis.builders import strict_json
from tests.analysis.compare.builders import launch_set
from tests.analysis.compare.test_launch_comparison import compared

HIGH = (0.80, 0.81, 0.82, 0.83)
LOW = (0.60, 0.61, 0.62, 0.63)
PLACES = np.arange(6) - 2.5
REFERENCE_FIRST, IN_TURNS = "RRRRCCCC", "RCCRRCCR"


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aorta.analysis.report.report_folder.pictures", lambda _datasets: ())


def sides(folder: Path, sequence: str, apart_s: float = 60.0, **words: Any) -> tuple[Path, Path]:
    """Two launch sets whose launches began in this order; the candidate hides much less."""
    began = {side: [apart_s * place for place, each in enumerate(sequence) if each == side] for side in "RC"}
    return (
        launch_set(folder / "reference", HIGH, began_s=began["R"], **words),
        launch_set(folder / "candidate", LOW, began_s=began["C"], **words),
    )


def order_of(spans: Sequence[Sequence[tuple[int, int] | None]]) -> Any:
    made = [
        LaunchSet(
            Path(), tuple(Launch(Path(f"{at}"), f"{side}-{at}", {}, {}, (), span) for at, span in enumerate(each)), ()
        )
        for side, each in enumerate(spans)
    ]
    return launch_order(*made)


def test_all_of_the_reference_first_gets_no_verdict_though_every_p_is_small(tmp_path: Path) -> None:
    found = compared(tmp_path, *sides(tmp_path, REFERENCE_FIRST))
    assert found["verdict"] == "not comparable in time"
    assert found["launch_order"]["sequence"] == REFERENCE_FIRST
    assert found["launch_order"]["comparable"] is False
    assert "did not take turns (RRRRCCCC)" in found["verdict_reason"]
    assert "--assume-no-drift" in found["verdict_reason"]
    assert {entry["verdict"] for entry in found["metrics"].values()} == {None}
    assert {entry["p"] for entry in found["metrics"].values()} == {None}
    assert found["headline"].startswith("NOT COMPARABLE IN TIME: the launches of the two sides did not take turns")
    assert found["headline"].count("did not take turns") == 1


def test_launches_in_turns_keep_their_verdict(tmp_path: Path) -> None:
    found = compared(tmp_path, *sides(tmp_path, IN_TURNS))
    assert found["verdict"] == "regression"
    assert found["launch_order"] | {"drift_inflation": None} == {
        "comparable": True,
        "sequence": IN_TURNS,
        "drift_inflation": None,
        "largest_inflation": MOST,
        "reason": None,
        "assume_no_drift": False,
    }
    assert not any("drift" in warning for warning in found["warnings"])


def test_told_otherwise_it_judges_and_says_so(tmp_path: Path) -> None:
    found = compared(tmp_path, *sides(tmp_path, REFERENCE_FIRST), assume_no_drift=True)
    assert found["verdict"] == "regression"
    assert [warning for warning in found["warnings"] if "--assume-no-drift" in warning and "RRRRCCCC" in warning]
    assert found["launch_order"]["assume_no_drift"] is True


def test_too_few_launches_are_told_first(tmp_path: Path) -> None:
    first = launch_set(tmp_path / "a", HIGH[:3], began_s=[0, 60, 120])
    second = launch_set(tmp_path / "b", LOW[:3], began_s=[180, 240, 300])
    found = compared(tmp_path, first, second)
    assert found["verdict"] == "inconclusive"
    assert found["verdict_reason"].startswith(
        "needs 4 launches per side for p <= 0.05 (exact Mann-Whitney): 3 against 3"
    )
    assert found["launch_order"]["comparable"] is False


def test_launches_that_ran_at_the_same_time_are_comparable_in_whatever_order_they_began(tmp_path: Path) -> None:
    """A launch lasts seven seconds here: all began within one of them, as on a cluster."""
    found = compared(tmp_path, *sides(tmp_path, REFERENCE_FIRST, apart_s=0.1))
    assert found["verdict"] == "regression"
    assert found["launch_order"]["sequence"] == "(RRRRCCCC)"


def test_machines_of_their_own_are_warned_of(tmp_path: Path) -> None:
    reference, _ = sides(tmp_path / "here", IN_TURNS, host="tin")
    _, candidate = sides(tmp_path / "there", IN_TURNS, host="zinc")
    found = compared(tmp_path, reference, candidate)
    assert found["verdict"] == "regression"
    assert [
        warning
        for warning in found["warnings"]
        if warning.startswith("the reference ran on tin, the candidate on zinc")
    ]
    same = compared(tmp_path, *sides(tmp_path / "same", IN_TURNS))
    assert not [warning for warning in same["warnings"] if "ran on" in warning]


def test_the_command_and_the_gate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reference, candidate = sides(tmp_path / "plan", REFERENCE_FIRST)
    words = ["--reference", str(reference), "--candidate", str(candidate), "--output", "out", "--markdown", "page.md"]
    gate = ["--fail-on", "overlap_ratio<-0.05", "--junit", "gate.xml"]
    assert overlap_report(words) == 0
    told = capsys.readouterr().out
    assert told.startswith("[?] NOT COMPARABLE IN TIME: ")
    assert "IN TIME: the launches of the two sides did not take turns" in " ".join(told.split())
    assert max(map(len, told.splitlines())) <= 100 or str(tmp_path) in told
    assert "Not comparable in time" in (tmp_path / "out" / "report.html").read_text()
    assert "not comparable in time" in (tmp_path / "page.md").read_text()

    assert overlap_report([*words, *gate]) == 4
    assert "not comparable in time" in capsys.readouterr().out
    (judged,) = strict_json(tmp_path / "out" / "summary.json")["gate"]["conditions"]
    assert (judged["outcome"], judged["p"]) == ("inconclusive", None)
    assert "not comparable in time" in (tmp_path / "gate.xml").read_text()
    assert overlap_report([*words, *gate, "--assume-no-drift"]) == 3


def test_a_launch_of_unknown_time_makes_the_order_unknown() -> None:
    found = order_of([[(0, 10), None], [(10, 20), (20, 30)]])
    assert (found.comparable, found.sequence, found.drift_inflation) == (None, None, None)
    assert found.reason == "when 1 of 4 launches ran is not known (1 for one)"


def test_a_launch_shares_the_place_of_one_of_which_less_than_half_had_passed() -> None:
    spans = [(100, 200), (149, 210), (151, 260), (0, 90), (1000, 1010)]
    assert concurrent(spans).tolist() == [1, 1, 2, 0, 3]


def inflated(sequence: str) -> float:
    return drift_inflation(np.arange(len(sequence)), np.array([each == "C" for each in sequence]))


@pytest.mark.parametrize("drift", [0.9 ** np.abs(np.subtract.outer(range(6), range(6))), np.outer(PLACES, PLACES)])
def test_over_all_choices_of_the_sides_a_drift_inflates_by_one_on_average(drift: Floats) -> None:
    chosen = [np.isin(np.arange(6), each) for each in itertools.combinations(range(6), 3)]
    assert np.mean([inflation(drift, each) for each in chosen]) == pytest.approx(1)


@pytest.mark.parametrize("launches", [4, 5, 8, 12])
def test_every_plan_in_turns_counts_as_interleaved(launches: int) -> None:
    """A B B A as plans launch it, A B A B, pairs in any order, and two launches more at the end of one side."""
    generator = np.random.default_rng(launches)
    orders = ["RCCR" * launches, "RC" * launches]
    orders += ["".join(("RC", "CR")[flip] for flip in generator.integers(2, size=launches)) for _ in range(200)]
    assert all(inflated(order[: 2 * launches]) < MOST for order in orders)
    assert inflated(("RCCR" * launches)[: 2 * launches] + "CC") < MOST


@pytest.mark.parametrize(
    "sequence", ["RRRRCCCC", "CCCCRRRR", "R" * 8 + "C" * 8, "RRRRCCCCCCCCRRRR", "RRRRCCCC" * 2, "RRRRRCRCCCCC"]
)
def test_blocks_do_not(sequence: str) -> None:
    assert inflated(sequence) > MOST
