"""Which word follows from which evidence, and the headline that says it."""

from __future__ import annotations

from typing import Any

import pytest

from aorta.analysis.compare.verdict import Evidence, Rules, decide, least_launches
from aorta.analysis.documents.comparison import Effect
from aorta.analysis.metrics import metric_named
from aorta.errors import InputError
from tests.analysis.by_json import headline, short_headline, slower, title


def seen(value: float | None, low: float | None, high: float | None, p: float = 0.008, **changes: Any) -> Evidence:
    words: dict[str, Any] = {"better": "higher", "launches": (5, 5), "alpha": 0.05, "margin": 0.02}
    return Evidence(effect=Effect("difference", value, low, high), p=p, **words | changes)


@pytest.mark.parametrize(
    ("evidence", "word"),
    [
        (seen(-0.1, -0.15, -0.05), "regression"),
        (seen(0.1, 0.05, 0.15), "improvement"),
        (seen(0.1, 0.05, 0.15, better="lower"), "regression"),
        (seen(-0.1, -0.15, -0.05, better="lower"), "improvement"),
        (seen(-0.1, -0.15, 0.05, p=0.06), "inconclusive"),
        (seen(-0.1, -0.15, -0.05, p=0.05), "regression"),
        (seen(-0.015, -0.03, -0.01), "inconclusive"),
        (seen(-0.01, -0.015, -0.005), "equivalent"),
        (seen(0.02, 0.01, 0.03), "inconclusive"),  # of the margin is not beyond it
        (seen(-0.02, -0.03, -0.01), "inconclusive"),
        (seen(0.01, 0.0, 0.02, p=0.9), "equivalent"),  # to the margin is within it
        (seen(-0.01, -0.02, 0.0, p=0.9), "equivalent"),
        (seen(0.0, -0.01, 0.01, p=0.9), "equivalent"),
        (seen(0.0, -0.01, 0.03, p=0.9), "inconclusive"),
        (seen(0.0, None, None, p=0.9), "inconclusive"),
        (seen(None, None, None), "inconclusive"),
        (seen(-0.1, -0.15, 0.0, p=0.05), "inconclusive"),  # tied launches: the interval holds 0
        (seen(-0.1, -0.15, -0.05, launches=(3, 9)), "not tested"),
        (seen(0.0, -0.01, 0.01, p=0.9, launches=(9, 3)), "not tested"),
    ],
)
def test_the_word(evidence: Evidence, word: str) -> None:
    assert decide(evidence)[0] == word


@pytest.mark.parametrize(
    ("evidence", "said"),
    [
        (
            seen(-0.1, -0.2, 0, launches=(3, 1)),
            "needs 4 launches per side .* 3 against 1 launches, 1 more of the reference and 3",
        ),
        (seen(-0.1, -0.2, 0.0, p=0.2), "p = 0.2 is above 0.05"),
        (seen(-0.1, -0.2, 0.0, p=0.02), "p = 0.02, but the interval holds 0: launches share values"),
        (seen(-0.015, -0.03, -0.01), "not beyond the margin of 0.02"),
        (seen(0.0, -0.01, 0.01), "interval lies within"),
        (seen(None, None, None), "the reference is 0"),
    ],
)
def test_the_reason_says_what_is_lacking(evidence: Evidence, said: str) -> None:
    import re

    assert re.search(said, decide(evidence)[1])


def test_a_smaller_alpha_needs_more_launches() -> None:
    """2 / C(8, 4) = 0.029, 2 / C(10, 5) = 0.0079, 2 / C(12, 6) = 0.0022."""
    assert [least_launches(alpha) for alpha in (0.5, 0.05, 0.02, 0.005)] == [4, 4, 5, 6]
    assert [least_launches(alpha) for alpha in (2 / 70, 2 / 252)] == [4, 5]  # a p of alpha is significant


def guard(value: float | None, p: float | None) -> dict[str, Any]:
    return {"effect": {"value": value}, "p": p, "margin": 0.02}


def test_a_slower_step_withholds_and_so_does_an_unknown_one() -> None:
    assert slower(guard(0.01, 0.001), 0.05) is None
    assert slower(guard(0.02, 0.001), 0.05) is None
    assert slower(guard(-0.5, 0.001), 0.05) is None
    assert slower(guard(0.5, 0.05), 0.05) == "the step takes 50 % longer (p = 0.05)"
    assert slower(guard(0.5, 0.06), 0.05) == "the step takes 50 % longer (p = 0.06, which may be chance)"
    for unknown in (None, guard(None, 0.01), guard(0.5, None)):
        assert slower(unknown, 0.05) == "the step time is not known on both sides"


