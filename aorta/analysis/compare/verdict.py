"""Decides on one metric by the rules chosen on the command line: `regression`, `improvement`, `equivalent`,
`inconclusive` or `not tested`, and why, from an effect with its interval, a p-value and the numbers of launches.

Must not: decide by anything else (the simulations of docs/dev/verdicts.md call this very function), let a choice be
made after the results were seen (every rule is written into the summary), or call a step better that got slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from aorta.analysis.compare.rank_tests import LEAST_LAUNCHES, launches_for
from aorta.analysis.documents.comparison import ComparedMetric, Effect
from aorta.analysis.formatting import TEXT, p_value
from aorta.analysis.metrics import JOB_STEP, STEP_METRIC_NAMES, Better, metric_named
from aorta.errors import InputError, meant

ALL: Final = "all"
SEQUENCE: Final = ("exposed_comm_ms", "overlap_ratio", "compute_stall_ms")
"""Metrics that are tested one after the other, behind the primary one: each only where the one before it differed. Time
that communication costs comes before the share that is hidden, which explains it."""
GUARD: Final = JOB_STEP
"""Step time guards every verdict: where it got worse, a better ratio is no improvement."""


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
    "regression", "improvement", "equivalent", "inconclusive", "shifted", "not tested", "not comparable in time"
]
DECIDED: Final = ("regression", "improvement")
SHIFTED: Final = "shifted"
"""Of a share that differs while neither exposed nor step time is decided in that direction."""
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
