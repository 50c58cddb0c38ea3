"""Evidence on one metric -> `regression`, `improvement`, `equivalent` or `inconclusive`, and why: the decision itself.

Enters: an effect with its interval, a p, numbers of launches. Leaves: a word and a sentence. Must not: look at
anything else (the simulations of docs/comparing.md call this very function), or call a step better that got slower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import comb
from typing import Any, Final, Literal, TypeAlias

from aorta.analysis.formatting import TEXT, p_value
from aorta.analysis.launches.bootstrap import Effect
from aorta.analysis.launches.rules import LEAST_LAUNCHES
from aorta.analysis.metrics import Better

Word: TypeAlias = Literal["regression", "improvement", "equivalent", "inconclusive"]
NULL_REFERENCE: Final = "the reference is 0: there is no quotient, and a difference in ms has no margin"


@dataclass(frozen=True)
class Evidence:
    """`p` is the one to judge by: corrected for a secondary metric. `launches`: with a value, on either side."""

    better: Better
    effect: Effect
    p: float
    launches: tuple[int, int]
    alpha: float
    margin: float


def least_launches(alpha: float) -> int:
    """A side, for the smallest two-sided Mann-Whitney p, 2 / C(2n, n), to reach alpha; never fewer than four."""
    size = LEAST_LAUNCHES
    while 2 / comb(2 * size, size) > alpha:
        size += 1
    return size


def decide(evidence: Evidence) -> tuple[Word, str]:
    """The verdict by docs/measuring.md, section 5: significance *and* an effect beyond the margin; or an interval
    within it; or what is lacking.
    """
    lacking = too_few(evidence.launches, evidence.alpha)
    if lacking is not None:
        return "inconclusive", lacking
    effect, margin = evidence.effect, evidence.margin
    if effect.value is None:
        return "inconclusive", NULL_REFERENCE
    significant, beyond = evidence.p <= evidence.alpha, abs(effect.value) > margin
    if significant and beyond:
        good = (effect.value > 0) == (evidence.better == "higher")
        told = f"p = {p_value(evidence.p)} and the effect is beyond the margin of {margin:g}"
        return "improvement" if good else "regression", told
    if effect.low is not None and effect.high is not None and -margin <= effect.low <= effect.high <= margin:
        return "equivalent", f"the whole interval lies within the margin of {margin:g}"
    if significant:
        return "inconclusive", (
            f"p = {p_value(evidence.p)}, but the effect is not beyond the margin of {margin:g}, nor its interval within"
        )
    return (
        "inconclusive",
        f"p = {p_value(evidence.p)} is above {evidence.alpha:g}, and the interval reaches over the margin",
    )


def too_few(launches: tuple[int, int], alpha: float) -> str | None:
    """How many more launches a verdict needs; None if there are enough."""
    least = least_launches(alpha)
    more = [
        f"{least - count} more of the {side}"
        for side, count in zip(("reference", "candidate"), launches, strict=True)
        if count < least
    ]
    if not more:
        return None
    return (
        f"{launches[0]} against {launches[1]} launches: at least {least} a side are needed for p <= {alpha:g} "
        f"(exact Mann-Whitney); {' and '.join(more)}"
    )


def slower(guard: Mapping[str, Any] | None, alpha: float) -> str | None:
    """Why the guard (a metric's entry of the summary, step time) forbids an improvement; None if it does not.

    It does where the step is longer by more than its margin, on whatever platforms, and where it is unknown. A longer
    step that may be chance withholds too: nothing was shown to be better while it may well be worse.
    """
    if guard is None or guard["effect"]["value"] is None or guard["p"] is None:
        return "the step time is not known on both sides"
    value = guard["effect"]["value"]
    if value <= guard["margin"]:
        return None
    chance = "" if guard["p"] <= alpha else ", which may be chance"
    return f"the step takes {TEXT.percent(value)} longer (p = {p_value(guard['p'])}{chance})"
