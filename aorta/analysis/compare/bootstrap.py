"""Estimates how far the median of a side could have come out otherwise, by a hierarchical bootstrap.

Launches are resampled, and within each launch its global steps. All ranks of a step are drawn together, because they
waited for each other. Must not: resample single rank-steps, or
hold more than a bounded block of a large launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from aorta.analysis.tables import Floats, Ints

POOL: Final = 200
"""Resamples of the steps of one launch, kept as their medians; the outer resample draws one median per launch."""
LEAST_POOL: Final = 48
_WORK: Final = 1 << 22
"""Bounds the values touched per metric and launch: a launch of 64 ranks x 1,000 steps gets 65 resamples."""
_BLOCK: Final = 1 << 20
RESAMPLES: Final = 4_000
"""Outer resamples: with these the ends of a 95 % interval vary by about a hundredth of its width from seed to seed."""


def step_medians(values: Floats, steps: Ints, generator: np.random.Generator) -> Floats:
    """Medians of `values` over resamples of their global steps, drawn with replacement; shape (resamples,).

    Args:
        values: one per rank-step, none NaN, at least one.
        steps: the global step of each value.
    """
    if values.min() == values.max():
        return values[:1].copy()  # the median is the same for every draw
    order = np.argsort(values, kind="stable")
    _, cluster = np.unique(steps, return_inverse=True)
    ordered, cluster = values[order], cluster[order]
    count = int(cluster.max()) + 1
    size = int(np.clip(_WORK // len(values), LEAST_POOL, POOL))
    each = max(1, _BLOCK // len(values))
    found = [
        _weighted_medians(ordered, _times_drawn(count, min(each, size - at), generator), cluster)
        for at in range(0, size, each)
    ]
    return np.concatenate(found)


def _times_drawn(count: int, resamples: int, generator: np.random.Generator) -> Ints:
    """How often each of `count` items is drawn in `count` draws with replacement; shape (resamples, count)."""
    drawn = generator.integers(count, size=(resamples, count)) + count * np.arange(resamples)[:, None]
    return np.bincount(drawn.ravel(), minlength=resamples * count).reshape(resamples, count)


def _weighted_medians(ordered: Floats, drawn: Ints, cluster: Ints) -> Floats:
    """Median of `ordered` for each row of `drawn`, where a value counts as often as its cluster was drawn."""
    places = np.cumsum(drawn[:, cluster], axis=1, dtype=np.int32)
    total = places[:, -1:]
    # The k-th smallest (from 0) is at the first position whose cumulative count exceeds k.
    lower = np.argmax(places > (total - 1) // 2, axis=1)
    upper = np.argmax(places > total // 2, axis=1)
    return np.asarray((ordered[lower] + ordered[upper]) / 2)


def median_interval(
    side: Sequence[tuple[float, Floats]], level: float, generator: np.random.Generator
) -> tuple[float, float]:
    """The percentile interval of the median over the launches of one side: launches are drawn with replacement, then
    the steps of each (Davison and Hinkley, Bootstrap Methods and their Application, 1997, 3.8).

    Args:
        side: for each launch its median and its `step_medians`; at least one launch.
        level: coverage of the interval, for example 0.95.
    """
    low, high = np.percentile(
        _side_medians([pool for _, pool in side], generator), [50 * (1 - level), 50 * (1 + level)]
    )
    return float(low), float(high)


def _side_medians(pools: Sequence[Floats], generator: np.random.Generator) -> Floats:
    sizes = np.array([len(pool) for pool in pools])
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    launches = generator.integers(len(pools), size=(RESAMPLES, len(pools)))
    inner = generator.integers(0, sizes[launches])
    return np.asarray(np.median(np.concatenate(pools)[starts[launches] + inner], axis=1))
