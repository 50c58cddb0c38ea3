"""Decides on one metric by the rules chosen on the command line, and states the verdict of a comparison in sentences.

Two parts. *Decision*: `regression`, `improvement`, `equivalent`, `inconclusive` or `not tested`, with the reason, from
an effect with its interval, a p-value and the numbers of launches. *Sentences* that an engineer can act on:

    OVERLAP LOST: 0.510 -> 0.000 of communication hidden (-0.510, 95 % interval -0.552 to -0.468, p 0.029, 4 against 4
    launches). Step time: no difference resolved (263 -> 235 ms, -10.6 %, 95 % interval -52.0 % to +46.0 %, p 0.34).

REGRESSION and IMPROVEMENT alone are of step time; of anything else the headline names what was lost or gained, and what
the step time did.

Must not: decide by anything else (the simulations of docs/dev/verdicts.md call this very function), let a choice be
made after the results were seen (every rule is written into the summary), call a step better that got slower, or state
a number that is not in the summary, or a ratio without its denominator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from aorta.analysis.compare.rank_tests import LEAST_LAUNCHES, launches_for
from aorta.analysis.documents import known
from aorta.analysis.documents.comparison import ComparedMetric, Comparison, Effect
from aorta.analysis.formatting import TEXT, p_value
from aorta.analysis.metrics import JOB_STEP, STEP_METRIC_NAMES, Better, metric_named
from aorta.errors import InputError, meant

LEVEL: Final = 0.95
"""Coverage of the bootstrap interval of one side's median."""
ALL: Final = "all"
SEQUENCE: Final = ("overlap_ratio", "exposed_comm_ms", "compute_stall_ms")
"""Metrics that are tested one after the other, behind the primary one: each only where the one before it differed."""
GUARD: Final = JOB_STEP
"""Step time guards every verdict: where it got worse, a better ratio is no improvement."""


@dataclass(frozen=True)
class Rules:
    """Rules of a comparison. `margin` is in the unit of an effect: a difference of ratios, or a fraction of the
    reference's milliseconds.
    """

    primary: str = "overlap_ratio"
    alpha: float = 0.05
    margin: float = 0.02
    allow_unlike: tuple[str, ...] = ()
    judge_milliseconds: bool = False
    assume_no_drift: bool = False
    """Judge launch sets also where they did not take turns in time (`launch_order`)."""

    def __post_init__(self) -> None:
        """Validate the rules.

        Raises:
            InputError: a number is out of range, or the primary metric has no better direction.
        """
        if not 0 < self.alpha <= 0.5:
            raise InputError(f"--alpha {self.alpha:g}: above 0 and at most 0.5; 0.05 is the default")
        if not 0 < self.margin < 1:
            raise InputError(f"--margin {self.margin:g}: above 0 and below 1; 0.02 is the default")
        if self.primary not in STEP_METRIC_NAMES or metric_named(self.primary).better is None:
            judged = [name for name in STEP_METRIC_NAMES if metric_named(name).better is not None]
            hint = meant(self.primary, judged, after=" ")
            raise InputError(f"--primary {self.primary}: {hint}the metrics that can be judged are {', '.join(judged)}")

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


VerdictName: TypeAlias = Literal[
    "regression", "improvement", "equivalent", "inconclusive", "not tested", "not comparable in time"
]
NOT_TESTED: Final = "not tested"
"""Of a metric that these launches cannot decide by construction, or whose turn in the sequence did not come."""
NOT_COMPARABLE: Final = "not comparable in time"
"""The verdict of launches that did not take turns (`launch_order`): no metric gets one."""
NULL_REFERENCE: Final = "the reference is 0: there is no ratio, and a difference in ms has no margin"


@dataclass(frozen=True)
class Evidence:
    """What a verdict rests on. `p` is corrected for a secondary metric; `launches` are those with a value, per side."""

    better: Better
    effect: Effect
    p: float
    launches: tuple[int, int]
    alpha: float
    margin: float


def least_launches(alpha: float) -> int:
    """Return the launches per side from which the smallest two-sided Mann-Whitney p, 2 / C(2n, n), can reach alpha; at
    least four.
    """
    return launches_for(1, alpha, LEAST_LAUNCHES)


