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
from typing import Final, Literal, TypeAlias

import numpy as np

from aorta.analysis.account import EXPOSED
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
from aorta.documents import known
from aorta.documents.comparison import (
    AccountChange,
    ComparedMetric,
    Comparison,
    Effect,
    EffectKind,
    Interval,
    LaunchTest,
    Power,
)
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
            longer = [name for name in judged if name in self.primary]
            hint = meant(self.primary, longer or (GUARD, *SEQUENCE)) or meant(self.primary, judged)
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
NOT_SETTLED: Final = "not settled"
"""The verdict of launches whose steps change their level after the warm-up (`unsettled`): no metric gets one."""
WITHHELD: Final = (NOT_COMPARABLE, NOT_SETTLED)


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
    within = f"the {100 * margin:g}{'-point' if effect.kind == 'difference' else ' %'} margin"
    if significant and beyond and not effect.holds_zero:
        good = (effect.value > 0) == (better == "higher")
        before, after = launches
        per_side = f"{before} launches per side" if before == after else f"{before} against {after} launches"
        reason = f"p = {p_value(p)}, change beyond {within}; {per_side}"
        return "improvement" if good else "regression", reason
    if effect.low is not None and effect.high is not None and -margin <= effect.low <= effect.high <= margin:
        return "equivalent", f"the whole interval lies within {within}"
    if not significant:
        return "inconclusive", f"p = {p_value(p)} is above {alpha:g}"
    if beyond:
        return "inconclusive", f"p = {p_value(p)}, but the interval holds 0: some launches have equal values, or none"
    return "inconclusive", f"p = {p_value(p)}, but the change is not beyond {within}, nor its whole interval within it"


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
    if guard is None or guard.test.effect.value is None or guard.test.p is None:
        return "the step time is not known on both sides"
    value, p = guard.test.effect.value, guard.test.p
    if value <= guard.test.margin:
        return None
    chance = "" if p <= alpha else ", which may be chance"
    return f"the step takes {TEXT.percent(value)} longer (p = {p_value(p)}{chance})"


def launch_test(name: str, reference: Floats, candidate: Floats, rules: Rules) -> LaunchTest:
    """Return what the test of a metric says by itself, without a verdict: effect and difference with their intervals,
    the noise between launches, and what so many launches could have found.

    Args:
        reference, candidate: one value for each launch that has one.
    """
    kind: EffectKind = "difference" if metric_named(name).unit == "ratio" else "quotient"
    test = LaunchTest(
        role=rules.role(name),
        p=None,
        margin=rules.margin,
        effect=Effect(kind, None, None, None),
        difference_interval=Interval(None, None),
        interval_level=None,
        launch_sd=None,
        power=_no_power("not available on one side"),
    )
    if not (len(reference) and len(candidate)):
        return test
    test.p = mann_whitney(reference, candidate)
    add_intervals(test, reference, candidate, rules.alpha)
    sd, value = pooled_sd(reference, candidate), test.effect.value
    if sd is None:
        test.power = _no_power("one launch per side does not show the noise between launches")
        return test
    if value is None:
        test.power = _no_power("the reference is 0: there is no ratio")
        return test
    test.launch_sd = sd if kind == "difference" else sd / abs(float(np.median(reference)))
    if test.role == "secondary":
        tested_first = "to get it, name this one with --primary for the next launches"
        test.power = _no_power(f"not defined for metrics that are tested together; {tested_first}")
        return test
    smallest = detectable(len(reference), len(candidate), test.launch_sd, rules.margin, rules.alpha)
    needed = launches_needed(max(abs(value), rules.margin), test.launch_sd, rules.alpha)
    never = f"no effect of any size reaches p <= {rules.alpha:g} with so few launches"
    many = f"more than {CAP} per side"
    test.power = Power(POWER, smallest, never if smallest is None else None, needed, many if needed is None else None)
    return test


def _no_power(reason: str) -> Power:
    return Power(POWER, None, reason, None, reason)


def add_intervals(test: LaunchTest, reference: Floats, candidate: Floats, level: float) -> None:
    """Add effect and difference of a metric with the intervals that belong to its test at `level`, and their own level.

    Args:
        test: has `p` of the Mann-Whitney test of these values.
        reference, candidate: one value per launch, at least one each.
    """
    assert test.p is not None
    test.effect = estimated(test.effect.kind, reference, candidate, test.p, level)
    difference = estimated("difference", reference, candidate, test.p, level)
    test.difference_interval = Interval(difference.low, difference.high)
    test.interval_level = None if difference.low is None else 1 - level


