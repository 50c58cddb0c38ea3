"""What `aorta tune` proposes: a simulated job's best setting comes first, and every setting says how it is made."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aorta.analysis.whatif import Value, prediction, read_program
from aorta.analysis.whatif.prediction import base_of
from aorta.experiments.launch_plan import with_candidates
from aorta.experiments.search_commands import LAUNCHES_DIR, base_plan, parse_tune, tune
from aorta.experiments.tune_proposals import (
    TRIED,
    Proposal,
    Refined,
    best,
    bucket_caps,
    grid,
    leader,
    of_environment,
    overrides,
    predicted,
    predicted_again,
    read_base,
    replay_of,
)
from tests.analysis.whatif.simulated_job import MODEL, Job
from tests.analysis.whatif.simulated_record import record, truth
from tests.experiments.conftest import Bench

MIB = 1 << 20
GRADIENTS = sum(block.bytes for block in MODEL)
DDP = Job("ddp", bucket_bytes=GRADIENTS)  # all in one: nothing overlaps
FSDP = Job("fsdp", ranks=4, prefetch=0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, job in (("ddp", DDP), ("fsdp", FSDP), ("tp", Job("tp"))):
        record(job, folder / name)
    return folder


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        (["overlap=off"], ("parallel.overlap=false",)),
        (["overlap=on", "buckets.mb=0.5"], ("parallel.overlap=true", "parallel.bucket_cap_mb=0.5")),
        (
            ["prefetch=2"],
            ("parallel.overlap=true", "parallel.forward_prefetch=2", "parallel.backward_prefetch=2"),
        ),
    ],
)
def test_a_change_says_which_keys_make_it(changes: list[str], wanted: tuple[str, ...]) -> None:
    assert overrides(changes) == wanted


def test_caps_reach_from_a_64th_of_the_gradients_to_all_of_them() -> None:
    assert bucket_caps(3 * MIB) == [0.0625, 0.125, 0.25, 0.5, 1, 2, 4]
    assert bucket_caps(0) == []


def test_the_grid_of_a_strategy() -> None:
    of_ddp = grid("ddp", overlap=False, gradient_bytes=3 * MIB)
    assert len(of_ddp) == len(set(of_ddp)) == 2 * 7 + 1
    assert ("overlap=on", "buckets.mb=4") in of_ddp
    assert grid("fsdp", overlap=True, gradient_bytes=0)[-1] == ("overlap=off",)
    assert grid("tp", overlap=True, gradient_bytes=3 * MIB) == []


def test_the_best_bucket_of_a_job_really_made_so_is_proposed_first(runs: Path) -> None:
    base, found = read_base(runs / "ddp")
    assert base is not None
    really = {cap: truth(replace(DDP, bucket_bytes=round(cap * MIB))).step_ms for cap in bucket_caps(GRADIENTS)}
    first = found[0]
    assert first.changes[0].startswith("buckets.mb=")
    chosen = float(first.changes[0].partition("=")[2])
    assert really[chosen] <= 1.01 * min(really.values())
    assert really[chosen] < 0.9 * truth(DDP).step_ms
    assert first.gain == pytest.approx(1 - really[chosen] / truth(DDP).step_ms, abs=0.01)
    values = [each.step_ms.value for each in found if each.step_ms is not None]
    assert values == sorted(values)


def test_fsdp_is_told_to_prefetch(runs: Path) -> None:
    _, found = read_base(runs / "fsdp")
    really = {depth: truth(replace(FSDP, prefetch=depth)).step_ms for depth in range(5)}
    depth = int(found[0].changes[0].removeprefix("prefetch="))
    assert really[depth] <= 1.01 * min(really.values())
    assert depth > 0


def test_what_is_launched_are_the_best_few_that_gain_enough(runs: Path) -> None:
    _, found = read_base(runs / "ddp")
    judged = best(found, 2, 0.02)
    tried = [each for each in judged if each.why == TRIED]
    assert tried == [each for each in found if each.why == TRIED][:2]
    left = [each for each in judged if each.gain is not None and each.gain > 0.02 and each not in tried]
    assert {each.why for each in left if not each.why.startswith("to the replay")} == {"not among the best 2"}
    assert all(each.why != TRIED for each in best(found, 99, 0.999))
    assert "predicted to gain no more than 2.0%" in {each.why for each in judged}


def test_settings_that_are_one_to_the_replay_are_launched_once(runs: Path) -> None:
    base = base_of(read_program(runs / "ddp"))
    cells = [("buckets.mb=512",), ("buckets.mb=1024",)]
    assert [each.why for each in predicted(base, cells)] == [TRIED, "to the replay the same as buckets.mb=512"]


def test_neighbours_of_a_setting_that_was_launched_are_predicted_from_its_record(runs: Path, tmp_path: Path) -> None:
    base, found = read_base(runs / "ddp")
    assert base is not None
    first = leader(found, 0.02)
    assert first is not None
    record(replace(DDP, bucket_bytes=_bucket(first)), tmp_path / "launched")
    anew = predicted_again(replay_of(tmp_path / "launched"), first, found, base.identity.replayed_ms, "refine-1")
    assert {one.changes for one in anew} == {one.changes for one in found}
    near, far = (
        [one for one in anew if one.source == "refine-1"],
        [one for one in anew if one.source == "base"],
    )
    values = [each.step_ms.value for each in anew if each.step_ms is not None]
    assert values == sorted(values)
    again = predicted_again(replay_of(tmp_path / "launched"), first, anew, 100.0, "refine-2", [first.changes])
    assert {one.changes for one in again if one.source == "refine-2"} == {one.changes for one in near} - {first.changes}
    assert {one.changes for one in near} >= {(f"buckets.mb={cap:g}",) for cap in bucket_caps(GRADIENTS)}
    assert [one for one in found if one in far] == far
    before = {one.changes: one for one in found}
    worst = {"base": 0.0, "refine-1": 0.0}
    for one in near:
        if len(one.changes) == 1 and one.step_ms is not None:
            really = truth(replace(DDP, bucket_bytes=_bucket(one))).step_ms
            assert one.gain == pytest.approx(1 - one.step_ms.value / base.identity.replayed_ms)
            for each in (before[one.changes], one):
                assert each.step_ms is not None
                worst[each.source] = max(worst[each.source], abs(each.step_ms.value / really - 1))
    assert worst["refine-1"] <= 0.01
    assert worst["refine-1"] <= worst["base"]


def test_what_cannot_be_launched_makes_way_for_the_next(runs: Path) -> None:
    _, found = read_base(runs / "ddp")
    refined = Refined(found)
    first = leader(refined.proposals, 0.02)
    assert first is not None
    refined.give_up(first, "could not be launched: out of memory")
    second = leader(refined.proposals, 0.02)
    assert second is not None
    assert second == [one for one in found if one.why == TRIED][1]
    assert {one.why for one in refined.proposals if one.changes == first.changes} == {
        "could not be launched: out of memory"
    }


def test_a_launch_that_was_not_as_predicted_is_noted() -> None:
    one = Proposal(("buckets.mb=1",), launch_ms=Value(100.0, 90.0, 110.0))
    refined = Refined([one])
    refined.hold(one, 109.0, "refine-1")
    assert refined.notes == []
    refined.hold(one, 111.0, "refine-1")
    (note,) = refined.notes
    assert note == (
        "refine-1: buckets.mb=1 took 111.00 ms a step, where 100.00 (90.00 to 110.00) were predicted from base"
    )


def _bucket(one: Proposal) -> int:
    (change,) = one.changes
    return round(float(change.removeprefix("buckets.mb=")) * MIB)


@pytest.mark.parametrize(
    ("made", "near"),
    [
        (("overlap=on",), [("overlap=on",), ("overlap=on", "buckets.mb=1"), ("overlap=on", "buckets.mb=2")]),
        (("overlap=on", "buckets.mb=1"), [("overlap=on", "buckets.mb=1"), ("overlap=on", "buckets.mb=2")]),
        (
            ("buckets.mb=2",),
            [
                *(("buckets.mb=1",), ("buckets.mb=2",)),
                *(("overlap=on", "buckets.mb=1"), ("overlap=on", "buckets.mb=2")),
            ],
        ),
    ],
)
def test_a_neighbour_has_what_was_launched_or_another_value_of_it(
    runs: Path, made: tuple[str, ...], near: list[tuple[str, ...]]
) -> None:
    cells = [
        *(("buckets.mb=1",), ("buckets.mb=2",), ("overlap=on",)),
        *(("overlap=on", "buckets.mb=1"), ("overlap=on", "buckets.mb=2")),
    ]
    there = replay_of(runs / "ddp")
    anew = predicted_again(there, Proposal(made), [Proposal(cell) for cell in cells], 100.0, "refine-1")
    assert sorted(one.changes for one in anew if one.source == "refine-1") == sorted(near)
    itself = next(one for one in anew if one.changes == made)
    assert itself.step_ms is not None
    assert itself.step_ms.value == pytest.approx(there.identity.replayed_ms)


def test_a_setting_that_cannot_be_predicted_says_why(runs: Path) -> None:
    base = base_of(read_program(runs / "ddp"))
    silent = replace(base, program=replace(base.program, facts=replace(base.program.facts, gradient_order=())))
    (refused,) = best(predicted(silent, [("buckets.mb=1",)]), 3, 0.02)
    assert refused.why.startswith("not predicted: --set buckets.mb=1: the record has no order of gradients")
    assert refused.step_ms is None


def test_a_run_that_cannot_be_replayed_proposes_nothing(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_base(runs / "tp")[1][0].why.startswith("there are no settings to try for parallel=tp; there are for")
    monkeypatch.setattr(prediction, "IDENTITY_BOUND", -1.0)
    base, (only,) = read_base(runs / "ddp")
    assert base is None
    assert only.why.startswith("no prediction: the replay of the unchanged run takes")


def test_each_value_of_a_variable_is_a_candidate() -> None:
    found = of_environment(["NCCL_ALGO=Ring,Tree", "API_TOKEN=x"])
    assert [each.environment for each in found] == [{"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "Tree"}, {"API_TOKEN": "x"}]
    assert all(each.why == TRIED and each.step_ms is None for each in found)
    assert "x" not in found[-1].as_json()["name"]


def test_the_plan_has_the_base_and_every_candidate_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base = base_plan(parse_tune(["--output", "t", "--launches", "2", "--seed", "3", "parallel=ddp"]))
    tried = [Proposal(("buckets.mb=2",)), Proposal(environment={"A": "1"})]
    plan = with_candidates(base, base.output / LAUNCHES_DIR, tried)
    names = ["reference", "candidate-1", "candidate-2"]
    assert [launch.side.name for launch in plan.order()] == [*names, *reversed(names)]
    _, bucket, variable = plan.sides
    assert plan.words_of(bucket) == ["parallel=ddp", "parallel.bucket_cap_mb=2", "training.seed=3"]
    assert variable.environment == {"A": "1"}
    assert plan.output == tmp_path / "t" / "launches"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--launches", "4", "--try", "2"],
            "--launches 4: with 2 candidates (--try and --env) no verdict is possible from fewer",
        ),
        (["--try", "0"], "--try 0: without --env there is no candidate"),
        (["--env", "A"], "--env A: expected NAME=VALUE"),
        (["--env", "A=1,"], "--env A=1,: expected NAME=VALUE"),
        (["--env", "A=1,1"], "A=1 is asked for twice"),
        (["--margin", "2"], "--margin 2: above 0 and below 1"),
    ],
)
def test_words_that_cannot_lead_to_a_verdict_end_before_any_launch(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert tune(["--output", "t", *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "t").exists()


def test_proposals_without_a_launch(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--output", "t", "--from", str(runs / "ddp"), "--env", "A=1", "--dry-run", "parallel=ddp"]
    assert tune(words) == 0
    said = capsys.readouterr().out
    assert "candidate-1: parallel.bucket_cap_mb=" in said
    assert "candidate-2: A=1, not predicted" in said
    assert "ms from base" in said
    assert "is launched once, and its neighbours predicted anew" in " ".join(said.split())
    assert sum(line.startswith("candidate-2/") for line in said.splitlines()) == 5
    assert tune([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["launches"] == {"recordings": 0, "per_side": 5, "total": 15}
    assert found["recommendation"] is None
    assert found["alpha_per_candidate"] == 0.025
    assert not (tmp_path / "t").exists()


def test_nothing_worth_a_launch_ends_without_one(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert tune(["--output", "t", "--from", str(runs / "ddp"), "--margin", "0.9", "parallel=ddp"]) == 0
    assert capsys.readouterr().out.endswith("no recommendation: there was nothing to launch against the base\n")
    found = json.loads((tmp_path / "t" / "tune.json").read_text())
    assert found["launches"]["total"] == 0
    assert not (tmp_path / "t" / "launches").exists()


@pytest.mark.thorough
def test_what_is_recommended_was_predicted_launched_and_shown_to_be_better(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the record of the base to the verdict, with launches that leave the records of simulated jobs."""
    bench.monkeypatch.setenv("FAKE_SIMULATED", "1")
    Path("base.yaml").write_text(f"python: {bench.python}\n")
    base = ("parallel=ddp", f"parallel.bucket_cap_mb={GRADIENTS / MIB}")
    words = ["--output", "t", "--plan", "base.yaml", "--launches", "4", *base]
    assert tune(words) == 0
    found = json.loads(Path("t/tune.json").read_text())
    tried, *others = found["proposals"]
    assert tried["tried"]
    assert not any(each["tried"] for each in others)
    assert tried["comparison"]["verdict"] == "improvement"
    assert tried["predicted_from"] in {"refine-1", "refine-2"}
    recordings = 1 + len(list(Path("t").glob("refine-*")))  # one where the best one stays the best
    assert found["launches"] == {"recordings": recordings, "per_side": 4, "total": recordings + 8}
    assert bench.launched[recordings:] == [
        *("reference/00", "candidate-1/00", "candidate-1/01", "reference/01"),
        *("reference/02", "candidate-1/02", "candidate-1/03", "reference/03"),
    ]
    really = {cap: truth(replace(DDP, bucket_bytes=round(cap * MIB))).step_ms for cap in bucket_caps(GRADIENTS)}
    recommended = found["recommendation"]["overrides"]
    bucket = dict(word.split("=", 1) for word in recommended)["parallel.bucket_cap_mb"]
    assert really[float(bucket)] <= 1.01 * min(really.values())
    assert f"\nrecommendation: {' '.join(recommended)}\n" in capsys.readouterr().out
    assert tune(words) == 0  # the same command again launches nothing
    assert len(bench.launched) == recordings + 8
    assert json.loads(Path("t/tune.json").read_text()) == found
