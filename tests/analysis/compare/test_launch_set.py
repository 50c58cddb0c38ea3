"""What is a launch set, and what is kept of a launch; launches that did not take turns in time get no verdict (W27)."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aorta.analysis.aggregate import NOTHING_RECORDED, LabelledRun, aggregate
from aorta.analysis.compare.launch_set import (
    MOST,
    Launch,
    LaunchSet,
    concurrent,
    drift_inflation,
    inflation,
    launch_order,
    read_set,
)
from aorta.errors import InputError
from aorta.read.frames import Floats
from aorta.read.locate import locate
from aorta.read.locations import launch_folders
from aorta.read.record import load_run
from aorta.read.run import Run
from tests.analysis.builders import header, metrics, simulated_run, step, write_rank
from tests.analysis.compare.builders import launch, launch_set
from tests.analysis.compare.test_launch_comparison import compared


def test_a_folder_of_run_folders_is_a_set_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        launch(tmp_path / str(number), 0.5)
    (tmp_path / "3").mkdir()  # a launch that died before its first line
    (tmp_path / "logs").mkdir()
    assert [folder.name for folder in launch_folders(tmp_path)] == ["1", "2", "3", "10"]


def test_what_is_no_set(tmp_path: Path) -> None:
    launch_set(tmp_path / "run" / "history", [0.5, 0.5])
    launch(tmp_path / "run" / "again", 0.5)
    assert launch_folders(tmp_path / "run") == []  # one run below, and it is not numbered
    launch(tmp_path / "whole", 0.5)
    launch_set(tmp_path / "whole" / "history", [0.5, 0.5])
    assert launch_folders(tmp_path / "whole") == []
    assert launch_folders(tmp_path / "absent") == []
    assert launch_folders("s3://bucket/traces") == []


def test_a_plan_is_told_to_name_its_sides_and_a_label_finds_a_set(tmp_path: Path) -> None:
    launch_set(tmp_path / "reference", [0.5, 0.5])  # repeats of one configuration
    (tmp_path / "candidate").mkdir()
    with pytest.raises(InputError, match=r"one launch set, of the reference; give .*/reference$"):
        launch_folders(tmp_path)
    launch_set(tmp_path / "candidate", [0.5, 0.5])
    with pytest.raises(InputError, match=r"--reference .*reference --candidate .*candidate"):
        launch_folders(tmp_path)
    launch_set(tmp_path / "artifacts" / "cuda", [0.5, 0.5])
    assert locate(["cuda"], tmp_path, tmp_path) == {"cuda": tmp_path / "artifacts" / "cuda"}


def test_the_median_of_a_launch_is_the_one_that_its_report_shows(tmp_path: Path) -> None:
    dataset = LabelledRun("x", load_run(simulated_run(tmp_path, label="x", ranks=3, steps=20)))
    published = aggregate(dataset).metrics
    kept = Launch.of(dataset).samples
    assert list(kept) == list(published)
    for name, sample in kept.items():
        assert sample.median == published[name].median, name
        assert sample.reason == published[name].reason, name


def test_a_step_without_a_value_does_not_count_in_the_median_of_its_launch(tmp_path: Path) -> None:
    lines = [
        step(0, 2, number, overlap=metrics(10, 8, 4, 4 * ratio, **({"overlap_ratio": None} if ratio == 0 else {})))
        for number, ratio in enumerate((0, 0, 0, 0.5, 0.75))
    ]
    write_rank(tmp_path, header(0, 2), lines)
    kept = Launch.of(LabelledRun("x", load_run(tmp_path))).samples["overlap_ratio"]
    assert kept.median == 0.625


def test_launches_that_are_not_complete_are_left_out_by_name(tmp_path: Path) -> None:
    good = launch_set(tmp_path, [0.5, 0.6])
    launch(tmp_path / "02", 0.5, endings=["completed", None])
    launch(tmp_path / "03", 0.5)
    (tmp_path / "03" / "rank_1_metrics.jsonl").unlink()
    launch(tmp_path / "04", 0.5)
    (tmp_path / "05").mkdir()
    launch(tmp_path / "06", 0.5, run_id=f"{good.name}-00")
    launch(tmp_path / "07", 0.5)
    for file in (tmp_path / "07").glob("rank*"):
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for line in lines if '"record":"step"' not in line))
    found = read_set(tmp_path, launch_folders(tmp_path), load_run)
    assert [launch.path.name for launch in found.launches] == ["00", "01", "04"]
    said = {Path(each.path).name: each.reason for each in found.left_out}
    assert said["02"] == "rank 1: killed (no footer)"
    assert said["03"] == "1 of 2 ranks are missing (1)"
    assert "no rank_<rank>_metrics.jsonl" in said["05"]
    assert "launches have to be independent" in said["06"]
    assert said["07"] == NOTHING_RECORDED
    with pytest.raises(InputError, match=r"none of its 1 launches is complete:\n.*02: rank 1: killed"):
        read_set(tmp_path, [tmp_path / "02"], load_run)


def test_the_representative_is_nearest_to_the_median(tmp_path: Path) -> None:
    found = read_set(tmp_path, launch_folders(launch_set(tmp_path, [0.7, 0.2, 0.5, 0.45])), load_run)
    assert found.representative("overlap_ratio").path.name == "02"  # the median is 0.475, and 02 as near as 03
    assert found.representative("not recorded").path.name == "00"
    # Of launches that tie in the ratio step time decides: pictures of one twice as long as any other would mislead.
    slow, usual, fast = (
        launch(tmp_path / "tied" / name, ratio, step_ms)
        for name, ratio, step_ms in (("00", 0.5, 200.0), ("01", 0.5, 100.0), ("02", 0.6, 99.0))
    )
    tied = read_set(tmp_path, [slow, usual, fast], load_run)
    assert tied.representative("overlap_ratio").path == slow
    assert tied.representative("overlap_ratio", "job_step_ms").path == usual


def test_one_run_is_held_at_a_time(tmp_path: Path) -> None:
    launch_set(tmp_path, [0.5, 0.6, 0.7])
    launch(tmp_path / "03", 0.5, endings=["completed", None])  # one that is left out is let go of too
    launch(tmp_path / "04", 0.8)
    alive: list[weakref.ref[Run]] = []

    def load(folder: Path) -> Run:
        gc.collect()
        assert sum(run() is not None for run in alive) == 0
        run = load_run(folder)
        alive.append(weakref.ref(run))
        return run

    read_set(tmp_path, launch_folders(tmp_path), load)
    gc.collect()
    assert all(run() is None for run in alive)


HIGH = (0.80, 0.81, 0.82, 0.83)
LOW = (0.60, 0.61, 0.62, 0.63)
PLACES = np.arange(6) - 2.5
REFERENCE_FIRST, IN_TURNS = "RRRRCCCC", "RCCRRCCR"


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
    found = compared(*sides(tmp_path, REFERENCE_FIRST))
    assert found["verdict"] == "not comparable in time"
    assert found["launch_order"]["sequence"] == REFERENCE_FIRST
    assert found["launch_order"]["comparable"] is False
    assert "did not take turns (RRRRCCCC)" in found["verdict_reason"]
    assert "--assume-no-drift" in found["verdict_reason"]
    tests = [entry["test"] for entry in found["metrics"].values()]
    assert {(test["verdict"], test["p"]) for test in tests} == {(None, None)}


def test_launches_in_turns_keep_their_verdict_and_others_where_drift_is_ruled_out(tmp_path: Path) -> None:
    found = compared(*sides(tmp_path / "turns", IN_TURNS))
    assert found["verdict"] == "regression"
    assert found["launch_order"] | {"drift_inflation": None} == {
        "comparable": True,
        "sequence": IN_TURNS,
        "drift_inflation": None,
        "largest_inflation": MOST,
        "reason": None,
        "assume_no_drift": False,
    }
    assert not any("drift" in warning or "ran on" in warning for warning in found["warnings"])
    found = compared(*sides(tmp_path / "first", REFERENCE_FIRST), assume_no_drift=True)
    assert found["verdict"] == "regression"
    assert [warning for warning in found["warnings"] if "--assume-no-drift" in warning and "RRRRCCCC" in warning]
    assert found["launch_order"]["assume_no_drift"] is True


def test_too_few_launches_are_told_first(tmp_path: Path) -> None:
    first = launch_set(tmp_path / "a", HIGH[:3], began_s=[0, 60, 120])
    second = launch_set(tmp_path / "b", LOW[:3], began_s=[180, 240, 300])
    found = compared(first, second)
    assert found["verdict"] == "inconclusive"
    assert "needs 4 launches" in found["verdict_reason"]
    assert found["launch_order"]["comparable"] is False


def test_launches_that_ran_at_the_same_time_are_comparable_in_whatever_order_they_began(tmp_path: Path) -> None:
    """A launch lasts seven seconds here: all began within one of them, as on a cluster."""
    found = compared(*sides(tmp_path, REFERENCE_FIRST, apart_s=0.1))
    assert found["verdict"] == "regression"
    assert found["launch_order"]["sequence"] == "(RRRRCCCC)"


def test_machines_of_their_own_are_warned_of(tmp_path: Path) -> None:
    reference, _ = sides(tmp_path / "here", IN_TURNS, host="tin")
    _, candidate = sides(tmp_path / "there", IN_TURNS, host="zinc")
    found = compared(reference, candidate)
    assert found["verdict"] == "regression"
    assert [
        warning
        for warning in found["warnings"]
        if warning.startswith("the reference ran on tin, the candidate on zinc")
    ]


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
