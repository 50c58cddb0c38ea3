"""Gives every metric of two launch sets its statistics and a verdict, by rules that were chosen before the results were
seen, and the comparison the verdict of its step time or its primary metric.

Three questions are asked, each at alpha: whether the step time differs (the guard); which metrics of a sequence named
in advance differ, each tested only where the one before it did; and which of all others, by step-down minP. Must not:
decide by anything but `decide` (the simulations of docs/dev/verdicts.md call this very function), let a secondary
metric decide the comparison, announce a share that changed without time gained or lost, call a step better that got
slower, judge a metric in which neither direction is better, or launches that did not take turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import comb, trunc
from typing import Final, Literal, TypeAlias

import numpy as np

from aorta.analysis.compare.rank_tests import (
    CAP,
    POWER,
    detectable,
    estimated,
    launches_needed,
    least_launches,
    mann_whitney,
    pooled_sd,
    step_down,
)
from aorta.documents.comparison import ComparedMetric, Detectable, Effect, EffectKind, Interval
from aorta.documents.formatting import TEXT, p_value
from aorta.documents.metrics import JOB_STEP, STEP_METRIC_NAMES, Better, metric_named
from aorta.errors import InputError, meant
from aorta.read.frames import Floats

ALL: Final = "all"
SEQUENCE: Final = ("exposed_comm_ms", "overlap_ratio", "compute_stall_ms")
"""Metrics that are tested one after the other, behind the primary one: each only where the one before it differed. Time
that communication costs comes before the share that is hidden, which explains it."""
GUARD: Final = JOB_STEP
"""Step time guards every verdict: where it got worse, a better ratio is no improvement."""
_SHARES: Final = ("overlap_ratio", "exposed_share", "overlap_efficiency")
"""Shares that can move without a millisecond gained or lost."""


@dataclass(frozen=True)
class Rules:
    """Rules of a comparison. `margin` is in the unit of an effect: a difference of ratios, or a fraction of the
    reference's milliseconds.
    """

    primary: str = SEQUENCE[0]
    alpha: float = 0.05
    margin: float = 0.02
    allow_unlike: tuple[str, ...] = ()
    judge_milliseconds: bool = False
    assume_no_drift: bool = False
    """Judge launch sets also where they did not take turns in time (`launch_order`)."""

    def __post_init__(self) -> None:
        """Raise an InputError where a number is out of range, or the primary metric has no better direction."""
        if not 0 < self.alpha <= 0.5:
            raise InputError(f"--alpha {self.alpha:g}: above 0 and at most 0.5; 0.05 is the default")
        if not 0 < self.margin < 1:
            raise InputError(f"--margin {self.margin:g}: above 0 and below 1; 0.02 is the default")
        judged = [name for name in STEP_METRIC_NAMES if metric_named(name).better is not None]
        if self.primary not in judged:
            hint = meant(self.primary, judged)
            raise InputError(
                f"--primary {self.primary}: {hint or 'the metrics that can be judged are ' + ', '.join(judged)}"
            )

    @property
    def sequence(self) -> tuple[str, ...]:
        """The metrics tested one after the other, the primary one first."""
        return tuple(dict.fromkeys((self.primary, *SEQUENCE)))

    def role(self, name: str) -> str:
        """Return its role: `primary` decides the verdict, `guard` can withhold an improvement, `sequence` is tested
        where the metric before it differed, and `secondary` is corrected for multiple testing.
        """
        if name == self.primary:
            return "primary"
        return "guard" if name == GUARD else "sequence" if name in SEQUENCE else "secondary"

    def allows(self, key: str) -> bool:
        """Return whether runs may differ in a key: given in full, without its first component, or as a prefix of
        components.
        """
        names = {key, key.partition(".")[2]}
        return any(
            word == ALL or name == word or name.startswith(f"{word}.") for word in self.allow_unlike for name in names
        )


VerdictName: TypeAlias = Literal["regression", "improvement", "equivalent", "inconclusive", "not tested"]
DECIDED: Final = ("regression", "improvement")
SHIFTED: Final = "shifted"
"""Of a share that differs while neither exposed nor step time is decided in that direction."""
NOT_TESTED: Final = "not tested"
"""Of a metric that these launches cannot decide by construction, or whose turn in the sequence did not come."""
NOT_COMPARABLE: Final = "not comparable in time"
"""The verdict of launches that did not take turns (`launch_order`): no metric gets one."""


def decide(
    effect: Effect, p: float, *, better: Better, launches: tuple[int, int], alpha: float, margin: float
) -> tuple[VerdictName, str]:
    """Return the verdict by docs/dev/measuring.md, section 5. A regression or improvement needs significance *and* an
    effect beyond the margin; equivalence needs an interval within it; otherwise the reason says what is lacking.

    Args:
        p: corrected for a secondary metric.
        launches: with a value, per side.
    """
    lacking = too_few(launches, alpha)
    if lacking is not None:
        return NOT_TESTED, lacking
    if effect.value is None:
        return "inconclusive", "the reference is 0: there is no ratio, and a difference in ms has no margin"
    significant, beyond = p <= alpha, abs(effect.value) > margin
    if significant and beyond and not effect.holds_zero:
        good = (effect.value > 0) == (better == "higher")
        reason = f"p = {p_value(p)} and the effect is beyond the margin of {margin:g}"
        return "improvement" if good else "regression", reason
    if effect.low is not None and effect.high is not None and -margin <= effect.low <= effect.high <= margin:
        return "equivalent", f"the whole interval lies within the margin of {margin:g}"
    if not significant:
        return "inconclusive", f"p = {p_value(p)} is above {alpha:g}"
    if beyond:
        return "inconclusive", f"p = {p_value(p)}, but the interval holds 0: launches share values, or have none"
    return "inconclusive", (
        f"p = {p_value(p)}, but the effect is not beyond the margin of {margin:g}, nor its interval within"
    )


def too_few(launches: tuple[int, int], alpha: float) -> str | None:
    """Return how many more launches a verdict needs; None if there are enough."""
    least = least_launches(alpha)
    more = [
        f"{least - count} more of the {side}"
        for side, count in zip(("reference", "candidate"), launches, strict=True)
        if count < least
    ]
    if not more:
        return None
    return (
        f"needs {least} launches per side for p <= {alpha:g} (exact Mann-Whitney): {launches[0]} against {launches[1]} "
        f"launches, {' and '.join(more)}"
    )


def slower(guard: ComparedMetric | None, alpha: float) -> str | None:
    """Return why step time (the guard's entry in the summary) rules out an improvement; None if it does not.

    It does where the step got longer by more than its margin, be it by chance, and where step time is unknown: nothing
    was shown to be better while it may well be worse.
    """
    if guard is None or guard.effect.value is None or guard.p is None:
        return "the step time is not known on both sides"
    value = guard.effect.value
    if value <= guard.margin:
        return None
    chance = "" if guard.p <= alpha else ", which may be chance"
    return f"the step takes {TEXT.percent(value)} longer (p = {p_value(guard.p)}{chance})"


def add_statistics(pair: ComparedMetric, name: str, reference: Floats, candidate: Floats, rules: Rules) -> None:
    """Add the statistics of a metric that do not depend on any other metric: its test, effect and difference with their
    intervals, the noise between launches, the smallest effect that could have been found, and the launches needed to
    find the one observed.

    Args:
        reference, candidate: one value for each launch that has one.
    """
    counts = len(reference), len(candidate)
    pair.role, pair.margin = rules.role(name), rules.margin
    pair.launches = {"reference": counts[0], "candidate": counts[1]}
    pair.constant = len(np.unique(np.concatenate([reference, candidate]))) == 1
    pair.p = pair.p_corrected = pair.launch_sd = None
    if not all(counts):
        pair.effect = Effect(_kind(pair), None, None, None)
        pair.difference_interval, pair.interval_level = Interval(None, None), None
        _leave_power_out(pair, "not available on one side")
        return
    pair.p = mann_whitney(reference, candidate)
    add_intervals(pair, reference, candidate, rules.alpha)
    sd, value = pooled_sd(reference, candidate), pair.effect.value
    if sd is None:
        _leave_power_out(pair, "one launch per side does not show the noise between launches")
        return
    if value is None:
        _leave_power_out(pair, "the reference is 0: there is no ratio")
        return
    pair.launch_sd = sd if pair.effect.kind == "difference" else sd / abs(float(np.median(reference)))
    if pair.role == "secondary":
        tested_first = "to get it, name this one with --primary for the next launches"
        _leave_power_out(pair, f"not defined for metrics that are tested together; {tested_first}")
        return
    smallest = detectable(*counts, pair.launch_sd, rules.margin, rules.alpha)
    never = f"no effect of any size reaches p <= {rules.alpha:g} with so few launches"
    pair.detectable = Detectable(POWER, smallest, never if smallest is None else None)
    needed = launches_needed(max(abs(value), rules.margin), pair.launch_sd, rules.alpha)
    pair.launches_needed, pair.launches_needed_reason = needed, f"more than {CAP} per side" if needed is None else None


def _leave_power_out(pair: ComparedMetric, reason: str) -> None:
    pair.detectable = Detectable(POWER, None, reason)
    pair.launches_needed, pair.launches_needed_reason = None, reason


def add_intervals(pair: ComparedMetric, reference: Floats, candidate: Floats, level: float) -> None:
    """Add effect and difference of a metric with the intervals that belong to its test at `level`, and their own level.

    Args:
        pair: has `p` of the Mann-Whitney test of these values.
        reference, candidate: one value per launch, at least one each.
    """
    assert pair.p is not None
    pair.effect = estimated(_kind(pair), reference, candidate, pair.p, level)
    apart = estimated("difference", reference, candidate, pair.p, level)
    pair.difference_interval = Interval(apart.low, apart.high)
    pair.interval_level = None if apart.low is None else 1 - level


def _kind(pair: ComparedMetric) -> EffectKind:
    return "difference" if pair.unit == "ratio" else "quotient"


Metrics: TypeAlias = Mapping[str, ComparedMetric]
Values: TypeAlias = Mapping[str, tuple[Floats, Floats]]
"""Metric -> one value for each launch of the reference and of the candidate, NaN where it has none."""


def judge(metrics: Metrics, rules: Rules, values: Values, withheld: str | None = None) -> tuple[str, str]:
    """Add `p_corrected`, `verdict`, `verdict_reason` and `needs_launches` to every entry.

    Args:
        values: of every metric that has some, all of the same launches.
        withheld: why no metric gets a verdict from launches in this order; None if they may.

    Returns:
        The verdict of the comparison, and the reason for it: of the step time where it is decided, else of the primary
        metric; where this one is undecided and the hidden share alone differs, `shifted`.
    """
    for entry in metrics.values():
        if withheld is not None:
            entry.p = None  # the test takes launches for exchangeable
            entry.verdict, entry.verdict_reason = None, f"{NOT_COMPARABLE}: {withheld}"
        else:
            entry.verdict, entry.verdict_reason = _verdict(entry, rules)
        entry.needs_launches = least_launches(rules.alpha) if entry.verdict == NOT_TESTED else None
    if withheld is not None:
        return NOT_COMPARABLE, withheld
    _stop_sequence(metrics, rules)
    _judge_together(metrics, rules, values)
    _withhold(metrics, rules)
    step, primary, ratio = metrics.get(GUARD), metrics.get(rules.primary), metrics.get(_SHARES[0])
    if step is not None and step.verdict in DECIDED:
        return str(step.verdict), f"{GUARD}: {step.verdict_reason}"
    if primary is None:
        return "inconclusive", f"{rules.primary}, the primary metric, is in neither record"
    if primary.verdict not in DECIDED and ratio is not None and ratio.verdict == SHIFTED:
        return SHIFTED, str(ratio.verdict_reason)
    if primary.verdict is None:
        return "inconclusive", f"{rules.primary} is not judged: {primary.verdict_reason}"
    return "inconclusive" if primary.verdict == NOT_TESTED else primary.verdict, str(primary.verdict_reason)


def _verdict(entry: ComparedMetric, rules: Rules) -> tuple[VerdictName | None, str]:
    if entry.bounded:
        return _bounded_verdict(entry, rules)
    if entry.better is None:
        return None, "neither direction is good in itself"
    if entry.judgement == "not judged" or entry.p is None:
        return None, str(entry.judgement_reason)
    if entry.constant:
        lacking = too_few(entry.counts, rules.alpha)
        return (NOT_TESTED, lacking) if lacking else ("equivalent", "the same value in every launch")
    p = entry.p if entry.p_corrected is None else entry.p_corrected
    return decide(entry.effect, p, better=entry.better, launches=entry.counts, alpha=rules.alpha, margin=entry.margin)


def _bounded_verdict(entry: ComparedMetric, rules: Rules) -> tuple[VerdictName | None, str]:
    """Return the verdict of a metric of which a side has bounds alone: in the sequence, where the bounds lie apart in
    all launches, or all together within the margin; otherwise none.
    """
    bounds, unit, margin = entry.bounds, entry.unit, entry.margin
    sides = " against ".join(TEXT.bounds(ends, unit) for ends in (bounds.candidate, bounds.reference))
    why = f"host-bound, {sides} in the reference"
    if entry.role not in ("primary", "sequence") or entry.better is None:
        return None, f"{NOT_TESTED}: {why}"
    lacking = too_few(bounds.counts, rules.alpha)
    if lacking is not None:
        return NOT_TESTED, f"{why}; {lacking}"
    effect = bounds.difference if unit == "ratio" else bounds.change
    if effect.low is None or effect.high is None:
        return None, f"{NOT_TESTED}: {why}; a bound is 0"
    if -margin <= effect.low <= effect.high <= margin:
        return "equivalent", f"{why}: within the margin of {margin:g} in all launches"
    if not (effect.low > margin or effect.high < -margin):
        return None, f"{NOT_TESTED}: {why}: the bounds differ by less than the margin of {margin:g}"
    # Of the exact Mann-Whitney test where every value of a side is above the other's.
    p = 2 / comb(sum(bounds.counts), bounds.counts[0])
    nearest = effect.low if effect.low > 0 else effect.high
    places = 100 if abs(nearest) >= 1 else 1000
    least = TEXT.effect(trunc(nearest * places) / places, _kind(entry))  # a bound is not rounded away from 0
    reason = f"{why}: apart in all launches, by {least} or more (p = {p_value(p)})"
    return "improvement" if (effect.low > 0) == (entry.better == "higher") else "regression", reason


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
    # Not for launches whose results were seen: the choice would rest on them.
    beforehand = "to test it first, name it with --primary before the next launches are made"
    for name in rules.sequence:
        entry = metrics.get(name)
        if entry is None:
            continue
        tested = _is_tested(entry, rules.alpha) or (entry.bounded and entry.verdict is not None)
        if stopped is not None and tested:
            entry.verdict, entry.verdict_reason = NOT_TESTED, f"{stopped}; {beforehand}"
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
    for name, (p, level) in step_down(tested, rules.alpha).items():
        entry, sides = metrics[name], tested[name]
        entry.p_corrected = p if entry.p is None else max(entry.p, p)
        if level is not None:
            left, right = (side[~np.isnan(side)] for side in sides)
            add_intervals(entry, left, right, level)
            entry.verdict, entry.verdict_reason = _verdict(entry, rules)
            continue
        # These launches decide none, whatever they had measured.
        why = (
            f"with {len(sides[0])} against {len(sides[1])} launches no metric of {len(tested)} tested together (minP) "
            f"can reach p <= {rules.alpha:g}"
        )
        wanted = least_launches(rules.alpha, len(tested))
        entry.verdict = NOT_TESTED
        if wanted <= min(map(len, sides)):
            entry.verdict_reason = f"too many launches share a value: {why}"
        else:
            entry.verdict_reason, entry.needs_launches = f"needs {wanted} launches per side: {why}", wanted


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
