"""Gives every metric its verdict, and the comparison the verdict of its primary metric.

Three questions are asked, each at alpha: whether the step time differs (the guard); which metrics of a sequence named
in advance differ, each tested only where the one before it did; and which of all others, by step-down minP. Adds
`p_corrected`, `verdict`, `verdict_reason` and `needs_launches` to the entries of `comparison.metrics`. Must not: let a
secondary metric decide the comparison, judge a metric in which neither direction is better, or launches that did not
take turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import numpy as np

from aorta.analysis.compare.effect import intervals
from aorta.analysis.compare.host_bound_sides import bounded_verdict
from aorta.analysis.compare.min_p import launches_for, step_down
from aorta.analysis.compare.shifts import Effect
from aorta.analysis.compare.verdict import (
    NOT_COMPARABLE,
    NOT_TESTED,
    Evidence,
    Word,
    decide,
    least_launches,
    needs,
    slower,
    too_few,
)
from aorta.analysis.compare.verdict_rules import GUARD, Rules
from aorta.analysis.formatting import p_value
from aorta.analysis.tables import Floats

Values: TypeAlias = Mapping[str, tuple[Floats, Floats]]
"""Metric -> one value for each launch of the reference and of the candidate, NaN where it has none."""
_DECIDED: Final = ("regression", "improvement")
_BEFOREHAND: Final = "to test it first, name it with --primary before the next launches are made"
"""Not for launches whose results were seen: the choice would rest on them."""


def judge(metrics: dict[str, Any], rules: Rules, values: Values, withheld: str | None = None) -> tuple[Word, str]:
    """Add `p_corrected`, `verdict`, `verdict_reason` and `needs_launches` to every entry.

    Args:
        values: of every metric that has some, all of the same launches.
        withheld: why no metric gets a verdict from launches in this order; None if they may.

    Returns:
        The verdict of the comparison, and the reason for it.
    """
    if withheld is not None:
        for entry in metrics.values():
            entry["p"] = None  # the test takes launches for exchangeable
            entry["verdict"], entry["verdict_reason"] = None, f"{NOT_COMPARABLE}: {withheld}"
            entry["needs_launches"] = None
        return NOT_COMPARABLE, withheld
    for entry in metrics.values():
        entry["verdict"], entry["verdict_reason"] = _verdict(entry, rules)
        entry["needs_launches"] = least_launches(rules.alpha) if entry["verdict"] == NOT_TESTED else None
    _stop_sequence(metrics, rules)
    _judge_together(metrics, rules, values)
    _withhold(metrics, rules)
    return _carried(metrics, rules)


def _is_tested(entry: Mapping[str, Any], alpha: float) -> bool:
    """Whether a metric is put to a test: one direction is better, there are launches enough that differ in it, and the
    platforms permit it. A metric with one value in all launches tests nothing, which can be seen without knowing which
    launch belongs to which side; so leaving it out keeps the error rate.
    """
    judged = entry["better"] is not None and entry["judgement"] != "not judged" and entry["p"] is not None
    counts = entry["launches"]["reference"], entry["launches"]["candidate"]
    return judged and "bounds" not in entry and not entry["constant"] and too_few(counts, alpha) is None


def _stop_sequence(metrics: Mapping[str, Any], rules: Rules) -> None:
    """Take the verdicts of the metrics behind the first of the sequence that does not differ (fixed-sequence testing:
    Maurer, Hothorn and Lehmacher 1995; each at alpha, and still the chance of even one false finding is at most alpha).
    """
    stopped, in_turn = None, f"{' -> '.join(rules.sequence)} are tested in turn, each if the one before differs"
    for name in rules.sequence:
        entry = metrics.get(name)
        if entry is None:
            continue
        tested = _is_tested(entry, rules.alpha)
        if stopped is not None and tested:
            entry["verdict"], entry["verdict_reason"] = NOT_TESTED, f"{stopped}; {_BEFOREHAND}"
        elif tested and entry["p"] > rules.alpha:
            stopped = f"{in_turn}: p = {p_value(entry['p'])} of {name} is above {rules.alpha:g}"
        elif "bounds" in entry and entry["verdict"] not in _DECIDED:
            stopped = f"{in_turn}: {name} is {entry['verdict'] or NOT_TESTED} ({entry['verdict_reason']})"


def _judge_together(metrics: dict[str, Any], rules: Rules, values: Values) -> None:
    """Correct the secondary metrics that are tested, give them the intervals of that test, and judge them again."""
    tested = {
        name: values[name]
        for name, entry in metrics.items()
        if entry["role"] == "secondary" and _is_tested(entry, rules.alpha)
    }
    for name, found in step_down(tested, rules.alpha).items():
        entry = metrics[name]
        entry["p_corrected"] = max(entry["p"], found.p)
        if found.level is None:
            entry |= _undecidable(len(tested), tested[name], rules)
            continue
        left, right = (side[~np.isnan(side)] for side in tested[name])
        entry |= intervals(name, left, right, entry["p"], found.level)
        entry["verdict"], entry["verdict_reason"] = _verdict(entry, rules)


def _undecidable(count: int, sides: tuple[Floats, Floats], rules: Rules) -> dict[str, Any]:
    """The verdict of a secondary metric where these launches decide none, whatever they had measured."""
    sizes = f"{len(sides[0])} against {len(sides[1])} launches"
    wanted = launches_for(count, rules.alpha, least_launches(rules.alpha))
    why = f"with {sizes} no metric of {count} tested together (minP) can reach p <= {rules.alpha:g}"
    if wanted <= min(map(len, sides)):
        return {"verdict": NOT_TESTED, "verdict_reason": f"too many launches share a value: {why}"}
    return {"verdict": NOT_TESTED, "verdict_reason": f"{needs(wanted)}: {why}", "needs_launches": wanted}


def _withhold(metrics: Mapping[str, Any], rules: Rules) -> None:
    """Step time goes first: nothing counts as improved where the step takes longer."""
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
    if entry["judgement"] == "not judged" or entry["p"] is None:
        return None, entry["judgement_reason"]
    launches = entry["launches"]["reference"], entry["launches"]["candidate"]
    if entry["constant"]:
        lacking = too_few(launches, rules.alpha)
        return (NOT_TESTED, lacking) if lacking else ("equivalent", "the same value in every launch")
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
    if entry["verdict"] == NOT_TESTED:
        return "inconclusive", entry["verdict_reason"]
    return entry["verdict"], entry["verdict_reason"]
