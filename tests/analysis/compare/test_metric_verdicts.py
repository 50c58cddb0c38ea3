"""Which metric gets which verdict, from entries written by hand: correction, the guard, and what is not judged."""

from __future__ import annotations

from typing import Any

from aorta.analysis.compare.metric_verdicts import judge
from aorta.analysis.compare.verdict_rules import GUARD, Rules


def entry(value: float, p: float | None = 0.008, role: str = "secondary", **changes: Any) -> dict[str, Any]:
    """A metric of which more is better, far from its margin, of five launches a side."""
    return {
        "role": role,
        "better": "higher",
        "judgement": "better",
        "judgement_reason": None,
        "constant": False,
        "launches": {"reference": 5, "candidate": 5},
        "effect": {"kind": "difference", "value": value, "low": value - 0.05, "high": value + 0.05},
        "margin": 0.02,
        "p": p,
        "p_corrected": None,
    } | changes


def guard(value: float, p: float = 0.008, role: str = "guard", **changes: Any) -> dict[str, Any]:
    return entry(value, p, role, better="lower", **changes)


def judged(rules: Rules | None = None, **metrics: dict[str, Any]) -> dict[str, str | None]:
    judge(metrics, rules or Rules())
    return {name: found["verdict"] for name, found in metrics.items()}


def test_a_slower_step_withholds_every_improvement_and_nothing_else() -> None:
    metrics = {
        "overlap_ratio": entry(0.0, 0.9, "primary"),
        "better": entry(0.2),
        "worse": entry(-0.2),
    }
    alone = judged(**{**metrics, GUARD: guard(-0.1)})
    assert alone == {
        "overlap_ratio": "inconclusive",
        "better": "improvement",
        "worse": "regression",
        GUARD: "improvement",
    }
    slower = judged(**{**metrics, GUARD: guard(0.1)})
    assert slower == alone | {"better": "inconclusive", GUARD: "regression"}
    assert "better by itself" in metrics["better"]["verdict_reason"]
    assert judged(**metrics)["better"] == "inconclusive", "a step time that nobody knows withholds too"


def test_a_step_time_that_was_itself_asked_about_withholds_nothing() -> None:
    found = judged(Rules(primary=GUARD), **{GUARD: guard(0.1, role="primary"), "better": entry(0.2)})
    assert found == {GUARD: "regression", "better": "improvement"}


def test_only_secondary_metrics_that_are_judged_and_vary_are_corrected() -> None:
    metrics = {
        "overlap_ratio": entry(0.2, 0.03, "primary"),
        "one": entry(0.2, 0.03),
        "two": entry(0.2, 0.008),
        "constant": entry(0.0, 1.0, constant=True),
        "neutral": entry(0.2, better=None),
        "elsewhere": entry(0.2, judgement="not judged", judgement_reason="only ratios are judged across platforms"),
        GUARD: guard(0.1, 0.03),
    }
    found = judged(**metrics)
    corrected = {name: metric["p_corrected"] for name, metric in metrics.items() if metric["p_corrected"] is not None}
    assert corrected == {"two": 0.016, "one": 0.03}
    assert [found[name] for name in ("constant", "neutral", "elsewhere")] == ["equivalent", None, None]
    three = metrics | {"three": entry(-0.2, 0.03)}
    assert judged(**three)["three"] == "inconclusive", "0.06 after correction"
    assert three["three"]["p_corrected"] == 0.06


def test_the_same_value_in_too_few_launches_says_nothing() -> None:
    few = entry(0.0, 1.0, constant=True, launches={"reference": 3, "candidate": 5})
    assert judged(metric=few) == {"metric": "inconclusive"}
    assert "1 more of the reference" in few["verdict_reason"]


def test_the_comparison_has_the_verdict_of_its_primary_metric() -> None:
    metrics = {"overlap_ratio": entry(-0.2, role="primary"), "better": entry(0.2), GUARD: guard(0.0, 0.9)}
    assert judge(metrics, Rules())[0] == "regression"
    assert judge({"better": entry(0.2)}, Rules()) == (
        "inconclusive",
        "overlap_ratio, the primary metric, is in neither record",
    )
