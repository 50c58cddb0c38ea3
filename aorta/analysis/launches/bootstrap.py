"""Launches resampled, and steps within launches: how far an effect could have come out otherwise.

Enters: the values of a launch by global step (all ranks of a step together are one draw: they waited for each other),
then launches of two sides. Leaves: medians of resamples, an effect and its percentile interval. Must not: resample
single rank-steps, or hold more than a bounded block of a large launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np

from aorta.analysis.tables import Floats, Ints

Kind: TypeAlias = Literal["difference", "quotient"]
POOL: Final = 200
"""Resamples of the steps of a launch, kept as their medians: a launch of the outer resample draws one of them."""
LEAST_POOL: Final = 48
_WORK: Final = 1 << 22
"""Values looked at for the pool of one metric of one launch; a launch of 64 ranks x 1,000 steps gets 65 resamples."""
_BLOCK: Final = 1 << 20
RESAMPLES: Final = 4_000
"""Outer resamples: the ends of a 95 % interval then move by about a hundredth of its width from seed to seed."""


@dataclass(frozen=True)
class Effect:
    """Of the candidate against the reference: a difference, or a quotient less 1. Null where the reference is 0."""

    kind: Kind
    value: float | None
    low: float | None
    high: float | None


def step_medians(values: Floats, steps: Ints, generator: np.random.Generator) -> Floats:
    """Medians of `values` when their global steps are drawn anew with replacement, shape (resamples,).

    Args:
        values: of the rank-steps, none NaN, at least one. steps: the global step of each.
    """
    if values.min() == values.max():
        return values[:1].copy()  # whatever is drawn
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
    """How often each of `count` things comes up in `count` draws with replacement, shape (resamples, count)."""
    drawn = generator.integers(count, size=(resamples, count)) + count * np.arange(resamples)[:, None]
    return np.bincount(drawn.ravel(), minlength=resamples * count).reshape(resamples, count)


def _weighted_medians(ordered: Floats, drawn: Ints, cluster: Ints) -> Floats:
    """Median of `ordered` per row of `drawn`, in which the cluster of a value says how often the value counts."""
    places = np.cumsum(drawn[:, cluster], axis=1, dtype=np.int32)
    total = places[:, -1:]
    # The place of the k-th smallest (from 0) is the first whose cumulative count exceeds k.
    lower = np.argmax(places > (total - 1) // 2, axis=1)
    upper = np.argmax(places > total // 2, axis=1)
    return np.asarray((ordered[lower] + ordered[upper]) / 2)


def effect_of(kind: Kind, reference: float, candidate: float) -> float | None:
    """Candidate minus reference, or candidate / reference - 1; None over 0."""
    if kind == "difference":
        return candidate - reference
    return candidate / reference - 1 if reference else None


def effect(
    kind: Kind,
    reference: Sequence[tuple[float, Floats]],
    candidate: Sequence[tuple[float, Floats]],
    level: float,
    generator: np.random.Generator,
) -> Effect:
    """The effect of the medians over launches, with the percentile interval of a hierarchical bootstrap: launches with
    replacement, then the steps of each (Davison and Hinkley, Bootstrap Methods and their Application, 1997, 3.8).

    Args:
        reference, candidate: for each launch its median and `step_medians`; at least one each.
    """
    medians = [float(np.median([median for median, _ in side])) for side in (reference, candidate)]
    value = effect_of(kind, *medians)
    if value is None:
        return Effect(kind, None, None, None)
    left, right = (_side_medians([pool for _, pool in side], generator) for side in (reference, candidate))
    if kind == "quotient" and not left.all():
        return Effect(kind, value, None, None)
    drawn = right - left if kind == "difference" else right / left - 1
    low, high = np.percentile(drawn, [50 * (1 - level), 50 * (1 + level)])
    return Effect(kind, value, float(low), float(high))


def _side_medians(pools: Sequence[Floats], generator: np.random.Generator) -> Floats:
    sizes = np.array([len(pool) for pool in pools])
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    launches = generator.integers(len(pools), size=(RESAMPLES, len(pools)))
    inner = generator.integers(0, sizes[launches])
    return np.asarray(np.median(np.concatenate(pools)[starts[launches] + inner], axis=1))
