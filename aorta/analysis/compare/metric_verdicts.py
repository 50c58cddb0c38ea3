"""Gives every metric of two launch sets its statistics and its verdict, and the comparison the verdict of its step time
or its primary metric.

Three questions are asked, each at alpha: whether the step time differs (the guard); which metrics of a sequence named
in advance differ, each tested only where the one before it did; and which of all others, by step-down minP. Must not:
let a secondary metric decide the comparison, announce a share that changed without time gained or lost, judge a metric
in which neither direction is better, or launches that did not take turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb
from typing import Final, TypeAlias, cast

import numpy as np

from aorta.analysis.compare.effects import (
    CAP,
    POWER,
    detectable,
    estimated,
    launches_needed,
    pooled_sd,
)
from aorta.analysis.compare.launch_set import Sample
from aorta.analysis.compare.rank_tests import launches_for, mann_whitney, step_down
from aorta.analysis.compare.verdict import (
    DECIDED,
    GUARD,
    NOT_COMPARABLE,
    NOT_TESTED,
    SEQUENCE,
    SHIFTED,
    Evidence,
    Rules,
    VerdictName,
    decide,
    least_launches,
    needs,
    slower,
    too_few,
)
from aorta.analysis.documents.comparison import ComparedMetric, Detectable, Effect, EffectKind, Interval
from aorta.analysis.formatting import TEXT, p_value
from aorta.analysis.frames import Floats
from aorta.analysis.metrics import metric_named

_BESIDE_OTHERS: Final = (
    "not defined for metrics that are tested together; to get it, name this one with --primary for the next launches"
)


def add_statistics(
    pair: ComparedMetric, name: str, reference: Sequence[Sample], candidate: Sequence[Sample], rules: Rules
) -> None:
    """Add the statistics of a metric that do not depend on any other metric. Launches whose median is null do not
    count.

    Args:
        reference, candidate: the metric in each launch of a side.
    """
    left, right = (
        np.array([sample.median for sample in side if sample.median is not None], np.float64)
        for side in (reference, candidate)
    )
    pair.role, pair.margin = rules.role(name), rules.margin
    pair.launches = {"reference": len(left), "candidate": len(right)}
    pair.constant = len(np.unique(np.concatenate([left, right]))) == 1
    pair.p = pair.p_corrected = None
    if not (len(left) and len(right)):
        pair.effect = Effect(_kind(name), None, None, None)
        pair.difference_interval, pair.interval_level = Interval(None, None), None
        _not_estimated(pair, "not available on one side")
        return
    pair.p = mann_whitney(left, right)
    add_intervals(pair, name, left, right, rules.alpha)
    _add_power(pair, name, left, right, rules)


def add_intervals(pair: ComparedMetric, name: str, reference: Floats, candidate: Floats, level: float) -> None:
    """Add effect and difference of a metric with the intervals that belong to its test at `level`, and their own level.

    Args:
        pair: has `p` of the Mann-Whitney test of these values.
        reference, candidate: one value per launch, at least one each.
    """
    assert pair.p is not None
    pair.effect = estimated(_kind(name), reference, candidate, pair.p, level)
    apart = estimated("difference", reference, candidate, pair.p, level)
    pair.difference_interval = Interval(apart.low, apart.high)
    pair.interval_level = None if apart.low is None else 1 - level


def _kind(name: str) -> EffectKind:
    return "difference" if metric_named(name).unit == "ratio" else "quotient"


def _add_power(pair: ComparedMetric, name: str, left: Floats, right: Floats, rules: Rules) -> None:
    """Add the smallest effect that could have been found, and the launches needed to find the one observed."""
    sd, value = pooled_sd(left, right), pair.effect.value
    scale = 1.0 if pair.effect.kind == "difference" else abs(float(np.median(left)))
    if sd is None:
        _not_estimated(pair, "one launch per side does not show the noise between launches")
        return
    if value is None:
        _not_estimated(pair, "the reference is 0: there is no ratio")
        return
    relative = sd / scale
    if rules.role(name) == "secondary":
        _not_estimated(pair, _BESIDE_OTHERS)
        pair.launch_sd = relative
        return
    smallest = detectable(len(left), len(right), relative, rules.margin, rules.alpha)
    never = f"no effect of any size reaches p <= {rules.alpha:g} with so few launches"
    needed = launches_needed(max(abs(value), rules.margin), relative, rules.alpha)
    pair.launch_sd = relative
    pair.detectable = Detectable(POWER, smallest, never if smallest is None else None)
    pair.launches_needed = needed
    pair.launches_needed_reason = None if needed is not None else f"more than {CAP} per side"


def _not_estimated(pair: ComparedMetric, reason: str) -> None:
    pair.launch_sd, pair.detectable = None, Detectable(POWER, None, reason)
    pair.launches_needed, pair.launches_needed_reason = None, reason


Metrics: TypeAlias = Mapping[str, ComparedMetric]
Values: TypeAlias = Mapping[str, tuple[Floats, Floats]]
"""Metric -> one value for each launch of the reference and of the candidate, NaN where it has none."""
_BEFOREHAND: Final = "to test it first, name it with --primary before the next launches are made"
"""Not for launches whose results were seen: the choice would rest on them."""


def judge(metrics: Metrics, rules: Rules, values: Values, withheld: str | None = None) -> tuple[VerdictName, str]:
    """Add `p_corrected`, `verdict`, `verdict_reason` and `needs_launches` to every entry.

    Args:
        values: of every metric that has some, all of the same launches.
        withheld: why no metric gets a verdict from launches in this order; None if they may.

    Returns:
        The verdict of the comparison, and the reason for it.
    """
    if withheld is not None:
        for entry in metrics.values():
            entry.p = None  # the test takes launches for exchangeable
            entry.verdict, entry.verdict_reason = None, f"{NOT_COMPARABLE}: {withheld}"
            entry.needs_launches = None
        return NOT_COMPARABLE, withheld
    for entry in metrics.values():
        entry.verdict, entry.verdict_reason = _verdict(entry, rules)
        entry.needs_launches = least_launches(rules.alpha) if entry.verdict == NOT_TESTED else None
    _stop_sequence(metrics, rules)
    _judge_together(metrics, rules, values)
    _withhold(metrics, rules)
    return _announced(metrics, rules)


def _is_tested(entry: ComparedMetric, alpha: float) -> bool:
    """Return whether a metric is put to a test: one direction is better, there are launches enough that differ in it,
    and the platforms permit it. A metric with one value in all launches tests nothing, which can be seen without
    knowing which launch belongs to which side; so leaving it out keeps the error rate.
    """
    judged = entry.better is not None and entry.judgement != "not judged" and entry.p is not None
    return judged and not entry.bounded and not entry.constant and too_few(entry.counts, alpha) is None


def _stop_sequence(metrics: Metrics, rules: Rules) -> None:
    """Take the verdicts of the metrics behind the first of the sequence that does not differ (fixed-sequence testing:
    Maurer, Hothorn and Lehmacher 1995; each at alpha, and still the chance of even one false finding is at most alpha).
    """
    stopped, in_turn = None, f"{' -> '.join(rules.sequence)} are tested in turn, each if the one before differs"
    for name in rules.sequence:
        entry = metrics.get(name)
        if entry is None:
            continue
        tested = _is_tested(entry, rules.alpha) or (entry.bounded and entry.verdict is not None)
        if stopped is not None and tested:
            entry.verdict, entry.verdict_reason = NOT_TESTED, f"{stopped}; {_BEFOREHAND}"
        elif tested and entry.p is not None and entry.p > rules.alpha:
            stopped = f"{in_turn}: p = {p_value(entry.p)} of {name} is above {rules.alpha:g}"
        elif entry.bounded and entry.verdict not in DECIDED:
            stopped = f"{in_turn}: {name} is {entry.verdict or NOT_TESTED} ({entry.verdict_reason})"


def _judge_together(metrics: Metrics, rules: Rules, values: Values) -> None:
    """Correct the secondary metrics that are tested, give them the intervals of that test, and judge them again."""
    tested = {
        name: values[name]
        for name, entry in metrics.items()
        if entry.role == "secondary" and _is_tested(entry, rules.alpha)
    }
    for name, found in step_down(tested, rules.alpha).items():
        entry = metrics[name]
        entry.p_corrected = found.p if entry.p is None else max(entry.p, found.p)
        if found.level is None:
            _add_undecidable(entry, len(tested), tested[name], rules)
            continue
        left, right = (side[~np.isnan(side)] for side in tested[name])
        add_intervals(entry, name, left, right, found.level)
        entry.verdict, entry.verdict_reason = _verdict(entry, rules)


def _add_undecidable(entry: ComparedMetric, count: int, sides: tuple[Floats, Floats], rules: Rules) -> None:
    """Add the verdict of a secondary metric where these launches decide none, whatever they had measured."""
    sizes = f"{len(sides[0])} against {len(sides[1])} launches"
    wanted = launches_for(count, rules.alpha, least_launches(rules.alpha))
    why = f"with {sizes} no metric of {count} tested together (minP) can reach p <= {rules.alpha:g}"
    entry.verdict = NOT_TESTED
    if wanted <= min(map(len, sides)):
        entry.verdict_reason = f"too many launches share a value: {why}"
    else:
        entry.verdict_reason, entry.needs_launches = f"{needs(wanted)}: {why}", wanted


_SHARES: Final = ("overlap_ratio", "exposed_share", "overlap_efficiency")
"""Shares that can move without a millisecond gained or lost."""


def _withhold(metrics: Metrics, rules: Rules) -> None:
    """Step time goes first: nothing counts as improved where the step takes longer. A share that differs alone, without
    exposed or step time decided in that direction, is shifted; across platforms, where only shares are judged, it
    stands.
    """
    step, exposed = metrics.get(GUARD), metrics.get(SEQUENCE[0])
    withheld = None if rules.primary == GUARD else slower(step, rules.alpha)
    times = [entry for entry in (step, exposed) if entry is not None and entry.verdict is not None]
    decided = {entry.verdict for entry in times}
    for name, entry in metrics.items():
        if entry.verdict == "improvement" and name != GUARD and withheld is not None:
            entry.verdict = "inconclusive"
            alone = f"better by itself ({entry.verdict_reason})"
            entry.verdict_reason = f"{alone}, but {withheld}: not an improvement"
        elif times and name in _SHARES and entry.verdict in DECIDED and entry.verdict not in decided:
            better, gained = ("better", "gained") if entry.verdict == "improvement" else ("worse", "lost")
            entry.verdict = SHIFTED
            entry.verdict_reason = (
                f"the share is {better} ({entry.verdict_reason}), but neither exposed nor step time is significantly "
                f"{better}: shifted, nothing {gained}"
            )


def _verdict(entry: ComparedMetric, rules: Rules) -> tuple[VerdictName | None, str]:
    if entry.bounded:
        return bounded_verdict(entry, rules)
    if entry.better is None:
        return None, "neither direction is good in itself"
    if entry.judgement == "not judged" or entry.p is None:
        return None, str(entry.judgement_reason)
    if entry.constant:
        lacking = too_few(entry.counts, rules.alpha)
        return (NOT_TESTED, lacking) if lacking else ("equivalent", "the same value in every launch")
    p = entry.p if entry.p_corrected is None else entry.p_corrected
    return decide(Evidence(entry.better, entry.effect, p, entry.counts, rules.alpha, entry.margin))


def _announced(metrics: Metrics, rules: Rules) -> tuple[VerdictName, str]:
    """Return the verdict of the comparison: that of the step time where it is decided, else that of the primary metric;
    where this one is undecided and the hidden share alone differs, `shifted`.
    """
    step, entry, ratio = metrics.get(GUARD), metrics.get(rules.primary), metrics.get(_SHARES[0])
    if step is not None and step.verdict in DECIDED:
        return cast(VerdictName, step.verdict), f"{GUARD}: {step.verdict_reason}"
    if entry is None:
        return "inconclusive", f"{rules.primary}, the primary metric, is in neither record"
    if entry.verdict not in DECIDED and ratio is not None and ratio.verdict == SHIFTED:
        return SHIFTED, str(ratio.verdict_reason)
    if entry.verdict is None:
        return "inconclusive", f"{rules.primary} is not judged: {entry.verdict_reason}"
    if entry.verdict == NOT_TESTED:
        return "inconclusive", str(entry.verdict_reason)
    return cast(VerdictName, entry.verdict), str(entry.verdict_reason)


def bounded_verdict(entry: ComparedMetric, rules: Rules) -> tuple[VerdictName | None, str]:
    """Return the verdict of a metric of which a side has bounds alone: in the sequence, where the bounds lie apart in
    all launches, or all together within the margin; otherwise none.
    """
    found, unit = entry.bounds, entry.unit
    effect = found.difference if unit == "ratio" else found.change
    sides = " against ".join(TEXT.bounds(ends, unit) for ends in (found.candidate, found.reference))
    why = f"host-bound, {sides} in the reference"
    if entry.role not in ("primary", "sequence") or entry.better is None:
        return None, f"{NOT_TESTED}: {why}"
    counts = found.counts
    lacking = too_few(counts, rules.alpha)
    if lacking is not None:
        return NOT_TESTED, f"{why}; {lacking}"
    low, high, margin = effect.low, effect.high, entry.margin
    if low is None or high is None:
        return None, f"{NOT_TESTED}: {why}; a bound is 0"
    if -margin <= low <= high <= margin:
        return "equivalent", f"{why}: within the margin of {margin:g} in all launches"
    if not (low > margin or high < -margin):
        return None, f"{NOT_TESTED}: {why}: the bounds differ by less than the margin of {margin:g}"
    good = (low > 0) == (entry.better == "higher")
    # Of the exact Mann-Whitney test where every value of a side is above the other's.
    p = 2 / comb(sum(counts), counts[0])
    least = TEXT.effect(low if low > 0 else high, "difference" if unit == "ratio" else "quotient")
    reason = f"{why}: apart in all launches, by {least} or more (p = {p_value(p)})"
    return "improvement" if good else "regression", reason