@pytest.mark.parametrize(
    "words",
    [{"alpha": 0}, {"alpha": 0.7}, {"margin": 0}, {"margin": 1}, {"primary": "comm_ms"}, {"primary": "nonsense"}],
)
def test_rules_that_cannot_be_followed_are_refused(words: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"--{next(iter(words))}"):
        Rules(**words)


def test_an_alpha_of_a_half_is_the_largest() -> None:
    assert Rules(alpha=0.5).alpha == 0.5


def test_one_metric_decides_one_guards_a_few_come_in_turn_and_the_others_are_secondary() -> None:
    names = ("overlap_ratio", "job_step_ms", "exposed_comm_ms", "idle_ms")
    assert [Rules().role(name) for name in names] == ["primary", "guard", "sequence", "secondary"]
    assert [Rules(primary="job_step_ms").role(name) for name in names] == [
        "sequence",
        "primary",
        "sequence",
        "secondary",
    ]


def test_the_sequence_begins_with_the_primary_metric() -> None:
    assert Rules().sequence == ("overlap_ratio", "exposed_comm_ms", "compute_stall_ms")
    assert Rules(primary="compute_stall_ms").sequence == ("compute_stall_ms", "overlap_ratio", "exposed_comm_ms")
    assert Rules(primary="job_step_ms").sequence[:2] == ("job_step_ms", "overlap_ratio")


def test_keys_are_allowed_whole_without_their_root_by_their_beginning_or_all() -> None:
    rules = Rules(allow_unlike=("workload.model_dim", "config.training"))
    assert rules.allows("config.workload.model_dim")
    assert rules.allows("config.training.batch_size")
    assert not rules.allows("config.workload.model_dimension")
    assert not rules.allows("config.workload")
    assert Rules(allow_unlike=("all",)).allows("header.world_size")


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
        "OVERLAP LOST: 51 % -> 0 % of communication hidden (-51 points, 95 % interval -56 points to -46 points, "
        "p 0.029, 4 against 4 launches). Step time: no difference resolved (263 -> 235 ms, -10.6 %, 95 % interval "
        "-52 % to +46 %, p 0.34)."
    )


@pytest.mark.parametrize(
    ("name", "verdict", "word"),
    [
        ("overlap_ratio", "improvement", "OVERLAP GAINED: 20 % -> 30 % of communication hidden"),
        ("exposed_share", "regression", "MORE EXPOSED COMMUNICATION: 20 % -> 30 % of the step exposed"),
        ("exposed_comm_ms", "improvement", "LESS EXPOSED COMMUNICATION: exposed_comm_ms 0.2 -> 0.3 ms"),
        ("compute_stall_ms", "regression", "LONGER STALLS: compute_stall_ms 0.2 -> 0.3 ms"),
        ("overlap_efficiency", "regression", "OVERLAP_EFFICIENCY WORSE: 20 % -> 30 % of what overlap could save"),
        ("idle_ms", "improvement", "IDLE_MS BETTER: idle_ms 0.2 -> 0.3 ms"),
        ("overlap_ratio", "equivalent", "EQUIVALENT: 20 % -> 30 % of communication hidden"),
        ("overlap_ratio", "inconclusive", "INCONCLUSIVE: 20 % -> 30 % of communication hidden"),
        ("overlap_ratio", "not tested", "NOT TESTED: 20 % -> 30 % of communication hidden"),
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
        ("regression", "Step time: 12 % longer (100 -> 112 ms, +12 %, "),
        ("improvement", "Step time: 12 % shorter (100 -> 112 ms"),
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
    assert short_headline(found).startswith("OVERLAP LOST: the candidate is host-bound, and the other is not; 50 % -> ")


def test_of_one_launch_a_side_nothing_is_tested() -> None:
    metrics = {
        "overlap_ratio": {"reference": 0.5, "candidate": 0.4},
        "job_step_ms": {"reference": 47.2, "candidate": 42.7, "quotient": 42.7 / 47.2},
    }
    found = {"verdict": "inconclusive", "verdict_reason": "one launch per side", "metrics": metrics, "unlike": []}
    assert title(found) == "not tested"
    assert headline(found) == (
        "NOT TESTED: 50 % -> 40 % of communication hidden. Why: one launch per side. Step time: 47.2 -> 42.7 ms "
        "(-9.5 %)."
    )