def decide(evidence: Evidence) -> tuple[VerdictName, str]:
    """Return the verdict by docs/dev/measuring.md, section 5. A regression or improvement needs significance *and* an
    effect beyond the margin; equivalence needs an interval within it; otherwise the reason says what is lacking.
    """
    lacking = too_few(evidence.launches, evidence.alpha)
    if lacking is not None:
        return NOT_TESTED, lacking
    effect, margin = evidence.effect, evidence.margin
    if effect.value is None:
        return "inconclusive", NULL_REFERENCE
    significant, beyond = evidence.p <= evidence.alpha, abs(effect.value) > margin
    if significant and beyond and not effect.holds_zero:
        good = (effect.value > 0) == (evidence.better == "higher")
        reason = f"p = {p_value(evidence.p)} and the effect is beyond the margin of {margin:g}"
        return "improvement" if good else "regression", reason
    if effect.low is not None and effect.high is not None and -margin <= effect.low <= effect.high <= margin:
        return "equivalent", f"the whole interval lies within the margin of {margin:g}"
    if not significant:
        return "inconclusive", f"p = {p_value(evidence.p)} is above {evidence.alpha:g}"
    if beyond:
        reason = f"p = {p_value(evidence.p)}, but the interval holds 0"
        return "inconclusive", f"{reason}: launches share values, or have none"
    return "inconclusive", (
        f"p = {p_value(evidence.p)}, but the effect is not beyond the margin of {margin:g}, nor its interval within"
    )


def needs(count: int) -> str:
    """Return what a metric that is not tested lacks."""
    return f"needs {count} launches per side"


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
        f"{needs(least)} for p <= {alpha:g} (exact Mann-Whitney): {launches[0]} against {launches[1]} launches, "
        f"{' and '.join(more)}"
    )


def slower(guard: ComparedMetric | None, alpha: float) -> str | None:
    """Return why step time (the guard's entry in the summary) rules out an improvement; None if it does not.

    It does where the step got longer by more than its margin, whatever the platforms, and where step time is unknown. A
    longer step that may be chance also withholds the verdict: nothing was shown to be better while it may well be
    worse.
    """
    if guard is None or guard.effect.value is None or guard.p is None:
        return "the step time is not known on both sides"
    value = guard.effect.value
    if value <= guard.margin:
        return None
    chance = "" if guard.p <= alpha else ", which may be chance"
    return f"the step takes {TEXT.percent(value)} longer (p = {p_value(guard.p)}{chance})"


_TITLES: Final = {
    GUARD: ("regression", "improvement"),
    "overlap_ratio": ("overlap lost", "overlap gained"),
    "exposed_comm_ms": ("more exposed communication", "less exposed communication"),
    "exposed_share": ("more exposed communication", "less exposed communication"),
    "compute_stall_ms": ("longer stalls", "shorter stalls"),
}
"""What a regression and an improvement of a metric are called; of others the metric is named."""
_SHARE_OF: Final = {
    "overlap_ratio": "of communication hidden",
    "exposed_share": "of the step exposed",
    "overlap_efficiency": "of what overlap could save",
    "compute_slowdown": "added / isolated computing",
}
UNLIKE: Final = "not comparable"


def title(comparison: Comparison) -> str:
    """Return the verdict in one to four words, in lower case."""
    if comparison.unlike:
        return UNLIKE
    if not comparison.tested:
        return NOT_TESTED
    word, name = comparison.verdict, comparison.deciding
    if word in ("regression", "improvement"):
        worse, better = _TITLES.get(name, (f"{name} worse", f"{name} better"))
        return worse if word == "regression" else better
    entry = comparison.metrics.get(name)
    return NOT_TESTED if entry is not None and entry.verdict == NOT_TESTED else str(word)


def is_comparable(comparison: Comparison) -> bool:
    """Return whether a difference between the sides is one of what they ran: they did the same work, and took turns."""
    return not comparison.unlike and comparison.verdict != NOT_COMPARABLE


def verdict_label(pair: ComparedMetric) -> str:
    """Return the verdict of a metric, with the launches that one which is not tested needs."""
    needed = known(pair.needs_launches)
    return str(pair.verdict) if needed is None else f"{pair.verdict} (needs {needed} launches)"


def headline(comparison: Comparison) -> str:
    """Return the short headline, and what could have been found."""
    primary = comparison.metrics.get(comparison.deciding)
    said = short_headline(comparison)
    tested = comparison.tested and is_comparable(comparison)
    if not tested or primary is None or primary.effect.value is None:
        return said
    return f"{said} {_could(primary, comparison)}"


