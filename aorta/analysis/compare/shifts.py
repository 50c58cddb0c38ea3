"""The effect of the candidate against the reference, with the interval of all effects that the test does not reject.

Interval and test are one: where p is above the level, the interval holds 0 (`estimated` sees to that with ties, too),
and the other way round without ties. Must not: see steps, or give an interval that the test could not have bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from aorta.analysis.compare.mann_whitney import p_values
from aorta.analysis.tables import Floats

Kind: TypeAlias = Literal["difference", "quotient"]


@dataclass(frozen=True)
class Effect:
    """The effect of the candidate against the reference: a difference, or a quotient less 1. None where the reference
    is 0; without `low` and `high` where the launches bound nothing.
    """

    kind: Kind
    value: float | None
    low: float | None
    high: float | None

    @property
    def holds_zero(self) -> bool:
        """Whether no difference at all lies within the interval."""
        return self.low is not None and self.high is not None and self.low <= 0 <= self.high


def effect_of(kind: Kind, reference: float, candidate: float) -> float | None:
    """Candidate minus reference, or candidate / reference - 1; None when dividing by 0."""
    if kind == "difference":
        return candidate - reference
    return candidate / reference - 1 if reference else None


def estimated(kind: Kind, reference: Floats, candidate: Floats, p: float, level: float) -> Effect:
    """The effect between the medians over launches, with the interval of what the test at `level` does not reject.

    Where values are tied the test counts them half, and pairs alone do not tell what it does: the interval is widened
    to hold 0 where `p` is above the level, and always holds the effect itself.

    Args:
        reference, candidate: one value per launch, at least one each, no NaN.
        p: of the Mann-Whitney test of these values.
        level: an effect is rejected where p of what is left without it is at most this.
    """
    value = effect_of(kind, float(np.median(reference)), float(np.median(candidate)))
    ends = None if value is None else accepted(reference, candidate, level, kind)
    if value is None or ends is None:
        return Effect(kind, value, None, None)
    held = [*ends, value, *([0.0] if p > level else [])]
    return Effect(kind, value, min(held), max(held))


def accepted(reference: Floats, candidate: Floats, level: float, kind: Kind) -> tuple[float, float] | None:
    """The smallest and the largest effect that the test does not reject: of shifts of the candidate (`difference`), or
    of its factors less 1 (`quotient`; Hodges and Lehmann 1963, Bauer 1972). None where no effect of any size could be
    rejected, or a quotient has a value that is not above 0 below it.

    Args:
        level: an effect is rejected where p of what is left without it is at most this.
    """
    if kind == "quotient" and (reference.min() <= 0 or candidate.min() < 0):
        return None
    pairs = candidate[:, None] - reference if kind == "difference" else candidate[:, None] / reference - 1
    ordered = np.sort(pairs, axis=None)
    p = p_values(len(reference), len(candidate))
    # U is the number of pairs above the effect: this many of its smallest values, and as many of its largest, reject.
    rejected = int((p[: len(ordered) // 2 + 1] <= level).sum())
    return (float(ordered[rejected - 1]), float(ordered[-rejected])) if rejected else None
