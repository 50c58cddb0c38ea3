"""Rank tests of launches, from one value per launch on each side: the exact Mann-Whitney U test of one metric, and
step-down minP over the labellings of launches for several metrics together.

    mann_whitney(reference, candidate)  # two-sided p-value
    found = step_down({"comm_ms": (reference, candidate), ...}, alpha=0.05)
    found["comm_ms"].p                  # adjusted: at most alpha where the metric differs
    found["comm_ms"].level              # the raw p below which it differs; None where none is attainable

A labelling says which launches are the candidate's. All metrics of a launch keep their values together when labels are
exchanged, so that metrics which move together cost little extra. Must not: see steps (they are correlated), use the
normal approximation where launches are few, or let a metric be tested after one that was not significant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import comb
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from aorta.analysis.frames import Bools, Floats, Ints

EXACT_PAIRS: Final = 4096
"""Pairs of launches (64 x 64) up to which the distribution of U is computed exactly; above, the normal approximation is
as good.
"""


def mann_whitney(reference: Floats, candidate: Floats) -> float:
    """Return the two-sided p-value of "neither side tends to larger values" (Mann and Whitney 1947). Takes no NaN.

    Without ties it comes from the exact distribution of U; with ties, from all assignments of the observed values to
    the sides.
    """
    values = np.concatenate([reference, candidate])
    if len(np.unique(values)) < len(values):
        return _with_ties(reference, candidate)
    return float(p_values(len(reference), len(candidate))[u_of(reference, candidate)])


def u_of(reference: Floats, candidate: Floats) -> int:
    """Return the statistic U: the number of pairs of launches in which the candidate's value is larger."""
    return int((candidate[:, None] > reference).sum())


@lru_cache(maxsize=64)
def p_values(reference: int, candidate: int) -> Floats:
    """Return the two-sided p-value of every U from 0 to `reference * candidate` (numbers of launches), without ties."""
    pairs = reference * candidate
    wanted = np.arange(pairs + 1)
    # Any samples with that U will do: choose how many references lie below each candidate so that they add up to U.
    below = np.clip(wanted[:, None] - reference * np.arange(candidate), 0, reference)
    candidates = below + 0.5 + np.arange(candidate) / (2 * candidate)
    references = np.broadcast_to(np.arange(1.0, reference + 1), (pairs + 1, reference))
    found = _scipy(references, candidates, "exact" if pairs <= EXACT_PAIRS else "asymptotic")
    found.setflags(write=False)
    return found


def critical_u(reference: int, candidate: int, alpha: float) -> int | None:
    """Return the smallest U in the upper half with p <= alpha; None where no U reaches it because there are too few
    launches.
    """
    found = p_values(reference, candidate)
    half = len(found) // 2
    enough = np.flatnonzero(found[half:] <= alpha)
    return half + int(enough[0]) if len(enough) else None


def _with_ties(reference: Floats, candidate: Floats) -> float:
    """Return the exact p-value with ties, which scipy's method does not support; its permutation test takes seconds per
    metric and refuses a side of one launch.
    """
    doubled = doubled_ranks(np.concatenate([reference, candidate]))
    table = rank_sum_p_values(tuple(sorted(doubled.tolist())), len(candidate))
    return float(table[int(doubled[len(reference) :].sum())])


def doubled_ranks(values: Floats) -> Ints:
    """Return twice the rank of each value, from 1; tied values share their mean rank, and NaN has the mean of all."""
    from scipy.stats import rankdata

    known = ~np.isnan(values)
    doubled = np.full(len(values), int(known.sum()) + 1)
    doubled[known] = np.rint(2 * rankdata(values[known]))
    return doubled


@lru_cache(maxsize=256)
def rank_sum_p_values(doubled: tuple[int, ...], chosen: int) -> Floats:
    """Return the two-sided p-value of every sum of `chosen` of these doubled ranks: the share of all choices whose sum
    lies at least as far out on its side, twice. Indexed by the sum.
    """
    ways = np.zeros((chosen + 1, sum(doubled) + 1))
    ways[0, 0] = 1
    for rank in doubled:
        ways[1:, rank:] += ways[:-1, : ways.shape[1] - rank].copy()
    at_most = np.cumsum(ways[-1])
    at_least = at_most[-1] - at_most + ways[-1]
    found = np.minimum(1.0, 2 * np.minimum(at_most, at_least) / at_most[-1])
    found.setflags(write=False)
    return np.asarray(found)


def _scipy(reference: npt.NDArray[Any], candidate: npt.NDArray[Any], method: str) -> Floats:
    from scipy.stats import mannwhitneyu

    found = mannwhitneyu(candidate, reference, alternative="two-sided", method=method, axis=-1)
    return np.asarray(found.pvalue, np.float64)


