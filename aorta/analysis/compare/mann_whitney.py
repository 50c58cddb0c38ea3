"""The exact Mann-Whitney U test for launches: a two-sided p-value from one value per launch on each side.

Must not: see steps (they are correlated), or use the normal approximation where launches are few.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from aorta.analysis.tables import Floats, Ints

EXACT_UP_TO: Final = 4096
"""Pairs of launches (64 x 64) up to which the distribution of U is computed exactly; above, the normal approximation is
as good.
"""


def mann_whitney(reference: Floats, candidate: Floats) -> float:
    """The two-sided p-value of "neither side tends to larger values" (Mann and Whitney 1947). No value may be NaN.

    Without ties it comes from the exact distribution of U; with ties, from all assignments of the observed values to
    the sides.
    """
    values = np.concatenate([reference, candidate])
    if len(np.unique(values)) < len(values):
        return _with_ties(reference, candidate)
    return float(p_values(len(reference), len(candidate))[u_of(reference, candidate)])


def u_of(reference: Floats, candidate: Floats) -> int:
    """The statistic U: the number of pairs of launches in which the candidate's value is larger."""
    return int((candidate[:, None] > reference).sum())


@lru_cache(maxsize=64)
def p_values(reference: int, candidate: int) -> Floats:
    """The two-sided p-value of every U from 0 to `reference * candidate` (numbers of launches), without ties."""
    pairs = reference * candidate
    wanted = np.arange(pairs + 1)
    # Any samples with that U will do: choose how many references lie below each candidate so that they add up to U.
    below = np.clip(wanted[:, None] - reference * np.arange(candidate), 0, reference)
    candidates = below + 0.5 + np.arange(candidate) / (2 * candidate)
    references = np.broadcast_to(np.arange(1.0, reference + 1), (pairs + 1, reference))
    found = _scipy(references, candidates, "exact" if pairs <= EXACT_UP_TO else "asymptotic")
    found.setflags(write=False)
    return found


def critical_u(reference: int, candidate: int, alpha: float) -> int | None:
    """The smallest U in the upper half with p <= alpha; None where no U reaches it because there are
    too few launches.
    """
    found = p_values(reference, candidate)
    half = len(found) // 2
    enough = np.flatnonzero(found[half:] <= alpha)
    return half + int(enough[0]) if len(enough) else None


def _with_ties(reference: Floats, candidate: Floats) -> float:
    """Scipy's exact method does not support ties, and its permutation test takes seconds per metric and refuses a side
    of one launch.
    """
    doubled = doubled_ranks(np.concatenate([reference, candidate]))
    table = rank_sum_p_values(tuple(sorted(doubled.tolist())), len(candidate))
    return float(table[int(doubled[len(reference) :].sum())])


def doubled_ranks(values: Floats) -> Ints:
    """Twice the rank of each value, from 1; tied values share their mean rank, and NaN has the mean of all."""
    from scipy.stats import rankdata

    known = ~np.isnan(values)
    doubled = np.full(len(values), int(known.sum()) + 1)
    doubled[known] = np.rint(2 * rankdata(values[known]))
    return doubled


@lru_cache(maxsize=256)
def rank_sum_p_values(doubled: tuple[int, ...], chosen: int) -> Floats:
    """The two-sided p-value of every sum of `chosen` of these doubled ranks: the share of all choices whose sum lies
    at least as far out on its side, twice. Indexed by the sum.
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
