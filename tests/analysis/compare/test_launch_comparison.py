"""Launch sets compared: which did the same work, verdict, what withholds it, and what the reader is told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from aorta.analysis.account import StepAccount
from aorta.analysis.compare.launch_comparison import refuse_unlike
from aorta.analysis.compare.launch_set import Launch, LaunchSet, read_subjects
from aorta.analysis.compare.run_comparison import LIBRARY
from aorta.analysis.compare.verdict import Rules
from aorta.documents import as_json
from aorta.documents.dataset import DeviceFacts
from aorta.errors import InputError
from aorta.report.command import overlap_report
from aorta.report.summary import summarize
from tests.analysis.builders import strict_json
from tests.analysis.compare.builders import CONFIG, launch, launch_set

HIGH = (0.80, 0.81, 0.82, 0.83)
LOW = (0.60, 0.61, 0.62, 0.63)


def compared(reference: Path, candidate: Path, **rules: Any) -> dict[str, Any]:
    """As it stands in summary.json."""
    of = Rules(**rules)
    summary = summarize(read_subjects({"old": reference, "new": candidate}, of), "old", "new", of)
    return as_json(summary.comparison)


def test_across_platforms_a_slower_step_still_withholds(tmp_path: Path) -> None:
    reference = launch_set(tmp_path / "a", LOW, platform="cuda")
    slow = launch_set(tmp_path / "b", HIGH, [120.0, 121.0, 122.0, 123.0], platform="rocm")
    found = compared(reference, slow)
    assert found["verdict"] == "inconclusive"
    step = found["metrics"]["job_step_ms"]["test"]
    assert (step["verdict"], step["p_corrected"]) == (None, None)
    assert step["verdict_reason"] == "only ratios are judged across platforms"
    judged = compared(reference, slow, judge_milliseconds=True)
    assert judged["metrics"]["job_step_ms"]["test"]["verdict"] == "regression"


def test_the_same_noise_on_both_sides_is_no_regression_and_a_single_run_is_one_launch(tmp_path: Path) -> None:
    reference = launch_set(tmp_path / "a", HIGH)
    found = compared(reference, launch_set(tmp_path / "b", HIGH[::-1]))
    assert found["verdict"] in ("equivalent", "inconclusive")
    constant = found["metrics"]["compute_stall_ms"]["test"]
    assert (constant["verdict"], constant["p_corrected"]) == ("equivalent", None)
    alone = compared(launch(tmp_path / "one", 0.8), reference)
    assert alone["verdict"] == "inconclusive"
    assert "3 more of the reference" in alone["verdict_reason"]
    assert len(alone["launches"]["reference"]) == 1


OTHER = {"workload": {"name": "ranking", "model_dim": 128}, "training": {"mixed_precision": "none"}}


def test_unlike_work_is_refused_by_key_and_both_values_unless_allowed(tmp_path: Path) -> None:
    sides = launch_set(tmp_path / "a", HIGH), launch_set(tmp_path / "b", LOW, config=OTHER)
    with pytest.raises(InputError, match=r"config.workload.model_dim is 64 in .*a/00, 128 in .*--allow-unlike config"):
        compared(*sides)
    for word in ("config.workload.model_dim", "workload", "all"):
        found = compared(*sides, allow_unlike=(word,))
        assert found["verdict"] == "regression"
        assert [(entry["where"], entry["key"]) for entry in found["refused"]] == [
            ("between", "config.workload.model_dim")
        ]
        assert any("NOT COMPARABLE: config.workload.model_dim" in warning for warning in found["warnings"])


def test_a_side_that_mixes_configurations_is_refused(tmp_path: Path) -> None:
    reference = launch_set(tmp_path / "a", HIGH)
    launch(reference / "04", 0.8, config=CONFIG | {"parallel": {"overlap": False}})
    launch(reference / "05", 0.8, config=CONFIG | {"training": CONFIG["training"] | {"seed": 7}})
    candidate = launch_set(tmp_path / "b", LOW)
    listed = (
        f"NOT COMPARABLE: the runs in {reference} are not launches of one job:\n  "
        f"{', '.join(str(reference / f'{at:02}') for at in (0, 1, 2, 3, 5))}: parallel.overlap=(absent)\n  "
        f"{reference / '04'}: parallel.overlap=false\nChoose one: "
        f"{reference / '00'}, {reference / '04'}; or compare two"
    )
    with pytest.raises(InputError, match=re.escape(listed)):
        compared(reference, candidate)
    found = compared(reference, candidate, allow_unlike=("parallel.overlap",))
    assert any("launches of the reference differ in config.parallel.overlap" in each for each in found["warnings"])


@pytest.mark.parametrize(("by", "refuses"), [("the optimizer", False), ("recording.step()", True)])
def test_where_the_recording_began_tells_jobs_apart_only_where_the_loop_chose_it(
    tmp_path: Path, by: str, refuses: bool
) -> None:
    config = CONFIG | {"telemetry": {"steps_end_by": by}}
    sides = [launch_set(tmp_path / name, ratios, config=config) for name, ratios in (("a", HIGH), ("b", LOW))]
    launch(sides[0] / "04", 0.8, config=config, start_step=2)
    if refuses:
        with pytest.raises(InputError, match=r"not launches of one job:\n.*header.start_step=0"):
            compared(*sides)
    else:
        assert compared(*sides)["verdict"] == "regression"


def test_runs_of_two_jobs_below_one_folder_are_no_launch_set_of_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "artifacts"
    launch(folder / "gpt", 0.8, 580.0, config=OTHER)
    launch(folder / "small", 0.8, 20.0)
    with pytest.raises(InputError, match=r"not launches of one job:\n  .*gpt: workload.model_dim=128\n  .*small: work"):
        summarize(read_subjects({"x": folder}, Rules()))
    rules = Rules(allow_unlike=("workload",))
    assert summarize(read_subjects({"x": folder}, rules), rules=rules).datasets["x"].launches == 2


def test_only_one_side_throttled_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from aorta.analysis.compare import launch_set as module

    real = module.devices_entry

    def hot(run: Any, *rest: Any) -> DeviceFacts:
        return replace(real(run, *rest), throttled_ranks=[1] if "/b/" in run.location else [])

    monkeypatch.setattr(module, "devices_entry", hot)
    found = compared(launch_set(tmp_path / "a", HIGH), launch_set(tmp_path / "b", LOW))
    assert any("only the candidate was throttled, in 4 of 4 launches" in warning for warning in found["warnings"])


def test_every_launch_without_a_manifest_and_on_both_sides_is_warned_of(tmp_path: Path) -> None:
    reference, candidate = launch_set(tmp_path / "a", HIGH), launch_set(tmp_path / "b", LOW, manifest=False)
    twice = compared(reference, reference)
    assert any("on both sides: 4 runs" in warning for warning in twice["warnings"])
    assert twice["metrics"]["overlap_ratio"]["test"]["p"] == 1
    (reference / "02" / "run.json").unlink()
    said = [warning for warning in compared(reference, candidate)["warnings"] if "manifest" in warning]
    assert [warning.partition(":")[0] for warning in said] == [
        "1 of 4 launches of the reference have no manifest with a configuration (02)",
        "4 of 4 launches of the candidate have no manifest with a configuration (00, 01, 02, 03)",
    ]


FACTS = {
    "header.world_size": 2,
    "header.platform": "cuda",
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


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("header.world_size", 4),
        ("config.workload.width", 64),
        ("config.workload.name", None),
        ("config.training.mixed_precision", "bf16"),
        ("config.training.dtype", "bfloat16"),
        ("config.training.batch_size", 3),
        ("config.training.gradient_accumulation", 2),
        ("config.dataset.sequence_length", 8),
    ],
)
def test_what_changes_the_work_is_refused_also_where_one_side_does_not_state_it(key: str, value: Any) -> None:
    left, right = side("a", {}, {}), side("b", {key: value}, {key: value})
    with pytest.raises(InputError, match=f"NOT COMPARABLE: {key}"):
        refused(left, right)
    with pytest.raises(InputError, match=f"NOT COMPARABLE: {key}"):
        refused(right, left)
    assert refused(left, right, "all") == [("between", key)]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("header.platform", "rocm"),
        ("config.parallel.strategy", "fsdp"),
        ("config.parallel.batch_size", 3),
        ("config.fabric.kind", "emulated"),
        ("config.instrument.mode", "observe"),
        ("config.training.seed", 7),
        ("config.training.output_dir", "elsewhere"),
    ],
)
def test_what_is_compared_may_differ_between_the_sides(key: str, value: Any) -> None:
    """`parallel.batch_size` stands for a setting that only one strategy has."""
    assert refused(side("a", {}), side("b", {key: value})) == []


@pytest.mark.parametrize("key", ["header.platform", LIBRARY, "config.parallel.strategy", "config.fabric.kind"])
def test_within_a_side_it_must_not(key: str) -> None:
    mixed = side("b", {}, {key: "other"})
    with pytest.raises(InputError, match=f"(?s)b are not launches of one job:.*{key.removeprefix('config.')}=other"):
        refused(side("a", {}), mixed)
    with pytest.raises(InputError, match="the runs in b are not launches of one job"):
        refused(mixed, side("a", {}))
    assert refused(side("a", {}), mixed, key) == [("candidate", key)]
    many = side("b", {}, {f"config.fabric.{name}": 1 for name in "abcde"})
    said = r"fabric\.a=1, fabric\.b=1, fabric\.c=1, 2 more\nChoose one: .* --allow-unlike all$"
    with pytest.raises(InputError, match=f"(?s){said}"):
        refused(side("a", {}), many)
    seeds = ({"config.fabric.seed": number} for number in (1, 2))
    assert refused(side("a", *seeds), side("b", {})) == [], "but each launch may have a seed of its own"


def test_a_swap_of_the_collective_library_that_did_not_happen_is_refused() -> None:
    left, right = ({"environment.LD_PRELOAD": f"/{build}/librccl.so.1", LIBRARY: "2.22.3 (x)"} for build in "ab")
    with pytest.raises(
        InputError, match=r"both sides loaded the same NCCL or RCCL, 2.22.3 \(x\) \(a/0, b/0\): nothing"
    ):
        refused(side("a", left), side("b", right))
    assert refused(side("a", left), side("b", right), LIBRARY) == []
    assert refused(side("a", left), side("b", right | {LIBRARY: "2.22.3 (y)"})) == []


def test_a_launch_that_states_no_configuration_is_compared_by_its_header_only() -> None:
    silent = {"config.workload.name": None, "config.training.seed": None}
    assert refused(side("a", {}), side("b", silent)) == []
    with pytest.raises(InputError, match=r"header.world_size is 2 in a/0, 4 in b/0"):
        refused(side("a", {}), side("b", silent | {"header.world_size": 4}))
    wide = {"config.workload.width": 64}
    with pytest.raises(InputError, match=r"width is '\(absent\)' in a/0, 64 in b/1"):
        refused(side("a", {}), side("b", silent, wide))


def test_two_sets_and_every_rule_as_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other = {"workload": {"name": "ranking", "model_dim": 128}}
    launch_set(tmp_path / "plan" / "reference", (0.8, 0.81, 0.82, 0.83))
    launch_set(tmp_path / "plan" / "candidate", (0.6, 0.61, 0.62, 0.63), config=other)
    words = ["--reference", "plan/reference", "--candidate", "plan/candidate"]
    assert overlap_report(words) == 2
    assert "--allow-unlike config.workload.model_dim" in capsys.readouterr().err
    words += ["--allow-unlike", "all", "--primary", "exposed_share", "--alpha", "0.04", "--margin", "0.01"]
    assert overlap_report([*words, "--judge-milliseconds"]) == 0
    found = strict_json(tmp_path / "reports" / "plan" / "summary.json")["comparison"]
    assert (found["primary"], found["alpha"], found["margin"]) == ("exposed_share", 0.04, 0.01)
    assert found["judge_milliseconds"] is True
    assert found["metrics"]["overlap_ratio"]["test"]["role"] == "sequence"


def test_accounts_are_in_the_order_in_which_launches_ran() -> None:
    made = [
        Launch(Path(str(at)), str(at), {}, {}, (), span_ns=(10 - at, 20), account=StepAccount(rank_steps=at))
        for at in range(3)
    ]
    found = LaunchSet(Path(), tuple(made), []).accounts
    assert isinstance(found, list)
    assert [each.rank_steps for each in found] == [2, 1, 0]
