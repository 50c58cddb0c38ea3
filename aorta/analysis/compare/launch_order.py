"""Decides whether the launches of two sides took turns in time, so that a drift of the machine falls on both alike.

    order = launch_order(reference, candidate)
    order.comparable        # True, False, or None where the times of some launch are not known

A rank test takes launches for exchangeable. They are not where the machine drifts and one side ran after the other:
drift of autocorrelation 0.9 then makes 24.5 % false regressions at 8 against 8 (W27; docs/dev/verdicts.md). Must not:
look at a measured value, only at when launches ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np

from aorta.analysis.compare.launch_set import LaunchSet
from aorta.analysis.documents.comparison import LaunchOrderFacts
from aorta.analysis.tables import Bools, Floats, Ints

AUTOCORRELATION: Final = 0.9
"""Of the drift that an order has to withstand, from one launch to the next (W27)."""
MOST: Final = 1.5
"""Largest `drift_inflation` of an order in which the sides count as interleaved. A B B A and pairs in random order lie
below it, and 3 in 4 of all orders drawn at random. On a machine that drifts so, orders below it have 0.6 to 1.0 % false
regressions on average and 5 % at worst, those above up to 25 % (docs/dev/verdicts.md)."""
_LETTERS: Final = ("R", "C")


@dataclass(frozen=True)
class LaunchOrder:
    """How the launches of both sides follow each other.

    Attributes:
        comparable: whether the sides took turns; None = unknown.
        sequence: R for a launch of the reference, C for one of the candidate, by time; those that ran at the same time
            in parentheses. None where unknown.
        inflation: `drift_inflation` of it; None where unknown.
        reason: why it is not comparable, or not known; None where it is.
    """

    comparable: bool | None
    sequence: str | None
    inflation: float | None
    reason: str | None

    def facts(self, *, assume_no_drift: bool) -> LaunchOrderFacts:
        """What `summary.json` holds of it."""
        return LaunchOrderFacts(
            self.comparable, self.sequence, self.inflation, MOST, self.reason, assume_no_drift=assume_no_drift
        )


def launch_order(reference: LaunchSet, candidate: LaunchSet) -> LaunchOrder:
    """The order of all launches of both sides, and whether it separates a difference of the sides from a drift."""
    launches = [*reference.launches, *candidate.launches]
    unknown = [str(launch.path) for launch in launches if launch.span_ns is None]
    if unknown:
        why = f"when {len(unknown)} of {len(launches)} launches ran is not known ({unknown[0]} for one)"
        return LaunchOrder(None, None, None, why)
    moments = concurrent([launch.span_ns for launch in launches if launch.span_ns is not None])
    of_candidate = np.arange(len(launches)) >= len(reference.launches)
    inflation, sequence = drift_inflation(moments, of_candidate), _sequence(moments, of_candidate)
    if inflation <= MOST:
        return LaunchOrder(True, sequence, inflation, None)
    why = (
        f"the launches of the two sides did not take turns ({sequence}), so that a drift of the machine counts as a "
        f"difference between them, {inflation:.1f} times as much as in a random order ({MOST:g} at most)"
    )
    return LaunchOrder(False, sequence, inflation, why)


def concurrent(spans: Sequence[tuple[int, int]]) -> Ints:
    """The place in time, from 0, of launches with these first and last instants. Launches share one where the later
    began before half of the first of them had passed: what happens to the machines then happens to all of them.
    """
    places = np.zeros(len(spans), np.int64)
    place, half_ns = -1, 0
    for index in sorted(range(len(spans)), key=lambda index: spans[index]):
        start_ns, end_ns = spans[index]
        if place < 0 or start_ns > half_ns:
            place, half_ns = place + 1, (start_ns + end_ns) // 2
        places[index] = place
    return places


def drift_inflation(places: Ints, of_candidate: Bools) -> float:
    """By how much a drift moves the sides apart in this order, relative to the average over all orders: the variance of
    the difference of the sides' means over what it is when sides are drawn at random (1). The larger of two drifts': a
    straight line, and a first-order autoregression with `AUTOCORRELATION` from one place to the next.

    Args:
        places: of each launch in time, as `concurrent` gives them.
        of_candidate: whether it is one of the candidate's; both sides have one at least.
    """
    wandering = AUTOCORRELATION ** np.abs(places[:, None] - places[None, :])
    straight = np.outer(places - places.mean(), places - places.mean())
    return max(inflation(wandering, of_candidate), inflation(straight, of_candidate))


def inflation(covariance: Floats, of_candidate: Bools) -> float:
    """`drift_inflation` by a drift with this covariance, shape (launches, launches).

    The average over random sides is (1/m + 1/n) times the expected sample variance of all values (Imbens and Rubin,
    *Causal Inference*, 2015, section 6.4, without an effect).
    """
    sizes = (~of_candidate).sum(), of_candidate.sum()
    weights = np.where(of_candidate, 1 / sizes[1], -1 / sizes[0])
    spread = (np.trace(covariance) - covariance.mean() * len(covariance)) / (len(covariance) - 1)
    if spread <= 1e-12:
        return 0.0  # all at one time: no drift lies between any two of them
    return float(weights @ covariance @ weights / (spread * (1 / sizes[0] + 1 / sizes[1])))


def _sequence(places: Ints, of_candidate: Bools) -> str:
    order = np.lexsort((of_candidate, places))
    parts = [
        "".join(_LETTERS[int(of_candidate[index])] for index in together)
        for _, together in groupby(order.tolist(), key=lambda index: int(places[index]))
    ]
    return "".join(part if len(part) == 1 else f"({part})" for part in parts)
