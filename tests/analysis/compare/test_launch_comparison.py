"""Launch sets compared: which did the same work, verdict, what withholds it, and what the reader is told."""

from __future__ import annotations

import gc
import itertools
import json
import re
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from aorta.analysis.account import StepAccount
from aorta.analysis.aggregate import NOTHING_RECORDED
from aorta.analysis.compare import launch_set as sets
from aorta.analysis.compare.launch_comparison import refuse_unlike
from aorta.analysis.compare.launch_set import (
    MOST,
    Launch,
    LaunchSet,
    concurrent,
    drift_inflation,
    inflation,
    launch_order,
    read_set,
    read_subjects,
)
from aorta.analysis.compare.run_comparison import LIBRARY, OBSERVED
from aorta.analysis.compare.verdict import Rules
from aorta.documents import as_json
from aorta.documents.dataset import DeviceFacts
from aorta.errors import InputError
from aorta.read.locations import launch_folders, locate
from aorta.read.record import load_run
from aorta.read.run import Run
from aorta.report.command import overlap_report
from aorta.report.summary import summarize
from tests.analysis.builders import strict_json
from tests.analysis.compare.builders import CONFIG, launch, launch_set

CASES = json.loads(Path(__file__).with_suffix(".json").read_text())

HIGH = (0.80, 0.81, 0.82, 0.83)
LOW = (0.60, 0.61, 0.62, 0.63)


def compared(reference: Path, candidate: Path, **rules: Any) -> dict[str, Any]:
    """As it stands in summary.json."""
    of = Rules(**rules)
    summary = summarize(read_subjects({"old": reference, "new": candidate}, of), "old", "new", of)
    return as_json(summary.comparison)


OTHER = {"workload": {"name": "ranking", "model_dim": 128}, "training": {"mixed_precision": "none"}}


def test_across_platforms_a_slower_step_still_withholds(tmp_path):
    reference = launch_set(tmp_path / "a", LOW, platform="cuda")
    slow = launch_set(tmp_path / "b", HIGH, [120.0, 121.0, 122.0, 123.0], platform="rocm")
    found = compared(reference, slow)
    assert found["verdict"] == "inconclusive"
    step = found["metrics"]["job_step_ms"]["test"]
    assert (step["verdict"], step["p_corrected"]) == (None, None)
    assert step["verdict_reason"] == "only ratios are judged across platforms"
    judged = compared(reference, slow, judge_milliseconds=True)
    assert judged["metrics"]["job_step_ms"]["test"]["verdict"] == "regression"


def test_a_single_run_is_one_launch(tmp_path):
    alone = compared(launch(tmp_path / "one", 0.8), launch_set(tmp_path / "a", HIGH))
    assert alone["verdict"] == "inconclusive"
    assert "3 more of the reference" in alone["verdict_reason"]
    assert len(alone["launches"]["reference"]) == 1


@pytest.mark.parametrize(("by", "refuses"), [("the optimizer", False), ("recording.step()", True)])
def test_where_the_recording_began_tells_jobs_apart_only_where_the_loop_chose_it(tmp_path, by, refuses):
    config = CONFIG | {"telemetry": {"steps_end_by": by}}
    sides = [launch_set(tmp_path / name, ratios, config=config) for name, ratios in (("a", HIGH), ("b", LOW))]
    launch(sides[0] / "04", 0.8, config=config, start_step=2)
    said = pytest.raises(InputError, match=r"not launches of one job:\n.*header.start_step=0")
    with said if refuses else nullcontext():
        assert compared(*sides)["verdict"] == "regression"
    warnings = compared(*sides, allow_unlike=("header.start_step",))["warnings"]
    assert any("launches of the reference differ in header.start_step" in each for each in warnings) == refuses


def test_runs_of_two_jobs_below_one_folder_are_no_launch_set_of_their_own(tmp_path):
    folder = tmp_path / "artifacts"
    launch(folder / "gpt", 0.8, 580.0, config=OTHER)
    launch(folder / "small", 0.8, 20.0)
    with pytest.raises(InputError, match=r"not launches of one job:\n  .*gpt: workload.model_dim=128\n  .*small: work"):
        summarize(read_subjects({"x": folder}, Rules()))
    rules = Rules(allow_unlike=("workload",))
    assert summarize(read_subjects({"x": folder}, rules), rules=rules).datasets["x"].launches == 2


def test_only_one_side_throttled_is_warned_of(tmp_path, monkeypatch):
    real = sets.devices_entry

    def hot(run: Any, *rest: Any) -> DeviceFacts:
        return replace(real(run, *rest), throttled_ranks=[1] if "/b/" in run.location else [])

    monkeypatch.setattr(sets, "devices_entry", hot)
    found = compared(launch_set(tmp_path / "a", HIGH), launch_set(tmp_path / "b", LOW))
    assert any("only the candidate was throttled, in 4 of 4 launches" in warning for warning in found["warnings"])


