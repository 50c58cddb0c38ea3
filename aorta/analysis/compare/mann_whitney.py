"""The exact Mann-Whitney U test for launches: a two-sided p-value from one value per launch on each side.

Must not: see steps (they are correlated), or use the normal approximation where launches are few.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from aorta.analysis.tables import Floats

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
    """Count, for every sum of ranks, the ways to choose the candidate's launches; tied values share their mean rank.
    scipy's exact method does not support ties, and its permutation test takes seconds per metric and refuses a side of
    one launch.
    """
    from scipy.stats import rankdata

    doubled = np.rint(2 * rankdata(np.concatenate([reference, candidate]))).astype(int)
    ways = np.zeros((len(candidate) + 1, doubled.sum() + 1))
    ways[0, 0] = 1
    for rank in doubled:
        ways[1:, rank:] += ways[:-1, :-rank].copy()
    seen = int(doubled[len(reference) :].sum())
    at_most, at_least = ways[-1, : seen + 1].sum(), ways[-1, seen:].sum()
    return float(min(1.0, 2 * min(at_most, at_least) / ways[-1].sum()))


def _scipy(reference: npt.NDArray[Any], candidate: npt.NDArray[Any], method: str) -> Floats:
    from scipy.stats import mannwhitneyu

    found = mannwhitneyu(candidate, reference, alternative="two-sided", method=method, axis=-1)
    return np.asarray(found.pvalue, np.float64)
