"""The statistics of one metric of two launch sets, against what can be counted out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from aorta.analysis.compare.effects import detectable, launches_needed
from aorta.analysis.compare.launch_set import Sample
from aorta.analysis.compare.verdict import Rules
from tests.analysis.by_json import numbers


def launches(*medians: float | None) -> list[Sample]:
    """Whose steps are all alike."""
    return [
        Sample(None, np.empty(0), "not seen") if median is None else Sample(median, np.array([median]), None)
        for median in medians
    ]


def found(name: str, left: Sequence[float | None], right: Sequence[float | None], **rules: Any) -> dict[str, Any]:
    return numbers(name, launches(*left), launches(*right), Rules(**rules))


def test_the_interval_is_of_all_that_the_test_does_not_reject() -> None:
    """Four against four reject an effect only where all launches lie beyond it: the largest and smallest pair."""
    told = found("overlap_ratio", [0.1, 0.2, 0.3, 0.4], [0.6, 0.7, 0.8, 0.9])
    assert told["effect"]["value"] == pytest.approx(0.5)
    assert (told["effect"]["low"], told["effect"]["high"]) == (pytest.approx(0.2), pytest.approx(0.8))
    assert told["interval_level"] == 0.95
    few = found("overlap_ratio", [0.1, 0.2, 0.3], [0.6, 0.7, 0.8])
    assert (few["effect"]["low"], few["interval_level"]) == (None, None), "three against three bound nothing"


def test_a_quotient_has_an_interval_of_its_own_and_one_in_milliseconds() -> None:
    told = found("window_ms", [100.0] * 4, [110.0, 110.0, 110.0, 110.0])
    assert told["effect"] == {
        "kind": "quotient",
        "value": pytest.approx(0.1),
        "low": pytest.approx(0.1),
        "high": pytest.approx(0.1),
    }
    assert told["difference_interval"] == {"low": pytest.approx(10), "high": pytest.approx(10)}


LEFT, RIGHT = (98.0, 100.0, 102.0, 100.0), (108.0, 110.0, 112.0, 110.0)
RELATIVE = (16 / 6) ** 0.5 / 0.9594 / 100
"""Both sides deviate by 8 square milliseconds; c4 for 6 degrees of freedom is 0.9594; of a reference of 100 ms."""


def test_the_noise_of_milliseconds_is_relative_to_the_reference() -> None:
    told = found("job_step_ms", LEFT, RIGHT)
    assert told["launch_sd"] == pytest.approx(RELATIVE, rel=1e-4)
    assert told["detectable"]["effect"] == pytest.approx(detectable(4, 4, RELATIVE, 0.02, 0.05), rel=1e-3)
    assert 0.02 < told["detectable"]["effect"] < 0.1
    assert told["launches_needed"] == 4


def test_in_microseconds_every_relative_number_is_the_same() -> None:
    told, scaled = (
        found("job_step_ms", LEFT, RIGHT),
        found("job_step_ms", [1e3 * ms for ms in LEFT], [1e3 * ms for ms in RIGHT]),
    )
    for name in ("effect", "launch_sd", "detectable"):
        assert scaled[name] == pytest.approx(told[name]), name
    assert scaled["launches_needed"] == told["launches_needed"]


def test_the_noise_of_a_ratio_is_in_the_ratio() -> None:
    told = found("overlap_ratio", [ms / 200 for ms in LEFT], [ms / 200 for ms in RIGHT])
    assert told["launch_sd"] == pytest.approx(RELATIVE * 100 / 200, rel=1e-4)


def test_launches_are_asked_for_that_find_the_margin_where_the_effect_is_below_it() -> None:
    noisy = (97.0, 99.0, 101.0, 103.0)
    told = found("job_step_ms", noisy, [ms + 0.1 for ms in noisy])
    assert told["effect"]["value"] == pytest.approx(0.001)
    assert told["launches_needed"] == launches_needed(0.02, told["launch_sd"], 0.05)
    assert told["launches_needed"] is not None


def test_launches_without_a_value_do_not_count() -> None:
    told = found("overlap_ratio", [0.5, None, 0.6, None], [0.7, 0.8])
    assert told["launches"] == {"reference": 2, "candidate": 2}
    nothing = found("overlap_ratio", [None, None], [0.7, 0.8])
    assert (nothing["p"], nothing["effect"]["value"], nothing["launches"]["reference"]) == (None, None, 0)


def test_a_secondary_metric_states_its_noise_and_no_power() -> None:
    told = found("idle_ms", LEFT, RIGHT)
    assert told["launch_sd"] == pytest.approx(RELATIVE, rel=1e-4)
    assert (told["detectable"]["effect"], told["launches_needed"]) == (None, None)
