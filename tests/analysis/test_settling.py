"""Steps that have not settled are found and said, and no verdict rests on them; so are the steps that make the mean."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from aorta.analysis.settling import LevelChange, level_change, slow_steps, unsettled
from aorta.read.frames import Floats
from aorta.report.command import overlap_report
from tests.analysis.builders import strict_json
from tests.analysis.compare.builders import WOBBLE, launch_set


def steps(*levels_ms: tuple[int, float], noise: float = 0.02) -> Floats:
    """So many steps of each level."""
    level = np.concatenate([np.full(count, ms) for count, ms in levels_ms])
    return np.array(level * np.random.default_rng(0).normal(1, noise, len(level)))


@pytest.mark.parametrize(
    ("times_ms", "first"),
    [
        (steps((9, 180.0), (6, 100.0)), 9),  # 14 of 20 steps cold, 5 of them as warm-up
        (steps((6, 100.0), (9, 180.0)), 6),
        (steps((6, 180.0), (4, 100.0)), 6),  # of few steps
        (steps((4, 180.0), (5, 100.0)), 4),
        (steps((3, 180.0), (2, 100.0)), None),
        (steps((10, 115.0), (30, 100.0)), 10),
        (steps((10, 105.0), (30, 100.0)), None),  # less than a tenth
        (steps((2, 180.0), (38, 100.0)), None),  # the median does not rest on them
        (steps((40, 100.0), noise=0.2), None),
        (np.full(40, 100.0), None),
        (np.empty(0), None),
    ],
)
def test_a_change_of_level_is_found_where_it_is(times_ms: Floats, first: int | None) -> None:
    found = level_change(times_ms)
    assert (None if found is None else found.first) == first


def test_a_side_has_not_settled_where_nearly_all_launches_change_alike() -> None:
    faster, slower = LevelChange(9, 15, 180.0, 100.0), LevelChange(5, 15, 100.0, 120.0)
    assert str(unsettled([faster] * 4)).startswith("in 4 of 4 launches steps get faster: the first 9 of 15 steps")
    assert "slower" in str(unsettled([slower] * 4 + [None]))
    for mixed in ([faster] * 3 + [None], [faster, faster, slower, slower], [faster] * 3 + [slower], [None] * 4):
        assert unsettled(mixed) is None


def test_no_verdict_rests_on_steps_that_have_not_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    began_s = {"reference": [0.0, 180.0, 240.0, 420.0], "candidate": [60.0, 120.0, 300.0, 360.0]}
    cold = (0, *[800] * 9, *WOBBLE[1:])
    for side, wobble in (("reference", (0, *[0] * 9, *WOBBLE[1:])), ("candidate", cold)):
        launch_set(tmp_path / "plan" / side, [0.8, 0.81, 0.82, 0.83], began_s=began_s[side], wobble=wobble)
    assert overlap_report(["plan", "--fail-on", "job_step_ms>5%", "--output", "out"]) == 4
    assert capsys.readouterr().out.startswith("[?] Not settled: ")
    found = strict_json(tmp_path / "out" / "summary.json")
    comparison = found["comparison"]
    assert comparison["verdict"] == "not settled"
    assert comparison["verdict_reason"].startswith("the candidate: in 4 of 4 launches steps get faster: the first 9 of")
    assert {entry["test"]["verdict"] for entry in comparison["metrics"].values()} == {None}
    assert [each["rule"] for each in found["datasets"]["candidate"]["findings"]][:1] == ["not_settled"]


@pytest.mark.parametrize(
    ("times_ms", "said"),
    [
        ([100.0] * 28 + [560.0, 400.0], "2 slow steps of 30 make the difference: 128 (560 ms), 129 (400 ms)"),
        ([100.0] * 12 + [1.0] * 4, "4 fast steps of 16 make the difference: 112 (1 ms), 113 (1 ms),"),
        ([100.0] * 16 + [300.0] * 14, "12 slow steps of 30 make the difference"),
        ([100.0, 105.0, 103.0, 110.0], None),
        ([], None),
    ],
)
def test_the_steps_that_make_the_mean_are_named(times_ms: list[float], said: str | None) -> None:
    found = slow_steps(np.array(times_ms), np.arange(100, 100 + len(times_ms)))
    assert (found is None) == (said is None)
    assert said is None or said in str(found)
