"""The words of the command line reach the rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from aorta.analysis.report.report_command import overlap_report
from tests.analysis.builders import strict_json
from tests.analysis.compare.builders import launch_set


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
    assert capsys.readouterr().out.startswith(
        "[x] MORE EXPOSED COMMUNICATION: 0.018 -> 0.038 of the step exposed (+0.020, 96 % interval"
    )
    found = strict_json(tmp_path / "reports" / "plan" / "summary.json")["comparison"]
    assert (found["primary"], found["alpha"], found["margin"]) == ("exposed_share", 0.04, 0.01)
    assert found["judge_milliseconds"] is True
    assert found["metrics"]["overlap_ratio"]["role"] == "sequence"


@pytest.mark.parametrize("named", ["artifacts/mine", "mine", "artifacts/mine/"])
def test_the_folder_of_an_ab_is_compared_side_against_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for side, ratios in (("reference", (0.8, 0.81, 0.82, 0.83)), ("candidate", (0.6, 0.61, 0.62, 0.63))):
        launch_set(tmp_path / "artifacts" / "mine" / side, ratios)
    assert overlap_report([named, "--brief"]) == 0
    found = strict_json(tmp_path / "reports" / "mine" / "summary.json")["comparison"]
    assert (found["reference"], found["candidate"]) == ("reference", "candidate")