Metrics: TypeAlias = Mapping[str, ComparedMetric]
Values: TypeAlias = Mapping[str, tuple[Floats, Floats]]
"""Metric -> one value for each launch of the reference and of the candidate, NaN where it has none."""


def judge(metrics: Metrics, rules: Rules, values: Values, withheld: tuple[str, str] | None = None) -> tuple[str, str]:
    """Add verdicts, corrected p-values and the launches that a verdict needs to the test of every metric.

    Args:
        values: of every metric that has some, all of the same launches.
        withheld: the verdict of `WITHHELD` that these launches have in place of any other, and why; None if they may.

    Returns:
        The verdict of the comparison, and the reason for it: of the step time where it is decided, else of the primary
        metric; where this one is undecided and the hidden share alone differs, `shifted`.
    """
    for entry in metrics.values():
        test = entry.test
        if withheld is not None:
            test.p = None  # the test takes launches for exchangeable
            test.verdict, test.verdict_reason = None, ": ".join(withheld)
        else:
            test.verdict, test.verdict_reason = _verdict(entry, rules)
        test.least_launches = least_launches(rules.alpha) if test.verdict == NOT_TESTED else None
    if withheld is not None:
        return withheld
    _stop_sequence(metrics, rules)
    _judge_together(metrics, rules, values)
    _withhold(metrics, rules)
    step, primary, ratio = metrics.get(GUARD), metrics.get(rules.primary), metrics.get(_SHARES[0])
    if step is not None and step.verdict in DECIDED:
        return str(step.verdict), f"{_label(GUARD)}: {step.test.verdict_reason}"
    label = _label(rules.primary)
    if primary is None:
        return "inconclusive", f"{label}, the primary metric, is in neither record"
    if primary.verdict not in DECIDED and ratio is not None and ratio.verdict == SHIFTED:
        return SHIFTED, str(ratio.test.verdict_reason)
    if primary.verdict is None:
        return "inconclusive", f"{label} is not judged: {primary.test.verdict_reason}"
    verdict = "inconclusive" if primary.verdict == NOT_TESTED else primary.verdict
    return verdict, f"{label}: {primary.test.verdict_reason}"


def is_comparable(comparison: Comparison) -> bool:
    """Return whether a difference between the sides is one of what they ran: they did the same work, took turns, and
    had settled.
    """
    return not comparison.unlike and comparison.verdict not in WITHHELD


def changes_of(comparison: Comparison, name: str) -> tuple[AccountChange, float] | None:
    """Return how the mean of step time (`GUARD`) or exposed time changed, and by which share the median did; None where
    the mean did not, by its interval and the margin, or the median is not tested.
    """
    account, entry = known(comparison.account), comparison.metrics.get(name)
    if account is None or account.reason is not None or entry is None or entry.verdict in (None, NOT_TESTED):
        return None
    if entry.quotient is None:  # of a median of 0, which any change is beyond
        return None
    means = {GUARD: account.step, SEQUENCE[0]: next((part for part in account.parts if part.name == EXPOSED), None)}
    mean = means.get(name)
    if mean is None or mean.low_ms is None or mean.high_ms is None or mean.low_ms <= 0 <= mean.high_ms:
        return None
    if abs(mean.change_ms) < comparison.margin * mean.reference_ms or not mean.reference_ms:
        return None
    return mean, entry.quotient - 1


def mean_alone(comparison: Comparison, name: str = GUARD) -> AccountChange | None:
    """Return how a mean changed whose median changed by less than the margin, or the other way. A few long steps do
    that, as those of a checkpoint, and a run takes so much longer.
    """
    mean, of_median = changes_of(comparison, name) or (None, 1.0)
    if mean is None or (of_median * mean.change_ms > 0 and abs(of_median) >= comparison.margin):
        return None
    return mean


def heed_means(comparison: Comparison) -> None:
    """Withdraw what medians say where a mean alone changed: that step or exposed time is the same, or changed the other
    way, and that anything improved while steps take longer.
    """
    longer, whys = mean_alone(comparison), list[str]()
    for name in (GUARD, SEQUENCE[0]):
        if (mean := mean_alone(comparison, name)) is not None:
            before, after = (TEXT.quantity(side, "ms") for side in (mean.reference_ms, mean.candidate_ms))
            what = "step" if name == GUARD else "exposed time"
            whys.append(
                f"the mean {what} is {before} in the reference, {after} in the candidate, which medians do not show"
            )
            test = comparison.metrics[name].test
            test.verdict, test.verdict_reason = "inconclusive", whys[-1]
    for entry in comparison.metrics.values():
        if longer is not None and longer.change_ms > 0 and entry.verdict == "improvement":
            entry.test.verdict, entry.test.verdict_reason = "inconclusive", whys[0]
    leads = [comparison.metrics[name] for name in (GUARD, comparison.deciding) if name in comparison.metrics]
    decided = next((entry for entry in leads if entry.verdict in DECIDED), None)
    if whys and decided is not None:
        comparison.verdict, comparison.verdict_reason = str(decided.verdict), decided.test.verdict_reason
    elif whys and comparison.verdict != SHIFTED:
        comparison.verdict, comparison.verdict_reason = "inconclusive", whys[0]


