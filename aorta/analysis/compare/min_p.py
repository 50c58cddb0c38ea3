"""Tests several metrics together: step-down minP over the labellings of launches, and a sequence named in advance.

    found = step_down({"comm_ms": (reference, candidate), ...}, alpha=0.05)
    found["comm_ms"].p                  # adjusted: at most alpha where the metric differs
    found["comm_ms"].level              # the raw p below which it differs; None where none is attainable

A labelling says which launches are the candidate's. All metrics of a launch keep their values together when labels are
exchanged, so that metrics which move together cost little extra. Must not: see steps, or let a metric be tested after
one that was not significant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import comb
from typing import Final

import numpy as np

from aorta.analysis.compare.mann_whitney import doubled_ranks, rank_sum_p_values
from aorta.analysis.tables import Bools, Floats

EXACT_UP_TO: Final = 200_000
"""Labellings up to which all are enumerated: C(20, 10) = 184,756, ten launches against ten."""
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
    """Step-down minP (Westfall and Young, *Resampling-Based Multiple Testing*, 1993, algorithm 2.8) with the exact
    two-sided Mann-Whitney p of each metric.

    At each step the smallest remaining raw p is held against the distribution of the smallest p of all remaining
    metrics over the labellings: all of them up to `EXACT_UP_TO`, else `DRAWN` with a fixed seed.

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
    """Which launches are the candidate's, one labelling a row, as 0 and 1; the first row is the observed one.

    Shape (labellings, reference + candidate).
    """
    launches, count = reference + candidate, comb(reference + candidate, candidate)
    if count <= EXACT_UP_TO:
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
    """The smallest number of launches per side, at least `least`, with which one of so many metrics can be a finding
    whatever the others are: n for which metrics * 2 / C(2n, n) <= alpha.

    Each metric has two extreme labellings of C(2n, n) if its values differ, and in the worst case no two metrics share
    them.
    """
    size = least
    while metrics * 2 / comb(2 * size, size) > alpha:
        size += 1
    return size