def test_every_launch_without_a_manifest_and_on_both_sides_is_warned_of(tmp_path):
    reference, candidate = launch_set(tmp_path / "a", HIGH), launch_set(tmp_path / "b", LOW, manifest=False)
    twice = compared(reference, reference)
    assert any("on both sides: 4 runs" in warning for warning in twice["warnings"])
    assert twice["metrics"]["overlap_ratio"]["test"]["p"] == 1
    (reference / "02" / "run.json").unlink()
    said = [
        warning.partition(":")[0] for warning in compared(reference, candidate)["warnings"] if "manifest" in warning
    ]
    assert said == [
        "1 of 4 launches of the reference have no manifest with a configuration (02)",
        "4 of 4 launches of the candidate have no manifest with a configuration (00, 01, 02, 03)",
    ]


FACTS = {
    "header.world_size": 2,
    "header.platform": "cuda",
    OBSERVED: "all",
    "config.workload.name": "ranking",
    "config.training.seed": 1,
}


def side(name: str, *launches: dict[str, Any]) -> LaunchSet:
    """Launches whose facts are `FACTS` and what is given; None takes a fact away."""
    facts = [{key: value for key, value in (FACTS | changes).items() if value is not None} for changes in launches]
    made = [Launch(Path(name, str(place)), f"{name}{place}", {}, each, ()) for place, each in enumerate(facts)]
    return LaunchSet(Path(name), tuple(made), [])


def refused(left: LaunchSet, right: LaunchSet, *allow: str) -> list[tuple[str, str]]:
    """Where and in which key they differ, everything allowed; what is not allowed raises."""
    return [(found.where, found.key) for found in refuse_unlike(left, right, Rules(allow_unlike=allow))]


@pytest.mark.parametrize(("key", "value", "refuses"), CASES["unlike work"])
def test_what_changes_the_work_is_refused_also_where_one_side_does_not_state_it(key, value, refuses):
    """What is compared may differ; `parallel.batch_size` stands for a setting that only one strategy has."""
    left, right = side("a", {}, {}), side("b", {key: value}, {key: value})
    for sides in ((left, right), (right, left)):
        with pytest.raises(InputError, match=f"NOT COMPARABLE: {key}") if refuses else nullcontext():
            assert refused(*sides) == []
    assert refused(left, right, "all") == ([("between", key)] if refuses else [])


@pytest.mark.parametrize("key", ["header.platform", LIBRARY, "config.parallel.strategy", "config.fabric.kind"])
def test_within_a_side_it_must_not(key):
    mixed = side("b", {}, {key: "other"})
    with pytest.raises(InputError, match=f"(?s)b are not launches of one job:.*{key.removeprefix('config.')}=other"):
        refused(side("a", {}), mixed)
    with pytest.raises(InputError, match="the runs in b are not launches of one job"):
        refused(mixed, side("a", {}))
    assert refused(side("a", {}), mixed, key) == [("candidate", key)]


def test_launches_of_a_side_that_differ_are_listed_by_folder_but_for_their_seeds():
    mixed = side("a", {}, {"config.fabric.kind": "x"}, {"config.fabric.seed": 7, "config.training.seed": 7})
    listed = (
        "NOT COMPARABLE: the runs in a are not launches of one job:\n  a/0, a/2: fabric.kind=(absent)\n  "
        "a/1: fabric.kind=x\nChoose one: a/0, a/1; or compare two"
    )
    with pytest.raises(InputError, match=re.escape(listed)):
        refused(mixed, side("b", {}))
    many = side("b", {}, {f"config.fabric.{name}": 1 for name in "abcde"})
    said = r"fabric\.a=1, fabric\.b=1, fabric\.c=1, 2 more\nChoose one: .* --allow-unlike all$"
    with pytest.raises(InputError, match=f"(?s){said}"):
        refused(side("a", {}), many)


def test_a_swap_of_the_collective_library_that_did_not_happen_is_refused():
    left, right = ({"environment.LD_PRELOAD": f"/{build}/librccl.so.1", LIBRARY: "2.22.3 (x)"} for build in "ab")
    with pytest.raises(
        InputError, match=r"both sides loaded the same NCCL or RCCL, 2.22.3 \(x\) \(a/0, b/0\): nothing"
    ):
        refused(side("a", left), side("b", right))
    assert refused(side("a", left), side("b", right), LIBRARY) == []
    assert refused(side("a", left), side("b", right | {LIBRARY: "2.22.3 (y)"})) == []


