"""The gate over comparisons that the product made of launches on disk, not over any made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aorta.analysis.compare.verdict import Rules
from aorta.analysis.documents.comparison import JudgedCondition
from aorta.analysis.gate.gate_checks import parse_condition
from aorta.analysis.report.report_folder import write_report
from tests.analysis.by_json import evaluate
from tests.analysis.compare.builders import launch, launch_set

EIGHT = tuple(0.8 + number / 1000 for number in range(8))
"""Two of C(16, 8) orders of eight against eight launches."""


def compared(folder: Path, reference: Path, candidate: Path, **rules: Any) -> dict[str, Any]:
    made = write_report({"a": reference, "b": candidate}, folder / "out", "a", "b", rules=Rules(**rules), html=False)
    found: dict[str, Any] = made.summary["comparison"]
    return found


def judged(text: str, comparison: dict[str, Any]) -> JudgedCondition:
    (found,) = evaluate([parse_condition(text)], comparison).conditions
    return found


def varied(folder: Path, comm_ms: float, ratios: tuple[float, ...] = EIGHT, **head: Any) -> Path:
    """Launches whose communication takes a little longer from one to the next."""
    for number, ratio in enumerate(ratios):
        launch(folder / f"{number:02}", ratio, 100 + 0.1 * number, comm_ms=comm_ms + 0.01 * number, **head)
    return folder


def test_four_launches_cannot_fail_what_was_left_out_of_the_correction_and_it_is_said_why(tmp_path: Path) -> None:
    sides = varied(tmp_path / "a", 10, EIGHT[:4]), varied(tmp_path / "b", 20, EIGHT[:4])
    condition = judged("comm_ms>5%", compared(tmp_path, *sides))
    assert condition.outcome == "inconclusive"
    assert "it may be chance: p" in condition.reason
    assert condition.p is not None
    assert condition.p > 2 / 70


@pytest.mark.thorough
def test_single_runs_that_did_different_work_cannot_pass(tmp_path: Path) -> None:
    other = {"workload": {"name": "ranking", "model_dim": 128}, "training": {"mixed_precision": "none"}}
    sides = launch(tmp_path / "a", 0.8), launch(tmp_path / "b", 0.8, config=other)
    condition = judged("overlap_ratio<-0.05", compared(tmp_path, *sides))
    assert (condition.outcome, condition.value) == ("inconclusive", pytest.approx(0))
    assert "they differ in config.workload.model_dim." in condition.reason
    assert "--allow-unlike config.workload.model_dim" in condition.reason
    for word in ("workload.model_dim", "all"):
        assert judged("overlap_ratio<-0.05", compared(tmp_path, *sides, allow_unlike=(word,))).outcome == "pass"


@pytest.mark.thorough
def test_milliseconds_can_be_held_to_a_threshold_over_a_reference_of_0(tmp_path: Path) -> None:
    """There all communication is hidden; 5 ms are not, in every launch of the candidate."""
    sides = launch_set(tmp_path / "a", [1.0] * 4), launch_set(tmp_path / "b", [0.5, 0.51, 0.52, 0.53])
    for folder in (tmp_path / "a").iterdir():
        for file in folder.glob("rank_*"):  # the steps differ by thousandths; here exactly nothing is exposed
            file.write_text(nothing_exposed(file.read_text()))
    found = compared(tmp_path, *sides, primary="exposed_comm_ms")
    assert found["metrics"]["exposed_comm_ms"]["reference"] == 0
    assert found["metrics"]["exposed_comm_ms"]["effect"]["value"] is None
    condition = judged("exposed_comm_ms>1", found)
    assert (condition.outcome, condition.value) == ("fail", pytest.approx(4.85))
    assert condition.low == pytest.approx(4.7, abs=0.02)
    assert condition.high == pytest.approx(5.0, abs=0.02)
    assert judged("exposed_comm_ms>10", found).outcome == "pass"
    assert judged("exposed_comm_ms>10%", found).reason == "the reference is 0: there is no part of it"


def nothing_exposed(text: str) -> str:
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        if line["record"] == "step":
            line["overlap"]["exposed_comm_ms"] = 0.0
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_why_a_part_of_the_reference_has_no_interval(tmp_path: Path) -> None:
    """One launch in four hides all: some resamples of the reference are 0, though the reference is not."""
    sides = launch_set(tmp_path / "a", [0.8, 0.81, 0.82, 1.0]), launch_set(tmp_path / "b", [0.5, 0.51, 0.52, 0.53])
    for file in (tmp_path / "a" / "03").glob("rank_*"):
        file.write_text(nothing_exposed(file.read_text()))
    found = compared(tmp_path, *sides, primary="exposed_comm_ms")
    part = judged("exposed_comm_ms>10%", found)
    assert part.outcome == "inconclusive"
    assert part.reason == "no interval: the reference, or a resample of it, is 0, and there is no part of that"
    assert judged("exposed_comm_ms>1", found).outcome == "fail"