EXACT_LABELLINGS: Final = 200_000
"""Labellings up to which all are enumerated: C(20, 10) = 184,756, ten launches against ten."""
LEAST_LAUNCHES: Final = 4
"""Launches per side. With three against three the smallest two-sided Mann-Whitney p is 2 / C(6, 3) = 0.10."""
DRAWN: Final = 20_000
"""Labellings drawn where there are more, the observed one among them; a p of 0.05 is then known to 0.0015."""
_SEED: Final = 1993
_BELOW: Final = 1 - 1e-9
"""Turns "below" into "at most" for p-values that were computed in two ways."""


@dataclass(frozen=True)
class Adjusted:
    """The result for one metric.

    Attributes:
        p: adjusted p; the chance of even one false finding among all metrics is at most alpha where those with
            p <= alpha are taken for findings.
        level: the raw p up to which this metric is a finding, at the step at which it was judged. None where no raw p
            of any metric could have been one: then these launches could not decide, whatever they had measured.
    """

    p: float
    level: float | None


def step_down(values: Mapping[str, tuple[Floats, Floats]], alpha: float) -> dict[str, Adjusted]:
    """Test all metrics by step-down minP (Westfall and Young, *Resampling-Based Multiple Testing*, 1993, algorithm 2.8)
    with the exact two-sided Mann-Whitney p of each metric.

    At each step the smallest remaining raw p is held against the distribution of the smallest p of all remaining
    metrics over the labellings: all of them up to `EXACT_LABELLINGS`, else `DRAWN` with a fixed seed.

    Args:
        values: per metric one value for each launch of the reference and of the candidate, the same launches for every
            metric; NaN where a launch has none, which counts as one of middle rank.
        alpha: the level of all metrics together.
    """
    if not values:
        return {}
    sizes = {(len(reference), len(candidate)) for reference, candidate in values.values()}
    (size,) = sizes
    labels = labellings(*size)
    p = np.empty((len(values), len(labels)))
    for row, (reference, candidate) in zip(p, values.values(), strict=True):
        doubled = doubled_ranks(np.concatenate([reference, candidate]))
        table = rank_sum_p_values(tuple(sorted(doubled.tolist())), len(candidate))
        row[:] = table[(labels @ doubled).astype(np.int64)]
    order = np.argsort(p[:, 0], kind="stable")
    smallest = np.minimum.accumulate(p[order[::-1]], axis=0)[::-1]
    place = int(alpha * len(labels) * (1 + 1e-12))
    names, adjusted, found = list(values), 0.0, {}
    level, least = alpha, float(smallest[0].min())
    for step, metric in enumerate(order):
        observed = float(p[metric, 0])
        if adjusted <= alpha:  # the step-down stops at the first that is no finding, and so does the level
            # More than alpha of all labellings reach this p, and no smaller one has so many.
            critical = float(np.partition(smallest[step], place)[place])
            level = min(critical * _BELOW, alpha)
        # Where ties make the test lopsided, twice one side may be more than both: no p falls below the raw one.
        adjusted = max(adjusted, observed, float((smallest[step] <= observed).mean()))
        found[names[metric]] = Adjusted(adjusted, None if level < least else level)
    return {name: found[name] for name in values}


@lru_cache(maxsize=8)
def labellings(reference: int, candidate: int) -> Floats:
    """Return which launches are the candidate's, one labelling a row, as 0 and 1; the first row is the observed one.

    Shape (labellings, reference + candidate).
    """
    launches, count = reference + candidate, comb(reference + candidate, candidate)
    if count <= EXACT_LABELLINGS:
        # In order of `combinations` the last one holds the last launches, which are the candidate's.
        chosen = np.array(list(combinations(range(launches), candidate)), np.int64)[::-1]
        labels: Bools = np.zeros((count, launches), bool)
        np.put_along_axis(labels, chosen, values=True, axis=1)
    else:
        generator = np.random.default_rng([_SEED, reference, candidate])
        labels = np.tile(np.arange(launches) >= reference, (DRAWN, 1))
        labels[1:] = generator.permuted(labels[1:], axis=1)
    found = labels.astype(np.float64)
    found.setflags(write=False)
    return found


def launches_for(metrics: int, alpha: float, least: int) -> int:
    """Return the smallest number of launches per side, at least `least`, with which one of so many metrics can be a
    finding whatever the others are: n for which metrics * 2 / C(2n, n) <= alpha.

    Each metric has two extreme labellings of C(2n, n) if its values differ, and in the worst case no two metrics share
    them.
    """
    size = least
    while metrics * 2 / comb(2 * size, size) > alpha:
        size += 1
    return size