def test_a_launch_that_states_no_configuration_is_compared_by_its_header_only():
    silent = {"config.workload.name": None, "config.training.seed": None}
    assert refused(side("a", {}), side("b", silent)) == []
    with pytest.raises(InputError, match=r"header.world_size is 2 in a/0, 4 in b/0"):
        refused(side("a", {}), side("b", silent | {"header.world_size": 4}))
    wide = {"config.workload.width": 64}
    with pytest.raises(InputError, match=r"width is '\(absent\)' in a/0, 64 in b/1"):
        refused(side("a", {}), side("b", silent, wide))


def test_launches_of_which_other_steps_are_observed_are_refused_with_the_setting():
    with pytest.raises(InputError, match=r"'all' in .*'a sample' in .*few of the other. Use one instrument.every"):
        refused(side("a", {}), side("b", {OBSERVED: "a sample"}))


def test_two_sets_and_every_rule_as_words(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    launch_set(tmp_path / "plan" / "reference", HIGH)
    launch_set(tmp_path / "plan" / "candidate", LOW, config=OTHER)
    words = ["--reference", "plan/reference", "--candidate", "plan/candidate"]
    assert overlap_report(words) == 2
    assert "--allow-unlike config.workload.model_dim" in capsys.readouterr().err
    words += ["--allow-unlike", "all", "--primary", "exposed_share", "--alpha", "0.04", "--margin", "0.01"]
    assert overlap_report([*words, "--judge-milliseconds"]) == 0
    found = strict_json(tmp_path / "reports" / "plan" / "summary.json")["comparison"]
    assert (found["primary"], found["alpha"], found["margin"]) == ("exposed_share", 0.04, 0.01)
    assert (found["judge_milliseconds"], found["metrics"]["overlap_ratio"]["test"]["role"]) == (True, "sequence")
    assert [each["where"] for each in found["refused"]] == ["between"]
    assert any("NOT COMPARABLE: config.workload.model_dim is 64" in warning for warning in found["warnings"])


# --- what is a launch set, what is kept of a launch, and when launches ran


def test_a_folder_of_run_folders_is_a_set_in_the_order_of_their_numbers(tmp_path):
    for number in (10, 2, 1):
        launch(tmp_path / str(number), 0.5)
    (tmp_path / "3").mkdir()  # a launch that died before its first line
    (tmp_path / "logs").mkdir()
    assert [folder.name for folder in launch_folders(tmp_path)] == ["1", "2", "3", "10"]


def test_what_is_no_set(tmp_path):
    launch_set(tmp_path / "run" / "history", [0.5, 0.5])
    launch(tmp_path / "run" / "again", 0.5)
    assert launch_folders(tmp_path / "run") == []  # one run below, and it is not numbered
    launch(tmp_path / "whole", 0.5)
    launch_set(tmp_path / "whole" / "history", [0.5, 0.5])
    assert launch_folders(tmp_path / "whole") == []
    assert launch_folders(tmp_path / "absent") == []
    assert launch_folders("s3://bucket/traces") == []


def test_a_plan_is_told_to_name_its_sides_and_a_label_finds_a_set(tmp_path):
    launch_set(tmp_path / "reference", [0.5, 0.5])  # repeats of one configuration
    (tmp_path / "candidate").mkdir()
    with pytest.raises(InputError, match=r"one launch set, of the reference; give .*/reference$"):
        launch_folders(tmp_path)
    launch_set(tmp_path / "candidate", [0.5, 0.5])
    with pytest.raises(InputError, match=r"--reference .*reference --candidate .*candidate"):
        launch_folders(tmp_path)
    launch_set(tmp_path / "artifacts" / "cuda", [0.5, 0.5])
    assert locate(["cuda"], tmp_path, tmp_path) == {"cuda": tmp_path / "artifacts" / "cuda"}


def test_launches_that_are_not_complete_are_left_out_by_name(tmp_path):
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


def test_the_representative_is_nearest_to_the_median(tmp_path):
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


def test_one_run_is_held_at_a_time(tmp_path):
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


PLACES = np.arange(6) - 2.5
REFERENCE_FIRST, IN_TURNS = "RRRRCCCC", "RCCRRCCR"


def sides(folder: Path, sequence: str, apart_s: float = 60.0, **words: Any) -> tuple[Path, Path]:
    """Two launch sets whose launches began in this order; the candidate hides much less."""
    began = {side: [apart_s * place for place, each in enumerate(sequence) if each == side] for side in "RC"}
    return (
        launch_set(folder / "reference", HIGH, began_s=began["R"], **words),
        launch_set(folder / "candidate", LOW, began_s=began["C"], **words),
    )


def test_all_of_the_reference_first_gets_no_verdict_unless_drift_is_ruled_out(tmp_path):
    found = compared(*sides(tmp_path / "first", REFERENCE_FIRST))
    order = found["launch_order"]
    assert (found["verdict"], order["comparable"]) == ("not comparable in time", False)
    assert order["sequence"] == REFERENCE_FIRST
    assert "did not take turns (RRRRCCCC)" in found["verdict_reason"]
    assert "--assume-no-drift" in found["verdict_reason"]
    assert {(each["test"]["verdict"], each["test"]["p"]) for each in found["metrics"].values()} == {(None, None)}
    asked = compared(tmp_path / "first" / "reference", tmp_path / "first" / "candidate", assume_no_drift=True)
    assert (asked["verdict"], asked["launch_order"]["assume_no_drift"]) == ("regression", True)
    assert [warning for warning in asked["warnings"] if "--assume-no-drift" in warning and "RRRRCCCC" in warning]


def test_launches_in_turns_keep_their_verdict_and_machines_of_their_own_are_warned_of(tmp_path):
    reference, _ = sides(tmp_path / "here", IN_TURNS, host="tin")
    _, candidate = sides(tmp_path / "there", IN_TURNS, host="zinc")
    found = compared(reference, candidate)
    order = found["launch_order"]
    assert (found["verdict"], order["comparable"], order["sequence"]) == ("regression", True, IN_TURNS)
    assert (order["largest_inflation"], order["reason"], order["assume_no_drift"]) == (MOST, None, False)
    assert not any("drift" in warning for warning in found["warnings"])
    said = "the reference ran on tin, the candidate on zinc"
    assert [warning for warning in found["warnings"] if warning.startswith(said)]


def launches_at(*spans_ns: tuple[int, int] | None) -> LaunchSet:
    made = [
        Launch(Path(f"{at}"), f"{spans_ns}-{at}", {}, {}, (), span, account=StepAccount(rank_steps=at))
        for at, span in enumerate(spans_ns)
    ]
    return LaunchSet(Path(), tuple(made), [])


def test_accounts_are_in_the_order_in_which_launches_ran():
    found = launches_at((10, 20), (9, 20), (8, 20)).accounts
    assert isinstance(found, list)
    assert [each.rank_steps for each in found] == [2, 1, 0]


def test_launches_that_ran_at_the_same_time_took_turns_and_one_of_unknown_time_makes_the_order_unknown():
    same = launch_order(launches_at((0, 70), (1, 71)), launches_at((2, 72), (3, 73)))
    assert (same.comparable, same.sequence) == (True, "(RRCC)")
    found = launch_order(launches_at((0, 10), None), launches_at((10, 20), (20, 30)))
    assert (found.comparable, found.sequence, found.drift_inflation) == (None, None, None)
    assert found.reason == "when 1 of 4 launches ran is not known (1 for one)"


def test_a_launch_shares_the_place_of_one_of_which_less_than_half_had_passed():
    spans = [(100, 200), (149, 210), (151, 260), (0, 90), (1000, 1010)]
    assert concurrent(spans).tolist() == [1, 1, 2, 0, 3]


@pytest.mark.parametrize("drift", [0.9 ** np.abs(np.subtract.outer(range(6), range(6))), np.outer(PLACES, PLACES)])
def test_over_all_choices_of_the_sides_a_drift_inflates_by_one_on_average(drift):
    chosen = [np.isin(np.arange(6), each) for each in itertools.combinations(range(6), 3)]
    assert np.mean([inflation(drift, each) for each in chosen]) == pytest.approx(1)


def inflated(sequence: str) -> float:
    return drift_inflation(np.arange(len(sequence)), np.array([each == "C" for each in sequence]))


@pytest.mark.parametrize("launches", [4, 5, 8, 12])
def test_every_plan_in_turns_counts_as_interleaved(launches):
    """A B B A as plans launch it, A B A B, pairs in any order, and two launches more at the end of one side."""
    generator = np.random.default_rng(launches)
    orders = ["RCCR" * launches, "RC" * launches]
    orders += ["".join(("RC", "CR")[flip] for flip in generator.integers(2, size=launches)) for _ in range(200)]
    assert all(inflated(order[: 2 * launches]) < MOST for order in orders)
    assert inflated(("RCCR" * launches)[: 2 * launches] + "CC") < MOST


@pytest.mark.parametrize(
    "sequence", ["RRRRCCCC", "CCCCRRRR", "R" * 8 + "C" * 8, "RRRRCCCCCCCCRRRR", "RRRRCCCC" * 2, "RRRRRCRCCCCC"]
)
def test_blocks_do_not(sequence):
    assert inflated(sequence) > MOST
