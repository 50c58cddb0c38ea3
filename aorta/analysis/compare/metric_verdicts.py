"""Gives every metric its verdict, and the comparison the verdict of its primary metric.

Adds `p_corrected`, `verdict` and `verdict_reason` to the entries of `comparison.metrics`. Must not: let a secondary
metric decide the comparison, judge a metric in which neither direction is better, or launches that did not take turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aorta.analysis.compare.bootstrap import Effect
from aorta.analysis.compare.host_bound_sides import bounded_verdict
from aorta.analysis.compare.multiple_testing import holm
from aorta.analysis.compare.verdict import NOT_COMPARABLE, Evidence, Word, decide, slower, too_few
from aorta.analysis.compare.verdict_rules import GUARD, Rules


def judge(metrics: dict[str, Any], rules: Rules, withheld: str | None = None) -> tuple[Word, str]:
    """Add `p_corrected`, `verdict` and `verdict_reason` to every entry; return the verdict and reason of the
    comparison.

    Args:
        withheld: why no metric gets a verdict from launches in this order; None if they may.
    """
    if withheld is not None:
        for entry in metrics.values():
            entry["p"] = None  # the test takes launches for exchangeable
            entry["verdict"], entry["verdict_reason"] = None, f"{NOT_COMPARABLE}: {withheld}"
        return NOT_COMPARABLE, withheld
    _correct(metrics)
    _judge(metrics, rules)
    return _carried(metrics, rules)


def _is_judged(entry: Mapping[str, Any]) -> bool:
    """Whether a metric gets a verdict: one direction is better, both sides have values, and the platforms permit it."""
    return entry["better"] is not None and entry["judgement"] != "not judged" and entry["p"] is not None


def _correct(metrics: dict[str, Any]) -> None:
    """Apply Holm's correction to the secondary metrics that are judged.

    A metric with the same value in all launches tests nothing. That can be seen without knowing which launch belongs to
    which side, so leaving it out keeps the error rate.
    """
    tested = {
        name: entry["p"]
        for name, entry in metrics.items()
        if entry["role"] == "secondary" and _is_judged(entry) and not entry["constant"]
    }
    for name, p in holm(tested).items():
        metrics[name]["p_corrected"] = p


def _judge(metrics: dict[str, Any], rules: Rules) -> None:
    """Verdict and reason of every metric. Step time goes first: nothing counts as improved where the
    step takes longer.
    """
    for entry in metrics.values():
        entry["verdict"], entry["verdict_reason"] = _verdict(entry, rules)
    if rules.primary == GUARD:
        return
    withheld = slower(metrics.get(GUARD), rules.alpha)
    for name, entry in metrics.items():
        if entry["verdict"] == "improvement" and name != GUARD and withheld is not None:
            entry["verdict"] = "inconclusive"
            alone = f"better by itself ({entry['verdict_reason']})"
            entry["verdict_reason"] = f"{alone}, but {withheld}: not an improvement"


def _verdict(entry: Mapping[str, Any], rules: Rules) -> tuple[Word | None, str]:
    if "bounds" in entry:
        return bounded_verdict(entry, rules)
    if entry["better"] is None:
        return None, "neither direction is good in itself"
    if not _is_judged(entry):
        return None, entry["judgement_reason"]
    launches = entry["launches"]["reference"], entry["launches"]["candidate"]
    if entry["constant"]:
        lacking = too_few(launches, rules.alpha)
        return ("inconclusive", lacking) if lacking else ("equivalent", "the same value in every launch")
    values = entry["effect"]
    return decide(
        Evidence(
            entry["better"],
            Effect(values["kind"], values["value"], values["low"], values["high"]),
            entry["p"] if entry["p_corrected"] is None else entry["p_corrected"],
            launches,
            rules.alpha,
            entry["margin"],
        )
    )


def _carried(metrics: Mapping[str, Any], rules: Rules) -> tuple[Word, str]:
    """The verdict of the comparison, which is that of the primary metric."""
    entry = metrics.get(rules.primary)
    if entry is None:
        return "inconclusive", f"{rules.primary}, the primary metric, is in neither record"
    if entry["verdict"] is None:
        return "inconclusive", f"{rules.primary} is not judged: {entry['verdict_reason']}"
    return entry["verdict"], entry["verdict_reason"]
