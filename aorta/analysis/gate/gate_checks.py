"""Parses the conditions of the gate, for example `exposed_comm_ms>5%` or `overlap_ratio<-0.02`, and judges each against
a comparison: pass, fail or inconclusive, with the reason (docs/compare.md).

Must not: fail a candidate for what may be chance where there are launches to tell; or claim more of two single runs
than that a threshold was crossed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from aorta.analysis.compare.verdict import NOT_COMPARABLE, NOT_TESTED, too_few
from aorta.analysis.documents import known
from aorta.analysis.documents.comparison import ComparedMetric, Comparison, Effect, GateEntry, Interval, JudgedCondition
from aorta.analysis.formatting import p_value
from aorta.analysis.frames import KIND_METRICS
from aorta.analysis.metrics import STEP_METRIC_NAMES, metric_named
from aorta.errors import EXIT_OK, GateFailed, Inconclusive, InputError, meant

Sign: TypeAlias = Literal["<", ">"]
ALIASES: Final = {"ratio_delta": "overlap_ratio"}
"""The first AORTA's name for the difference of the overlap ratios (SPEC D23)."""
_NUMBER: Final = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_FORM: Final = "expected METRIC<NUMBER or METRIC>NUMBER, with % behind the number for a part of the reference"


@dataclass(frozen=True)
class Condition:
    """One condition: the gate fails where candidate minus reference lies beyond `threshold`. The threshold is in the
    unit of the metric or, if `relative`, a fraction of the reference (0.05 for `5%`). `text` is the condition as it was
    given.
    """

    text: str
    metric: str
    sign: Sign
    threshold: float
    relative: bool

    def beyond(self, value: float) -> bool:
        """Return whether a difference of `value` fails the condition."""
        return value < self.threshold if self.sign == "<" else value > self.threshold


def parse_condition(text: str, known: Collection[str] = STEP_METRIC_NAMES) -> Condition:
    """Parse one condition.

    Args:
        known: metrics that may be named; `ratio_delta` is accepted as an alias of `overlap_ratio`.

    Raises:
        InputError: it is malformed; the message shows where, and what is allowed.
    """
    signs = [at for at, char in enumerate(text) if char in "<>"]
    if not signs:
        raise _wrong(text, len(text), f"no < or > in it; {_FORM}")
    if len(signs) > 1:
        raise _wrong(text, signs[1], f"a second comparison; {_FORM}. Give --fail-on once for each condition")
    at = signs[0]
    left, right = text[:at], text[at + 1 :]
    name, number = left.strip(), right.strip()
    if not name:
        raise _wrong(text, 0, f"no metric before {text[at]}; {_FORM}")
    metric = ALIASES.get(name, name)
    if metric not in known:
        raise _wrong(text, len(left) - len(left.lstrip()), _unknown(name, known))
    start = at + 1 + len(right) - len(right.lstrip())
    if number.startswith("="):
        raise _wrong(text, start, f"there is no {text[at]}=; {_FORM}")
    relative = number.endswith("%")
    digits = number[:-1].rstrip() if relative else number
    if not _NUMBER.fullmatch(digits):
        raise _wrong(text, start, f"{number!r} is no number; {_FORM}")
    value = float(digits) / (100 if relative else 1)
    if not math.isfinite(value):
        raise _wrong(text, start, f"{number} is too large a number")
    return Condition(text.strip(), metric, "<" if text[at] == "<" else ">", value, relative)


def _unknown(name: str, known: Collection[str]) -> str:
    if hint := meant(name, [*known, *ALIASES], "; "):
        return f"{name!r} is no metric{hint}"
    names = ", ".join([*(metric for metric in known if metric not in KIND_METRICS), *ALIASES])
    kinds = "KIND_ms, compute_KIND_ms, exposed_KIND_ms of a kind of collective"
    return f"{name!r} is no metric. Known metrics: {names}, and {kinds}"


def _wrong(text: str, at: int, what: str) -> InputError:
    """Return an error that shows the condition, a mark under the position, and what is wrong there."""
    shown = "".join(char if char.isprintable() else "?" for char in text)
    return InputError(f"condition {shown!r}: {what}\n    {shown}\n    {' ' * at}^")


Outcome: TypeAlias = Literal["pass", "fail", "inconclusive"]
SINGLE: Final = "one launch per side: threshold only, no statistics"
_UNLIKE: Final = (
    "the two runs did not do the same work: they differ in {keys}. Compare runs that did, or allow it with "
    "--allow-unlike {first}"
)
_ZERO: Final = "the reference is 0, or the interval would divide by 0"


def evaluate(conditions: Sequence[Condition], comparison: Comparison) -> GateEntry:
    """Judge every condition.

    Args:
        comparison: rests on launch sets where it has `launches`, otherwise on two single runs.

    Returns:
        What `summary.json` holds of it. Fail outweighs inconclusive, which outweighs pass.
    """
    judged = [_judge(condition, comparison) for condition in conditions]
    outcomes: set[Outcome] = {each.outcome for each in judged}
    outcome: Outcome = "fail" if "fail" in outcomes else "inconclusive" if "inconclusive" in outcomes else "pass"
    codes = {"pass": EXIT_OK, "fail": GateFailed.exit_code, "inconclusive": Inconclusive.exit_code}
    return GateEntry(outcome, codes[outcome], "launches" if comparison.tested else "single runs", judged)


