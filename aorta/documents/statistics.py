"""Describes many values of one metric as in a summary: none of the statistics is NaN.

    describe([1.0, 2.0, nan], ranks=[0, 0, 1], null_reasons={"no communication in this window": 1})

Must not: hide a null (each is counted), give the spread of a single rank as 0, or pass an approximate percentile off as
exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from aorta.documents.dataset import MEDIAN_STEPS, Statistics

Floats: TypeAlias = npt.NDArray[np.float64]

PERCENTILES: Final = (5, 50, 95)
_NAMES: Final = ("median", "p5", "p95", "mean", "min", "max")


def describe(
    values: npt.ArrayLike, ranks: npt.ArrayLike | None = None, null_reasons: Mapping[str, int] | None = None
) -> Statistics:
    """Return count, median, p5, p95, mean, min and max of the known values; with `ranks` also the median of each rank
    and their spread (largest minus smallest). Percentiles lie between order statistics (Hyndman and Fan, type 7).
    `reason` says why there is no median.
    """
    column, medians = np.asarray(values, np.float64), None
    known = ~np.isnan(column)
    if ranks is not None:
        order = np.argsort(ranks, kind="stable")
        names, starts = np.unique(np.asarray(ranks)[order], return_index=True)
        parts = np.split(column[order], starts[1:]) if len(names) else []
        medians = {int(rank): median_or_none(part) for rank, part in zip(names, parts, strict=True)}
    return entry(column[known], len(column) - int(known.sum()), medians, null_reasons)


def unknown(reason: str) -> Statistics:
    """Return a metric without values."""
    return describe([], None, {reason: 1})


def entry(
    values: Floats,
    nulls: int,
    medians: Mapping[int, float | None] | None = None,
    null_reasons: Mapping[str, int] | None = None,
) -> Statistics:
    """Return the statistics of one metric as a summary has them.

    Args:
        values: those that are known.
        medians: rank -> median of its known values, in order of rank; None where it has none.
    """
    reasons, reason = dict(null_reasons or {}), None
    numbers: dict[str, Any] = dict.fromkeys(_NAMES)
    if len(values):
        p5, median, p95 = np.percentile(values, PERCENTILES, method="linear")
        computed = (median, p5, p95, values.mean(), values.min(), values.max())
        numbers = dict(zip(_NAMES, map(float, computed), strict=True))
    else:
        reason = max(reasons, key=reasons.__getitem__) if reasons else "no values"
    statistics = Statistics(
        value=numbers["median"], count=len(values), nulls=nulls, **numbers, reason=reason, null_reasons=reasons
    )
    if medians is not None:
        known = [median for median in medians.values() if median is not None]
        enough = len(known) > 1
        statistics.per_rank_median = {str(rank): median for rank, median in medians.items()}
        statistics.rank_spread = max(known) - min(known) if enough else None
        statistics.rank_spread_reason = None if enough else f"a spread needs two ranks with values, not {len(known)}"
    return statistics


def median_or_none(values: Floats) -> float | None:
    """Return the median of the known values; None if there are none."""
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else None


def median_interval(values: Floats, steps: npt.NDArray[np.int64]) -> tuple[float, float] | None:
    """Return a 95 % interval for the median over all steps, of steps that were drawn at random, one of each block; None
    of fewer than `MEDIAN_STEPS`.

    By order statistics, without a distribution: of n drawn steps, Binomial(n, 1/2) lie below the median. Drawn of
    blocks, their number scatters less than that (Hoeffding 1956, "On the distribution of the number of successes in
    independent trials"): a drift does no harm. Ranks of a step are not independent: n counts steps, and the interval
    ends at quantiles of all values (Woodruff 1952).

    Args:
        values: one per rank-step, none NaN.
        steps: the global step of each value.
    """
    count = len(np.unique(steps))
    if count < MEDIAN_STEPS:
        return None
    k = _below(count)
    ordered = np.sort(values)
    low = (k - 1) * len(ordered) // count  # the k-th smallest step's first value
    return float(ordered[low]), float(ordered[len(ordered) - 1 - low])


def _below(count: int) -> int:
    """Return the largest k with P(Binomial(count, 1/2) < k) of at most 2.5 %, at least 1."""
    if count > 1000:  # the normal approximation, with its correction for continuity
        return int(count / 2 + 0.5 - 1.96 * math.sqrt(count) / 2)
    total, k = 0, 0
    while (total := total + math.comb(count, k)) <= 0.025 * 2**count:
        k += 1
    return max(k, 1)