def short_headline(comparison: Comparison) -> str:
    """Return verdict, effect with its interval, p, launches; why, where nothing was decided; and step time."""
    word = title(comparison).upper()
    if comparison.unlike:
        return f"{word}: {why_unlike(comparison)}."
    metrics = comparison.metrics
    tested = comparison.tested
    name, host = comparison.deciding, comparison.host_bound
    primary = metrics.get(name)
    lead = "" if host is None else f"the {host.side} is host-bound, and the other is not; "
    reason = f"{comparison.verdict_reason}."
    if comparison.verdict == NOT_COMPARABLE:
        return f"{word}: {lead}{reason}"  # a drift may be all of any difference
    if primary is None or primary.reference is None or primary.candidate is None:
        parts = [f"{word}: {lead}{reason}"]
    else:
        parts = [f"{word}: {lead}{_change(name, primary, counts=tested)}."]
        if comparison.verdict not in ("regression", "improvement"):
            parts.append(f"Why: {reason}")
    if name != GUARD:
        parts.append(_step_time(metrics.get(GUARD)))
    return " ".join(parts)


def why_unlike(comparison: Comparison) -> str:
    """Return which work the two runs did not share."""
    values = {each.key: each for each in comparison.manifest_differences}
    listed = [
        f"{key.removeprefix('config.')} is {values[key].reference} in the reference, {values[key].candidate} in "
        "the candidate"
        for key in comparison.unlike
    ]
    return f"{'; '.join(listed)}: the runs did not do the same work"


def _change(name: str, entry: ComparedMetric, *, counts: bool) -> str:
    """Return both values in words, with interval, p and launches in parentheses."""
    unit = metric_named(name).unit
    sides = entry.reference, entry.candidate
    if unit == "ratio":
        said = f"{TEXT.number(sides[0], unit)} -> {TEXT.number(sides[1], unit)} {_SHARE_OF.get(name, name)}"
    else:
        called = "step time" if name == GUARD else name
        said = f"{called} {TEXT.number(sides[0], unit)} -> {TEXT.number(sides[1], unit)} {unit}"
    evidence = _evidence(entry)
    if counts:
        evidence += ["{} against {} launches".format(*entry.counts)]
    return f"{said} ({', '.join(evidence)})" if evidence else said


def _evidence(entry: ComparedMetric) -> list[str]:
    """Return the effect with its interval, and p, as far as they are known."""
    effect = entry.effect
    if not entry.tested:
        return []
    parts = [] if effect.value is None else [TEXT.effect(effect.value, effect.kind)]
    if parts and effect.low is not None:
        level = TEXT.percent(entry.interval_level, 0)
        parts = [
            f"{parts[0]}, {level} interval {TEXT.effect(effect.low, effect.kind)} to "
            f"{TEXT.effect(effect.high, effect.kind)}"
        ]
    return parts + ([] if entry.p is None else [f"p {p_value(entry.p)}"])


def _step_time(guard: ComparedMetric | None) -> str:
    if guard is None or guard.reference is None or guard.candidate is None:
        why = "not in the record" if guard is None else guard.verdict_reason or guard.judgement_reason
        return f"Step time: unknown ({why})."
    numbers = f"{TEXT.number(guard.reference, 'ms')} -> {TEXT.quantity(guard.candidate, 'ms')}"
    if not guard.tested:
        change = "" if guard.quotient is None else f" ({TEXT.percent(guard.quotient - 1, signed=True)})"
        return f"Step time: {numbers}{change}."
    numbers = ", ".join([numbers, *_evidence(guard)])
    match guard.verdict:
        case "regression" | "improvement":
            longer = "longer" if guard.verdict == "regression" else "shorter"
            return f"Step time: {TEXT.percent(abs(guard.effect.value or 0))} {longer} ({numbers})."
        case "inconclusive":
            return f"Step time: no difference resolved ({numbers})."
        case None:
            return f"Step time: not judged ({numbers}): {guard.verdict_reason}."
        case word:
            return f"Step time: {word} ({numbers})."


def _could(primary: ComparedMetric, comparison: Comparison) -> str:
    found, effect = primary.detectable, primary.effect
    if found.effect is None:
        said = f"What could have been found is not known: {found.reason}."
    else:
        size = TEXT.effect(found.effect, effect.kind).lstrip("+")
        power = TEXT.percent(found.power, 0)
        said = f"The smallest effect these launches could have found, with {power} power: {size}."
    if comparison.verdict == "inconclusive" and primary.p is not None and primary.p > comparison.alpha:
        wanted = max(abs(effect.value or 0.0), primary.margin)
        needed = primary.launches_needed
        count = primary.launches_needed_reason if needed is None else f"{needed} launches per side"
        said += f" To find {TEXT.effect(wanted, effect.kind).lstrip('+')} with that power: {count}."
    return said