@dataclass(frozen=True)
class _Measured:
    """The value of a metric that is compared with a threshold, or why there is none."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    why: str = ""


def _judge(condition: Condition, comparison: Comparison) -> JudgedCondition:
    entry = comparison.metrics.get(condition.metric)
    found, p = _measured(condition, entry), None
    outcome: Outcome = "inconclusive"
    if entry is None or (found.value is None and not entry.bounded):
        reason = found.why
    elif comparison.unlike:
        reason = _UNLIKE.format(keys=", ".join(comparison.unlike), first=comparison.unlike[0])
    elif comparison.verdict == NOT_COMPARABLE:
        reason = f"{NOT_COMPARABLE}: {comparison.verdict_reason}"
    else:
        p = _p(entry, comparison.metrics) if comparison.tested else None
        outcome, reason = _decide(condition, found, entry, p, comparison)
    unit = "ratio" if condition.relative else metric_named(condition.metric).unit
    return JudgedCondition(
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


def _p(entry: ComparedMetric, metrics: Mapping[str, ComparedMetric]) -> float | None:
    """Return the p-value by which a condition is judged: as it is for the primary metric, the guard and a metric of the
    sequence, corrected for all others.

    The sequence and step-down minP leave some metrics out (neither direction is better, milliseconds across platforms,
    the same value in all launches). A condition on such a metric adds one test to those that were made, so its p gets
    Bonferroni's factor for all of them, which holds however the tests depend on each other.
    """
    p = entry.p
    in_turn = entry.role == "sequence" and entry.judgement != "not judged"
    if p is None or entry.role in ("primary", "guard") or in_turn:
        return p
    corrected = entry.p_corrected
    tested = sum(other.p_corrected is not None for other in metrics.values())
    return min(1.0, p * (tested + 1)) if corrected is None else corrected


def _decide(
    condition: Condition, found: _Measured, entry: ComparedMetric, p: float | None, comparison: Comparison
) -> tuple[Outcome, str]:
    """Judge a condition. Of launch sets it fails beyond the threshold, and not by chance; it passes where neither the
    value nor its interval is beyond it; everything else is inconclusive with these launches. Of two single runs the
    threshold alone decides. Of a metric with bounds alone (a host-bound side), both ends of them have to agree.
    """
    value, low, high = found.value, found.low, found.high
    lacking = (
        too_few(entry.bounds.counts if entry.bounded else entry.counts, comparison.alpha) if comparison.tested else None
    )
    if lacking is not None:
        return "inconclusive", lacking
    # The comparison itself may not judge this metric: here it is judged because a condition asks for it.
    asked = entry.judgement == "not judged" and entry.judgement_reason
    note = f" (judged because it was asked for: {entry.judgement_reason})" if asked else ""
    if value is not None and not comparison.tested:
        return ("fail" if condition.beyond(value) else "pass"), f"{SINGLE}{note}"
    if low is None or high is None:
        return "inconclusive", f"{'no interval' if value is not None else 'host-bound, and no bounds'}: {_ZERO}"
    ends = {condition.beyond(low), condition.beyond(high)}
    if value is None:
        if len(ends) == 2:
            return "inconclusive", f"only bounds are known, and they reach across the threshold: {found.why}"
        outcome: Outcome = "fail" if True in ends else "pass"
        return (
            outcome,
            f"{'' if True in ends else 'not '}beyond the threshold everywhere between its bounds (host-bound)",
        )
    if not condition.beyond(value):
        if True in ends:
            return "inconclusive", f"not beyond the threshold, but the interval reaches beyond it{note}"
        return "pass", f"not beyond the threshold, and neither is its interval{note}"
    if condition.beyond(0.0):  # even a difference of 0 fails it, so significance against 0 says nothing here
        if False not in ends:
            return "fail", f"the whole interval is beyond the threshold{note}"
        return "inconclusive", f"beyond the threshold, but the interval reaches back across it{note}"
    if entry.verdict == NOT_TESTED:
        return "inconclusive", f"{NOT_TESTED}: {entry.verdict_reason}"
    assert p is not None, "both sides have values, or there would be no difference"
    alpha = comparison.alpha
    if p > alpha:
        needed = known(entry.launches_needed)
        more = (
            f"; {needed} launches per side would be needed" if needed is not None and needed > min(entry.counts) else ""
        )
        return (
            "inconclusive",
            f"beyond the threshold, but p {p_value(p, 3)} is above {alpha:g}: may be chance{more}{note}",
        )
    if low <= 0 <= high:
        return "inconclusive", f"beyond the threshold, but the interval holds 0{note}"
    return "fail", f"beyond the threshold, and significant: p {p_value(p, 3)} is at most {alpha:g}{note}"


def _measured(condition: Condition, entry: ComparedMetric | None) -> _Measured:
    """Return the difference in the terms of the condition. An absolute one is in the metric's unit, with the interval
    of the difference. A relative one is a fraction of the reference, with the interval of the quotient; for a ratio,
    with that of the difference divided by the reference's median.
    """
    if entry is None:
        return _Measured(why=f"neither side has {condition.metric}")
    reference, difference = entry.reference, entry.difference
    if difference is None:
        why = entry.judgement_reason or entry.quotient_reason or "not available on one side"
        if not entry.bounded:
            return _Measured(why=why)
        ends = entry.bounds.change if condition.relative else entry.bounds.difference
        return _Measured(None, ends.low, ends.high, why)
    around: Interval | Effect = entry.difference_interval or Interval(None, None)
    if not condition.relative:
        return _Measured(difference, around.low, around.high)
    if not reference:
        return _Measured(why="the reference is 0: no percentage of it")
    value, scale = difference / abs(reference), 1 / abs(reference)
    if entry.effect and entry.effect.kind == "quotient":
        around, scale = entry.effect, 1.0
    low, high = (None if end is None else end * scale for end in (around.low, around.high))
    return _Measured(value, low, high)