def _label(name: str) -> str:
    return metric_named(name).label


def _verdict(entry: ComparedMetric, rules: Rules) -> tuple[VerdictName | None, str]:
    test = entry.test
    if entry.better is None:
        return None, "neither direction is good in itself"
    if entry.judgement == "not judged" or test.p is None:
        return None, str(entry.judgement_reason)
    if entry.constant:
        lacking = too_few(entry.counts, rules.alpha)
        return (NOT_TESTED, lacking) if lacking else ("equivalent", "the same value in every launch")
    p = test.p if test.p_corrected is None else test.p_corrected
    return decide(test.effect, p, better=entry.better, launches=entry.counts, alpha=rules.alpha, margin=test.margin)


def _is_tested(entry: ComparedMetric, alpha: float) -> bool:
    """Return whether a metric is put to a test: one direction is better, there are launches enough that differ in it,
    and the platforms permit it. A metric with one value in all launches tests nothing, which can be seen without
    knowing which launch belongs to which side; so leaving it out keeps the error rate.
    """
    judged = entry.better is not None and entry.judgement != "not judged" and entry.test.p is not None
    return judged and not entry.constant and too_few(entry.counts, alpha) is None


def _stop_sequence(metrics: Metrics, rules: Rules) -> None:
    """Take the verdicts of the metrics behind the first of the sequence that does not differ (fixed-sequence testing:
    Maurer, Hothorn and Lehmacher 1995; each at alpha, and still the chance of even one false finding is at most alpha).
    """
    stopped, in_turn = None, f"{' -> '.join(rules.sequence)} are tested in turn, each if the one before differs"
    # Not for launches whose results were seen: the choice would rest on them.
    beforehand = "to test it first, name it with --primary before the next launches are made"
    for name in rules.sequence:
        entry = metrics.get(name)
        if entry is None or not _is_tested(entry, rules.alpha):
            continue
        test = entry.test
        if stopped is not None:
            test.verdict, test.verdict_reason = NOT_TESTED, f"{stopped}; {beforehand}"
        elif test.p is not None and test.p > rules.alpha:
            stopped = f"{in_turn}: p = {p_value(test.p)} of {name} is above {rules.alpha:g}"


def _judge_together(metrics: Metrics, rules: Rules, values: Values) -> None:
    """Correct the secondary metrics that are tested, give them the intervals of that test, and judge them again."""
    tested = {
        name: values[name]
        for name, entry in metrics.items()
        if entry.test.role == "secondary" and _is_tested(entry, rules.alpha)
    }
    for name, (p, level) in step_down(tested, rules.alpha).items():
        entry, test, sides = metrics[name], metrics[name].test, tested[name]
        test.p_corrected = p if test.p is None else max(test.p, p)
        if level is not None:
            left, right = (side[~np.isnan(side)] for side in sides)
            add_intervals(test, left, right, level)
            test.verdict, test.verdict_reason = _verdict(entry, rules)
            continue
        # These launches decide none, whatever they had measured.
        why = (
            f"with {len(sides[0])} against {len(sides[1])} launches no metric of {len(tested)} tested together (minP) "
            f"can reach p <= {rules.alpha:g}"
        )
        wanted = least_launches(rules.alpha, len(tested))
        test.verdict = NOT_TESTED
        if wanted <= min(map(len, sides)):
            test.verdict_reason = f"too many launches have equal values: {why}"
        else:
            test.verdict_reason, test.least_launches = f"needs {wanted} launches per side: {why}", wanted


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
        test = entry.test
        if test.verdict == "improvement" and name != GUARD and withheld is not None:
            test.verdict = "inconclusive"
            test.verdict_reason = f"better by itself ({test.verdict_reason}), but {withheld}: not an improvement"
        elif times and name in _SHARES and test.verdict in DECIDED and test.verdict not in decided:
            better, gained = ("better", "gained") if test.verdict == "improvement" else ("worse", "lost")
            test.verdict = SHIFTED
            test.verdict_reason = (
                f"the share is {better} ({test.verdict_reason}), but neither exposed nor step time is significantly "
                f"{better}: shifted, nothing {gained}"
            )
