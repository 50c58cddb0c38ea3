"""Many values of one metric -> the numbers of a summary.

Enters: a column of floats (NaN = null), the rank of each, and why the nulls are null. Leaves: plain JSON values in
which nothing is NaN. Must not: hide a null (each is counted) or give a spread of one rank as 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pandas as pd

PERCENTILE_METHOD: Final = "linear interpolation between order statistics (Hyndman and Fan type 7, numpy 'linear')"


def describe(
    values: pd.Series[float], ranks: pd.Series[int] | None = None, null_reasons: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Count, median, p5, p95, mean, min and max of the values that are known; with `ranks` also the median of each
    rank and their spread (largest minus smallest). `reason` says why there is no median.
    """
    known = values.dropna()
    reasons = dict(null_reasons or {})
    entry: dict[str, Any] = {"count": len(known), "nulls": len(values) - len(known)}
    if known.empty:
        entry |= dict.fromkeys(("median", "p5", "p95", "mean", "min", "max"))
        entry["reason"] = max(reasons, key=reasons.__getitem__) if reasons else "no values"
    else:
        p5, median, p95 = np.percentile(known.to_numpy(), (5, 50, 95), method="linear")
        entry |= {"median": float(median), "p5": float(p5), "p95": float(p95), "mean": float(known.mean())}
        entry |= {"min": float(known.min()), "max": float(known.max()), "reason": None}
    entry["null_reasons"] = reasons
    if ranks is not None:
        entry |= _across_ranks(values, ranks)
    return entry


def _across_ranks(values: pd.Series[float], ranks: pd.Series[int]) -> dict[str, Any]:
    medians = values.groupby(ranks).median()
    by_rank = {str(rank): number_or_none(median) for rank, median in medians.items()}
    known = [median for median in by_rank.values() if median is not None]
    enough = len(known) > 1
    return {
        "per_rank_median": by_rank,
        "rank_spread": max(known) - min(known) if enough else None,
        "rank_spread_reason": None if enough else f"{len(known)} rank(s) with values; a spread needs two",
    }


def number_or_none(value: float) -> float | None:
    """A finite float, or None for NaN."""
    return None if math.isnan(value) else float(value)
