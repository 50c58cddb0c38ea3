"""Many values of one metric -> the numbers of a summary.

Enters: a column of floats (NaN = null), the rank of each, and why the nulls are null; in memory, or block by block from
a disk. Leaves: plain JSON values in which nothing is NaN. Must not: hide a null (each is counted), give a spread of
one rank as 0, or take an approximate percentile for an exact one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from aorta.analysis.readers.scan import Floats

PERCENTILE_METHOD: Final = "linear interpolation between order statistics (Hyndman and Fan type 7, numpy 'linear')"
PERCENTILES: Final = (5, 50, 95)
_NAMES: Final = ("median", "p5", "p95", "mean", "min", "max")
_GATHER: Final = 1 << 17
"""Values sorted in memory at once when percentiles are taken from blocks."""
_BINS: Final = 1 << 14
Blocks: TypeAlias = Callable[[], Iterable[Floats]]
"""Gives the same blocks each time it is called; none holds a NaN."""


def describe(
    values: npt.ArrayLike, ranks: npt.ArrayLike | None = None, null_reasons: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Count, median, p5, p95, mean, min and max of the values that are known; with `ranks` also the median of each
    rank and their spread (largest minus smallest). `reason` says why there is no median.
    """
    column = np.asarray(values, np.float64)
    known = column[~np.isnan(column)]
    if len(known):
        p5, median, p95 = np.percentile(known, PERCENTILES, method="linear")
        numbers: Floats | None = np.array([median, p5, p95, known.mean(), known.min(), known.max()])
    else:
        numbers = None
    medians = None if ranks is None else rank_medians(column, np.asarray(ranks))
    return entry(len(known), len(column) - len(known), numbers, medians, null_reasons)


def entry(
    count: int,
    nulls: int,
    numbers: Floats | None,
    medians: Mapping[int, float | None] | None = None,
    null_reasons: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The numbers of one metric as a summary shows them. `numbers`: median, p5, p95, mean, min, max; None if none."""
    reasons = dict(null_reasons or {})
    found: dict[str, Any] = {"count": count, "nulls": nulls}
    if numbers is None:
        found |= dict.fromkeys(_NAMES)
        found["reason"] = max(reasons, key=reasons.__getitem__) if reasons else "no values"
    else:
        found |= dict(zip(_NAMES, map(float, numbers), strict=True)) | {"reason": None}
    found["null_reasons"] = reasons
    if medians is not None:
        known = [median for median in medians.values() if median is not None]
        enough = len(known) > 1
        found |= {
            "per_rank_median": {str(rank): median for rank, median in medians.items()},
            "rank_spread": max(known) - min(known) if enough else None,
            "rank_spread_reason": None if enough else f"{len(known)} rank(s) with values; a spread needs two",
        }
    return found


def rank_medians(values: Floats, ranks: npt.NDArray[Any]) -> dict[int, float | None]:
    """Rank -> median of its known values, in order of rank; None where it has none."""
    if np.any(ranks[1:] < ranks[:-1]):
        order = np.argsort(ranks, kind="stable")
        values, ranks = values[order], ranks[order]
    found, starts = np.unique(ranks, return_index=True)
    parts = np.split(values, starts[1:]) if len(found) else []
    return {int(rank): median_or_none(part) for rank, part in zip(found, parts, strict=True)}


def median_or_none(values: Floats) -> float | None:
    """The median of the known values, None if there are none."""
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else None


def numbers_of(blocks: Blocks) -> tuple[int, Floats | None]:
    """How many values there are, and their median, p5, p95, mean, min and max, exactly: `numpy.percentile` of them all
    together, though only a block and `_GATHER` values are ever in memory. Reads the blocks two or more times.
    """
    count, total, low, high = 0, 0.0, np.inf, -np.inf
    for block in blocks():
        if len(block):
            count += len(block)
            total += float(block.sum())
            low, high = min(low, float(block.min())), max(high, float(block.max()))
    if not count:
        return 0, None
    places = [percent / 100 * (count - 1) for percent in PERCENTILES]
    wanted = sorted({min(int(place) + more, count - 1) for place in places for more in (0, 1)})
    at = _order_statistics(blocks, wanted, low, high)
    p5, median, p95 = (
        _between(at[int(place)], at[min(int(place) + 1, count - 1)], place - int(place)) for place in places
    )
    return count, np.array([median, p5, p95, total / count, low, high])


def _between(left: float, right: float, part: float) -> float:
    """Interpolate as numpy does, to the last digit: it starts from the nearer end."""
    return right - (right - left) * (1 - part) if part >= 0.5 else left + (right - left) * part


def _order_statistics(blocks: Blocks, places: list[int], low: float, high: float) -> dict[int, float]:
    """Place in the sorted whole -> value. Counts values in bins, and looks closer only where a place falls. `low` and
    `high` are the least and the greatest value looked at; `before` values lie below `low`.
    """
    found: dict[int, float] = {}
    spans = [(low, high, 0, places)]
    while spans:
        low, high, before, inside = spans.pop()
        if low == high:
            found |= dict.fromkeys(inside, low)
            continue
        counts = np.zeros(_BINS, np.int64)
        for block in blocks():
            counts += np.bincount(_bins(_within(block, low, high), low, high), minlength=_BINS)
        ends = before + np.cumsum(counts)
        bins = np.searchsorted(ends, inside, side="right")
        for index in np.unique(bins):
            here = [place for place, bin_ in zip(inside, bins, strict=True) if bin_ == index]
            start = int(ends[index] - counts[index])
            if counts[index] <= _GATHER:
                values = np.sort(np.concatenate([*_in_bin(blocks, low, high, index)]))
                found |= {place: float(values[place - start]) for place in here}
            else:
                least = [(part.min(), part.max()) for part in _in_bin(blocks, low, high, index) if len(part)]
                span = float(min(pair[0] for pair in least)), float(max(pair[1] for pair in least))
                spans.append((*span, start, here))
    return found


def _in_bin(blocks: Blocks, low: float, high: float, index: int) -> Iterator[Floats]:
    for block in blocks():
        part = _within(block, low, high)
        yield part[_bins(part, low, high) == index]


def _within(block: Floats, low: float, high: float) -> Floats:
    return block[(block >= low) & (block <= high)]


def _bins(values: Floats, low: float, high: float) -> npt.NDArray[np.int64]:
    """Bin of each value: does not fall as values rise, and the least and the greatest are in different ones."""
    # Divided first: bins per unit would be infinite where the values are that close together.
    return ((values - low) / (high - low) * (_BINS - 1)).astype(np.int64)
