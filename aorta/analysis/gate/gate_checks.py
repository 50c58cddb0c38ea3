"""Judges each condition of the gate against a comparison: pass, fail or inconclusive, with the reason
(docs/compare.md).

Takes the conditions and `comparison` of `summary.json`, and returns a `GateResult`. Must not: fail a candidate for what
may be chance where there are launches to tell; or claim more of two single runs than that a threshold was crossed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, TypeAlias

from aorta.analysis.compare.verdict import NOT_COMPARABLE, NOT_TESTED, too_few
from aorta.analysis.formatting import p_value
from aorta.analysis.gate.gate_conditions import Condition
from aorta.analysis.metrics import metric_named
from aorta.errors import EXIT_OK, GateFailed, Inconclusive

Outcome: TypeAlias = Literal["pass", "fail", "inconclusive"]
OnInconclusive: TypeAlias = Literal["4", "pass", "fail"]
SINGLE: Final = "one launch per side: threshold only, no statistics"
_UNLIKE: Final = (
    "the two runs did not do the same work: they differ in {keys}. Compare runs that did, or allow it with "
    "--allow-unlike {first}"
)
_ZERO: Final = "the reference, or a resample of it, is 0, and there is no part of that"
_ALPHA: Final = 0.05
"""Significance level where a comparison of launches states none (its key `alpha`)."""


@dataclass(frozen=True)
class Judged:
    """One condition with its outcome. `value` is what was compared with the threshold, in its unit; `low` and `high`
    are the ends of its interval.
    """

    condition: str
    metric: str
    relative: bool
    threshold: float
    unit: str
    value: float | None
    low: float | None
    high: float | None
    p: float | None
    outcome: Outcome
    reason: str


@dataclass(frozen=True)
class GateResult:
    """The outcome of all conditions, and the exit code of the command."""

    conditions: tuple[Judged, ...]
    on_inconclusive: OnInconclusive
    basis: Literal["launches", "single runs"]

    @property
    def outcome(self) -> Outcome:
        """Fail outweighs inconclusive, which outweighs pass."""
        outcomes: set[Outcome] = {judged.outcome for judged in self.conditions}
        return "fail" if "fail" in outcomes else "inconclusive" if "inconclusive" in outcomes else "pass"

    @property
    def exit_code(self) -> int:
        """0 (pass), 3 (fail) or 4; for an inconclusive gate what `--inconclusive` asked for."""
        failed, undecided = GateFailed.exit_code, Inconclusive.exit_code
        chosen = {"4": undecided, "pass": EXIT_OK, "fail": failed}[self.on_inconclusive]
        return {"pass": EXIT_OK, "fail": failed, "inconclusive": chosen}[self.outcome]

    def count(self, outcome: Outcome) -> int:
        """Number of conditions with this outcome."""
        return Counter(judged.outcome for judged in self.conditions)[outcome]

    def as_json(self) -> dict[str, Any]:
        """The value of `summary["gate"]`."""
        return {
            "outcome": self.outcome,
            "exit_code": self.exit_code,
            "on_inconclusive": self.on_inconclusive,
            "basis": self.basis,
            "conditions": [asdict(judged) for judged in self.conditions],
        }


def evaluate(
    conditions: Sequence[Condition], comparison: Mapping[str, Any], on_inconclusive: OnInconclusive = "4"
) -> GateResult:
    """Judge every condition.

    Args:
        comparison: of `summary.json`. With the key `launches` it rests on launch sets, without it on two single runs.
        on_inconclusive: what an inconclusive gate ends with: exit code 4, 0 (`pass`) or 3 (`fail`).
    """
    of_launches = bool(comparison.get("launches"))
    judged = tuple(
        _of_launches(condition, comparison) if of_launches else _of_runs(condition, comparison)
        for condition in conditions
    )
    return GateResult(judged, on_inconclusive, "launches" if of_launches else "single runs")


@dataclass(frozen=True)
class _Measured:
    """The value of a metric that is compared with a threshold, or why there is none."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    why: str = ""


