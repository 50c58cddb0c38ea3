"""The headline reads as a sentence, whichever metric is the primary one."""

from __future__ import annotations

from typing import Any

import pytest

from aorta.analysis.compare.verdict_sentences import _step_time, headline


def said(name: str, value: float) -> str:
    effect = {"kind": "difference", "value": value, "low": None, "high": None}
    entry: dict[str, Any] = {
        "effect": effect,
        "reference": 0.2,
        "candidate": 0.2 + value,
        "p": 0.029,
        "launches": {"reference": 4, "candidate": 4},
        "detectable": {"power": 0.8, "effect": 0.03, "reason": None},
    }
    comparison = {"verdict": "regression", "verdict_reason": "", "primary": name, "metrics": {name: entry}}
    return headline(comparison).partition(" (")[0].removeprefix("REGRESSION: the candidate ")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("overlap_ratio", -0.03, "hides 3.0 points less of its communication"),
        ("exposed_share", 0.03, "exposes communication for 3.0 points more of its step"),
        ("overlap_efficiency", -0.03, "saves 3.0 points less of what overlap could save"),
        ("compute_slowdown", 0.03, "adds 3.0 points more to its computing time by overlap"),
        ("compute_slowdown", 0.0, "adds as much to its computing time by overlap"),
    ],
)
def test_the_effect_in_words(name: str, value: float, text: str) -> None:
    assert said(name, value) == text


def test_a_step_time_that_is_not_decided_is_not_said_as_a_fact() -> None:
    effect = {"kind": "quotient", "value": 0.12, "low": -0.04, "high": 0.26}
    step = {"effect": effect, "reference": 100.0, "candidate": 112.0, "p": 0.886, "verdict": "inconclusive"}
    said = _step_time(step, in_time=True)
    assert said.startswith(
        "Step time: no difference was shown (100 -> 112 ms, 95 % interval -4.0 % to +26.0 %; p = 0.89)"
    )
    assert "longer" not in said
    assert _step_time(step | {"verdict": "regression"}, in_time=True).startswith("Step time: 12.0 % longer (")
