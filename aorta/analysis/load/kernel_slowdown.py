"""Measures how much communication slows computation down: kernels of one name, alone and while communication runs.

Gives one row per (rank, device, kernel name). The comparison is fair only where kernels of one name do the same work;
matrix products of two shapes may share a name. Must not: state a slowdown that rests on a few kernels, or compare
across devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from aorta.analysis.load.covered_time import covered_ns, places
from aorta.analysis.load.interval_table import NULL, IntervalClass, Intervals, operations
from aorta.timeline import arrays
from aorta.timeline.arrays import Int64, Spans

FEWEST: Final = 6
"""Fewest kernels on either side. From 6 on, the range of a sample contains the true median with 95 % confidence (1 -
2^(1-n), the sign test).
"""
_LEVEL: Final = 0.95
_LARGEST_REACH: Final = 300.0
"""Of a logarithm: keeps the upper end finite where a few kernels differ by everything."""
_HALF: Final = 2
"""A kernel is `overlapped` if communication covers at least half of it, `alone` if it covers none, else neither."""


@dataclass(frozen=True)
class Slowdown:
    """One kernel name on one device. `slowdown` is overlapped median / alone median - 1; `excess_ms` is what the
    overlapped kernels together took beyond the median of those alone. `mean_ratio` is overlapped mean / alone mean,
    from `mean_ratio_low` to `mean_ratio_high` (`ratio_of_means`). Where they are None, `reason` says why.
    """

    rank: int | None
    device: int | None
    name: str
    alone_count: int
    overlapped_count: int
    partly_count: int
    alone_median_ms: float | None
    overlapped_median_ms: float | None
    slowdown: float | None
    excess_ms: float | None
    alone_mean_ms: float | None
    overlapped_mean_ms: float | None
    mean_ratio: float | None
    mean_ratio_low: float | None
    mean_ratio_high: float | None
    reason: str | None


def slowdowns(table: Intervals) -> list[Slowdown]:
    """All kernels of class compute, in the order of `largest_first`."""
    found: list[Slowdown] = []
    for rank, device, rows in places(table):
        here = table.take(rows)
        comm = here.take(here.cls == IntervalClass.COMM)
        found += _of_place(rank, device, here.take(here.cls == IntervalClass.COMPUTE), arrays.merge(comm.spans))
    return sorted(found, key=largest_first)


def largest_first(each: Slowdown) -> tuple[bool, float, str]:
    """Sort key: the largest excess first. Kernels that were faster under communication follow; those that cannot be
    compared come last, by name.
    """
    return each.slowdown is None, -(each.excess_ms or 0.0), each.name


def _of_place(rank: int, device: int, kernels: Intervals, comm: Spans) -> list[Slowdown]:
    if not len(kernels):
        return []
    whole = operations(kernels)
    name = kernels.name[whole.first]
    length = whole.total(kernels.end_ns - kernels.start_ns)
    hidden = whole.total(covered_ns(kernels.spans, comm))
    alone, overlapped = hidden == 0, (hidden > 0) & (hidden * _HALF >= length)
    order = np.argsort(name, kind="stable")
    codes, first = np.unique(name[order], return_index=True)
    found = []
    for code, rows in zip(codes.tolist(), np.split(order, first[1:]), strict=True):
        free, busy = length[rows[alone[rows]]], length[rows[overlapped[rows]]]
        partly = len(rows) - len(free) - len(busy)
        medians = [float(np.median(side)) / 1e6 if len(side) else None for side in (free, busy)]
        means = [float(np.mean(side)) / 1e6 if len(side) else None for side in (free, busy)]
        reason = _why_not(len(free), len(busy), medians[0], bool(len(comm.start)))
        of_means, low, high = (None, None, None) if reason else ratio_of_means(free, busy)
        ratio = None if reason or not medians[0] or medians[1] is None else medians[1] / medians[0] - 1
        found.append(
            Slowdown(
                rank=None if rank == NULL else rank,
                device=None if device == NULL else device,
                name=kernels.names[code] if code != NULL else "",
                alone_count=len(free),
                overlapped_count=len(busy),
                partly_count=partly,
                alone_median_ms=medians[0],
                overlapped_median_ms=medians[1],
                slowdown=ratio,
                excess_ms=None if ratio is None else float(busy.sum()) / 1e6 - len(busy) * float(np.median(free)) / 1e6,
                alone_mean_ms=means[0],
                overlapped_mean_ms=means[1],
                mean_ratio=of_means,
                mean_ratio_low=low,
                mean_ratio_high=high,
                reason=reason,
            )
        )
    return found


def ratio_of_means(alone: Int64, overlapped: Int64) -> tuple[float, float, float]:
    """Overlapped mean / alone mean and its 95 % interval, of at least two lengths above 0 on each side.

    By the delta method the logarithm of a ratio of means has the variance s1^2 / (n1 m1^2) + s2^2 / (n2 m2^2) (Casella
    and Berger, Statistical Inference, 5.5.4); the quantile is Student's t with the degrees of freedom of Welch and
    Satterthwaite. Kernels count as independent of each other.
    """
    from scipy.special import stdtrit

    ratio = float(overlapped.mean() / alone.mean())
    counts = np.array([len(alone), len(overlapped)])
    parts = np.array([side.var(ddof=1) / side.mean() ** 2 for side in (alone, overlapped)]) / counts
    total = float(parts.sum())
    if not total:
        return ratio, ratio, ratio
    freedom = total**2 / float((parts**2 / (counts - 1)).sum())
    reach = float(stdtrit(freedom, 1 - (1 - _LEVEL) / 2)) * total**0.5
    return ratio, ratio * float(np.exp(-reach)), ratio * float(np.exp(min(reach, _LARGEST_REACH)))


def _why_not(alone: int, overlapped: int, alone_median: float | None, any_comm: bool) -> str | None:
    if not any_comm:
        return "no communication on this device"
    if alone < FEWEST or overlapped < FEWEST:
        return f"{alone} alone and {overlapped} overlapped; at least {FEWEST} of each are needed"
    return None if alone_median else "kernels alone have no length"