def _of_runs(condition: Condition, comparison: Mapping[str, Any]) -> Judged:
    entry = comparison["metrics"].get(condition.metric)
    found = _measured(condition, entry)
    bounded = entry is not None and "bounds" in entry
    if found.value is None and not bounded:
        return _judged(condition, found, None, "inconclusive", found.why)
    unlike = comparison.get("unlike")
    if unlike:
        return _judged(condition, found, None, "inconclusive", _UNLIKE.format(keys=", ".join(unlike), first=unlike[0]))
    if found.value is None:
        return _judged(condition, found, None, *_between(condition, found))
    outcome: Outcome = "fail" if condition.beyond(found.value) else "pass"
    return _judged(condition, found, None, outcome, _with_note(SINGLE, entry))


def _of_launches(condition: Condition, comparison: Mapping[str, Any]) -> Judged:
    """Judge a condition on launch sets. Fail: beyond the threshold, and not by chance. Pass: neither the value nor its
    interval is beyond it. Everything else is inconclusive with these launches, as is everything with fewer launches
    than a verdict needs, or that did not take turns in time.
    """
    entry = comparison["metrics"].get(condition.metric)
    found = _measured(condition, entry)
    bounded = entry is not None and "bounds" in entry
    if entry is None or (found.value is None and not bounded):
        return _judged(condition, found, None, "inconclusive", found.why)
    if comparison.get("verdict") == NOT_COMPARABLE:
        return _judged(condition, found, None, "inconclusive", f"{NOT_COMPARABLE}: {comparison['verdict_reason']}")
    alpha, p = comparison.get("alpha") or _ALPHA, _p(entry, comparison["metrics"])
    counts = entry["bounds"]["launches"] if bounded else entry["launches"]
    launches = counts["reference"], counts["candidate"]
    lacking = too_few(launches, alpha)
    if lacking is not None:
        return _judged(condition, found, p, "inconclusive", lacking)
    if found.value is None:
        return _judged(condition, found, p, *_between(condition, found))
    if found.low is None or found.high is None:
        return _judged(condition, found, p, "inconclusive", f"no interval: {_ZERO}")
    beyond = condition.beyond(found.value)
    if beyond and entry.get("verdict") == NOT_TESTED and not condition.beyond(0.0):
        return _judged(condition, found, p, "inconclusive", f"{NOT_TESTED}: {entry['verdict_reason']}")
    outcome, reason = _decide(condition, found, p, alpha) if beyond else _kept(condition, found)
    lacks_p = beyond and not condition.beyond(0.0) and p is not None and p > alpha
    needed = entry.get("launches_needed")
    if lacks_p and needed is not None and needed > min(launches):
        reason += f"; {needed} launches per side would be needed"
    return _judged(condition, found, p, outcome, _with_note(reason, entry))


def _p(entry: Mapping[str, Any], metrics: Mapping[str, Any]) -> float | None:
    """The p-value by which a condition is judged: as it is for the primary metric, the guard and a metric of the
    sequence, corrected for all others.

    The sequence and step-down minP leave some metrics out (neither direction is better, milliseconds across platforms,
    the same value in all launches). A condition on such a metric adds one test to those that were made, so its p gets
    Bonferroni's factor for all of them, which holds however the tests depend on each other.
    """
    p: float | None = entry["p"]
    in_turn = entry["role"] == "sequence" and entry["judgement"] != "not judged"
    if p is None or entry["role"] in ("primary", "guard") or in_turn:
        return p
    corrected: float | None = entry["p_corrected"]
    tested = sum(other["p_corrected"] is not None for other in metrics.values())
    return min(1.0, p * (tested + 1)) if corrected is None else corrected


