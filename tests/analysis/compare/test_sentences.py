"""The headline names what was lost or gained and what it cost; REGRESSION and IMPROVEMENT alone are of step time."""

from __future__ import annotations

from typing import Any

import pytest

from aorta.analysis.metrics import metric_named
from tests.analysis.by_json import headline, short_headline, title


def entry(name: str, reference: float, candidate: float, verdict: str | None, **changes: Any) -> dict[str, Any]:
    kind = "difference" if metric_named(name).unit == "ratio" else "quotient"
    value = candidate - reference if kind == "difference" else candidate / reference - 1
    return {
        "effect": {"kind": kind, "value": value, "low": value - 0.05, "high": value + 0.05},
        "interval_level": 0.95,
        "reference": reference,
        "candidate": candidate,
        "p": 0.029,
        "verdict": verdict,
        "verdict_reason": "p = 0.34 is above 0.05",
        "launches": {"reference": 4, "candidate": 4},
        "detectable": {"power": 0.8, "effect": 0.03, "reason": None},
        "margin": 0.02,
        "launches_needed": 9,
    } | changes


STEP = entry("job_step_ms", 263.0, 235.0, "inconclusive", p=0.34)
STEP["effect"] |= {"low": -0.52, "high": 0.46}


def compared(name: str, primary: dict[str, Any], step: dict[str, Any] = STEP, **changes: Any) -> dict[str, Any]:
    metrics = {"job_step_ms": step, name: primary}
    word = primary["verdict"] if primary["verdict"] != "not tested" else "inconclusive"
    of = {"verdict": word, "verdict_reason": primary["verdict_reason"], "primary": name, "launches": {}, "alpha": 0.05}
    return of | {"metrics": metrics} | changes


def test_overlap_lost_with_a_step_time_that_nobody_resolved() -> None:
    said = short_headline(compared("overlap_ratio", entry("overlap_ratio", 0.51, 0.0, "regression")))
    assert said == (
        "OVERLAP LOST: 0.510 -> 0.000 of communication hidden (-0.510, 95 % interval -0.560 to -0.460, p 0.029, 4 "
        "against 4 launches). Step time: no difference resolved (263 -> 235 ms, -10.6 %, 95 % interval -52.0 % to "
        "+46.0 %, p 0.34)."
    )


@pytest.mark.parametrize(
    ("name", "verdict", "word"),
    [
        ("overlap_ratio", "improvement", "OVERLAP GAINED: 0.200 -> 0.300 of communication hidden"),
        ("exposed_share", "regression", "MORE EXPOSED COMMUNICATION: 0.200 -> 0.300 of the step exposed"),
        ("exposed_comm_ms", "improvement", "LESS EXPOSED COMMUNICATION: exposed_comm_ms 0.2 -> 0.3 ms"),
        ("compute_stall_ms", "regression", "LONGER STALLS: compute_stall_ms 0.2 -> 0.3 ms"),
        ("overlap_efficiency", "regression", "OVERLAP_EFFICIENCY WORSE: 0.200 -> 0.300 of what overlap could save"),
        ("idle_ms", "improvement", "IDLE_MS BETTER: idle_ms 0.2 -> 0.3 ms"),
        ("overlap_ratio", "equivalent", "EQUIVALENT: 0.200 -> 0.300 of communication hidden"),
        ("overlap_ratio", "inconclusive", "INCONCLUSIVE: 0.200 -> 0.300 of communication hidden"),
        ("overlap_ratio", "not tested", "NOT TESTED: 0.200 -> 0.300 of communication hidden"),
    ],
)
def test_what_is_not_step_time_is_named_and_step_time_is_said(name: str, verdict: str, word: str) -> None:
    said = short_headline(compared(name, entry(name, 0.2, 0.3, verdict)))
    assert said.startswith(f"{word} (")
    assert "Step time: " in said
    assert ("Why: p = 0.34 is above 0.05." in said) == (verdict in ("equivalent", "inconclusive", "not tested"))


@pytest.mark.parametrize(("verdict", "candidate"), [("regression", 121.0), ("improvement", 90.0)])
def test_alone_the_words_are_of_step_time(verdict: str, candidate: float) -> None:
    step = entry("job_step_ms", 100.0, candidate, verdict)
    said = short_headline(compared("job_step_ms", step, step))
    assert said.startswith(f"{verdict.upper()}: step time 100 -> {candidate:g} ms (")
    assert said.count("tep time") == 1


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        ("regression", "Step time: 12.0 % longer (100 -> 112 ms, +12.0 %, "),
        ("improvement", "Step time: 12.0 % shorter (100 -> 112 ms"),
        ("equivalent", "Step time: equivalent (100 -> 112 ms"),
        ("not tested", "Step time: not tested (100 -> 112 ms"),
        ("inconclusive", "Step time: no difference resolved (100 -> 112 ms"),
        (None, "Step time: not judged (100 -> 112 ms"),
    ],
)
def test_what_the_step_time_did(verdict: str | None, said: str) -> None:
    step = entry("job_step_ms", 100.0, 112.0, verdict)
    assert said in short_headline(compared("overlap_ratio", entry("overlap_ratio", 0.5, 0.1, "regression"), step))


def test_a_step_time_that_is_not_known_says_why() -> None:
    step = entry("job_step_ms", 100.0, 112.0, None) | {"reference": None, "verdict_reason": "reference: no clock"}
    said = short_headline(compared("overlap_ratio", entry("overlap_ratio", 0.5, 0.1, "regression"), step))
    assert said.endswith("Step time: unknown (reference: no clock).")


UNLIKE = {
    "unlike": ["config.workload.model_dim"],
    "manifest_differences": [{"key": "config.workload.model_dim", "reference": 64, "candidate": 128}],
}


def test_not_comparable_is_the_headline_without_a_delta() -> None:
    found = compared("overlap_ratio", entry("overlap_ratio", 0.5, 0.1, "regression"), **UNLIKE)
    assert headline(found) == (
        "NOT COMPARABLE: workload.model_dim is 64 in the reference, 128 in the candidate: the runs did not do the same "
        "work."
    )
    order = compared("overlap_ratio", entry("overlap_ratio", 0.5, 0.1, None))
    order |= {"verdict": "not comparable in time"}
    assert headline(order | {"verdict_reason": "the launches did not take turns"}) == (
        "NOT COMPARABLE IN TIME: the launches did not take turns."
    )


def test_of_a_host_bound_side_the_lead_comes_first() -> None:
    found = compared("overlap_ratio", entry("overlap_ratio", 0.5, 0.1, "regression"), host_bound={"side": "candidate"})
    assert short_headline(found).startswith(
        "OVERLAP LOST: the candidate is host-bound, and the other is not; 0.500 -> "
    )


def test_of_one_launch_a_side_nothing_is_tested() -> None:
    metrics = {
        "overlap_ratio": {"reference": 0.5, "candidate": 0.4},
        "job_step_ms": {"reference": 47.2, "candidate": 42.7, "quotient": 42.7 / 47.2},
    }
    found = {"verdict": "inconclusive", "verdict_reason": "one launch per side", "metrics": metrics, "unlike": []}
    assert title(found) == "not tested"
    assert headline(found) == (
        "NOT TESTED: 0.500 -> 0.400 of communication hidden. Why: one launch per side. Step time: 47.2 -> 42.7 ms "
        "(-9.5 %)."
    )
