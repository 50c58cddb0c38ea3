"""The noise floor of an A/A plan, against the standard library's statistics of numbers that were put in."""

from __future__ import annotations

import json
import statistics

import pytest

from aorta.experiments.launch_medians import variation
from tests.experiments.conftest import Bench

ORDER = ["reference/00", "candidate/00", "candidate/01", "reference/01"]
STEPS = {"reference_00": 100.0, "candidate_00": 104.0, "candidate_01": 98.0, "reference_01": 101.0}


def test_the_noise_floor_of_known_launches(bench: Bench) -> None:
    bench.acts(**{name: {"job_step_ms": value} for name, value in STEPS.items()})
    code, out, _ = bench("--aa", "--launches", "2")
    assert code == 0
    floor = json.loads((bench.home / "plan" / "noise_floor.json").read_text())
    assert (floor["launches"], floor["order"], floor["fabric"]) == (4, ORDER, None)
    step = floor["metrics"]["job_step_ms"]
    values = list(STEPS.values())
    assert step["launch_medians"] == values
    assert step["sd"] == pytest.approx(statistics.stdev(values))
    assert step["relative_sd"] == pytest.approx(statistics.stdev(values) / statistics.fmean(values))
    assert (step["min"], step["max"], step["range"]) == (98.0, 104.0, 6.0)
    assert step["side_difference"] == pytest.approx((104 + 98) / 2 - (100 + 101) / 2)
    ratio = floor["metrics"]["overlap_ratio"]  # 1/8 of 1/4 in every launch
    assert (ratio["unit"], ratio["median"], ratio["sd"], ratio["relative_sd"]) == ("ratio", 0.5, 0.0, 0.0)
    (line,) = [line for line in out.splitlines() if line.startswith("job_step_ms")]
    assert line.split() == ["job_step_ms", "100.5000", "2.5000", "2.48%", "98.0000", "104.0000", "0.5000"]
    assert "Next: aorta report" in out


def test_an_ab_plan_publishes_none(bench: Bench) -> None:
    bench("--launches", "1", "--candidate", "a=2")
    assert not (bench.home / "plan" / "noise_floor.json").exists()


@pytest.mark.parametrize(
    ("medians", "sd", "relative_sd", "reason"),
    [
        ([5.0], None, None, "1 launch; a variation needs two"),
        ([None, None], None, None, "unknown in every launch"),
        ([0.0, 0.0], 0.0, None, "the mean is 0"),
        ([-1.0, -3.0], 2**0.5, 2**0.5 / 2, None),
        ([2.0, None, 4.0], 2**0.5, 2**0.5 / 3, None),
    ],
)
def test_what_is_not_known_is_null_with_a_reason(
    medians: list[float | None], sd: float | None, relative_sd: float | None, reason: str | None
) -> None:
    found = variation(medians, ["reference"] * len(medians), "ms")
    assert found.sd == (None if sd is None else pytest.approx(sd))
    assert found.relative_sd == (None if relative_sd is None else pytest.approx(relative_sd))
    assert found.reason == reason
    assert found.side_difference is None