def _decide(condition: Condition, found: _Measured, p: float | None, alpha: float) -> tuple[Outcome, str]:
    assert found.low is not None
    assert found.high is not None
    if condition.beyond(0.0):  # even a difference of 0 fails it, so significance against 0 says nothing here
        if condition.beyond(found.low) and condition.beyond(found.high):
            return "fail", "the whole interval is beyond the threshold"
        return "inconclusive", "beyond the threshold, but the interval reaches back across it"
    assert p is not None, "both sides have values, or there would be no difference"
    if p > alpha:
        return "inconclusive", f"beyond the threshold, but it may be chance: p {p_value(p, 3)} is above {alpha:g}"
    if found.low <= 0 <= found.high:
        return "inconclusive", "beyond the threshold, but the interval holds 0"
    return "fail", f"exceeds the threshold, statistically significant: p {p_value(p, 3)} is at most {alpha:g}"


def _between(condition: Condition, found: _Measured) -> tuple[Outcome, str]:
    """Judge a metric of which only bounds are known (a host-bound side), of launches in every pair of them: fail or
    pass where that is so wherever between them it is.
    """
    if found.low is None or found.high is None:
        return "inconclusive", f"host-bound, and no bounds: {_ZERO}"
    if condition.beyond(found.low) and condition.beyond(found.high):
        return "fail", "beyond the threshold wherever between its bounds the metric is (host-bound)"
    if condition.beyond(found.low) or condition.beyond(found.high):
        return "inconclusive", f"only bounds are known, and they reach across the threshold: {found.why}"
    return "pass", "not beyond the threshold wherever between its bounds the metric is (host-bound)"


def _kept(condition: Condition, found: _Measured) -> tuple[Outcome, str]:
    assert found.low is not None
    assert found.high is not None
    if condition.beyond(found.low) or condition.beyond(found.high):
        return "inconclusive", "not beyond the threshold, but the interval reaches beyond it"
    return "pass", "not beyond the threshold, and neither is its interval"


def _measured(condition: Condition, entry: Mapping[str, Any] | None) -> _Measured:
    """The difference in the terms of the condition. An absolute one is in the metric's unit, with the interval of the
    difference. A relative one is a fraction of the reference, with the interval of the quotient; for a ratio, with that
    of the difference divided by the reference's median.
    """
    if entry is None:
        return _Measured(why=f"neither side has {condition.metric}")
    reference, difference = entry["reference"], entry["difference"]
    if difference is None:
        why = entry.get("judgement_reason") or entry.get("quotient_reason") or "not available on one side"
        ends = entry.get("bounds", {}).get("change" if condition.relative else "difference", {})
        return _Measured(None, ends.get("low"), ends.get("high"), why)
    around = entry.get("difference_interval") or {}
    if not condition.relative:
        return _Measured(difference, around.get("low"), around.get("high"))
    if not reference:
        return _Measured(why="the reference is 0: there is no part of it")
    value, scale = difference / abs(reference), 1 / abs(reference)
    effect = entry.get("effect") or {}
    if effect.get("kind") == "quotient":
        around, scale = effect, 1.0
    low, high = (None if around.get(name) is None else around[name] * scale for name in ("low", "high"))
    return _Measured(value, low, high)


def _judged(condition: Condition, found: _Measured, p: float | None, outcome: Outcome, reason: str) -> Judged:
    unit = "ratio" if condition.relative else metric_named(condition.metric).unit
    return Judged(
        condition.text,
        condition.metric,
        condition.relative,
        condition.threshold,
        unit,
        found.value,
        found.low,
        found.high,
        p,
        outcome,
        reason,
    )


def _with_note(reason: str, entry: Mapping[str, Any] | None) -> str:
    """Add a note where the comparison itself does not judge this metric: here it is judged because a condition asks for
    it.
    """
    if entry and entry.get("judgement") == "not judged" and entry.get("judgement_reason"):
        return f"{reason} (judged because it was asked for: {entry['judgement_reason']})"
    return reason
