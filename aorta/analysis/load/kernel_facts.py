"""What a report shows of the kernels of traces: totals, slowdowns, matrix products, gaps and counters.

`kernel_facts(trace)` gives one trace's, small enough to be sent between processes; `entries` joins those of all. Must
not: leave a row out without saying how many.

A slowdown compares kernels of one name, alone and while communication runs: one row per (rank, device, kernel name). It
is fair only where kernels of one name do the same work; matrix products of two shapes may share a name. Must not state
a slowdown that rests on a few kernels, or compare across devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from msgspec.structs import replace

from aorta.analysis.documents.traces import (
    GemmEntry,
    KernelClass,
    KernelEntries,
    KernelTotalEntry,
    SlowdownEntry,
)
from aorta.analysis.load.interval_table import NULL, IntervalClass, Intervals, Trace, covered_ns, operations, places
from aorta.analysis.load.kernel_totals import counter_means, gemm_rates, kernel_totals, stream_gaps
from aorta.timeline import arrays
from aorta.timeline.arrays import Int64, Spans

SHOWN_ROWS: Final = 500
"""Rows of a kind that are kept of one trace."""
_SEVERAL: Final = 2
_KINDS: Final = ("totals", "gemms", "gaps", "counters")


class KeptRows(NamedTuple):
    """Rows of one kind. `reason`: what the trace lacks of them. `left_out`: how many there are beyond `SHOWN_ROWS`."""

    rows: tuple[Any, ...]
    reason: str | None
    left_out: int = 0


class KernelFacts(NamedTuple):
    """The kernels of one trace: entries of `documents.traces` by the fields of `KernelEntries`. `total_ms`: of all
    kernels, those that are not kept too.
    """

    totals: KeptRows
    gemms: KeptRows
    gaps: KeptRows
    counters: KeptRows
    total_ms: float = 0.0


def kernel_facts(trace: Trace) -> KernelFacts:
    """Sum up the kernels of a trace.

    Args:
        trace: of `trace_health.usable`.
    """
    if trace.compute_unseen and (trace.intervals.device == NULL).all():  # rows of the host, none of the device
        nothing = KeptRows((), trace.unseen)
        return KernelFacts(nothing, nothing, nothing, nothing)
    totals = kernel_totals(trace.intervals)
    return KernelFacts(
        totals=_kept(totals, None),
        gemms=_kept(*gemm_rates(trace)),
        gaps=_kept(*stream_gaps(trace)),
        counters=_kept(*counter_means(trace)),
        total_ms=sum(row.total_ms for row in totals),
    )


def _kept(rows: Sequence[Any], reason: str | None) -> KeptRows:
    """Select the rows that are kept, in their order: those of most time on all devices; without times, the first."""
    kept = rows
    if len(rows) > SHOWN_ROWS and hasattr(rows[0], "total_ms"):
        least = sorted((row.total_ms for row in rows), reverse=True)[SHOWN_ROWS - 1]
        kept = [row for row in rows if row.total_ms >= least]
    return KeptRows(tuple(kept[:SHOWN_ROWS]), reason, max(len(rows) - SHOWN_ROWS, 0))


def entries(facts: Iterable[KernelFacts]) -> KernelEntries:
    """Return the kernels of all traces. `by_name` and `by_shape` are `totals` and `gemms` of all devices together,
    without rank and device. `reasons`: kind of rows -> what traces lack of them.
    """
    facts = list(facts)
    kept = {kind: [getattr(each, kind) for each in facts] for kind in _KINDS}
    rows = {kind: [row for part in parts for row in part.rows] for kind, parts in kept.items()}
    rows["totals"] = _of_devices([part.rows for part in kept["totals"]])
    reasons = {
        kind: dict.fromkeys(part.reason for part in parts if part.reason is not None) for kind, parts in kept.items()
    }
    left_out = {kind: sum(part.left_out for part in parts) for kind, parts in kept.items()}
    return KernelEntries(
        by_name=by_name(rows["totals"], sum(each.total_ms for each in facts)),
        by_shape=by_shape(rows["gemms"]),
        **rows,
        reasons={kind: list(stated) for kind, stated in reasons.items() if stated},
        left_out={kind: count for kind, count in left_out.items() if count},
    )


def by_name(rows: Iterable[KernelTotalEntry], total_ms: float) -> list[KernelTotalEntry]:
    """Return kernels of one name and class on all devices as one row, the largest total first; `total_ms` is of all
    kernels of all traces, which shares are of.
    """
    groups: dict[tuple[str, KernelClass], list[KernelTotalEntry]] = defaultdict(list)
    for row in rows:
        groups[row.name, row.cls].append(row)
    found = [replace(_summed(own, total_ms), rank=None, device=None) for own in groups.values()]
    return sorted(found, key=lambda row: (-row.total_ms, row.name))


def _of_devices(parts: Sequence[Sequence[KernelTotalEntry]]) -> list[KernelTotalEntry]:
    """Return the totals of each device, over the windows of a rank; a trace of unknown rank is a device of its own."""
    groups: dict[tuple[object, ...], list[KernelTotalEntry]] = defaultdict(list)
    whole: dict[tuple[object, ...], dict[int, float]] = defaultdict(dict)
    for at, rows in enumerate(parts):
        for row in rows:
            place = (row.rank, row.device, at if row.rank is None else None)
            groups[*place, row.name, row.cls].append(row)
            if row.share:
                whole[place].setdefault(at, row.total_ms / row.share)
    return [
        own[0] if len(whole[key[:3]]) < _SEVERAL else _summed(own, sum(whole[key[:3]].values()))
        for key, own in groups.items()
    ]


def _summed(rows: Sequence[KernelTotalEntry], total_ms: float) -> KernelTotalEntry:
    """Return rows of one name as one; its share is of `total_ms`."""
    return replace(
        rows[0],
        **_together(rows),
        min_ms=min(row.min_ms for row in rows),
        max_ms=max(row.max_ms for row in rows),
        share=sum(row.total_ms for row in rows) / total_ms if total_ms else 0.0,
    )


def by_shape(rows: Iterable[GemmEntry]) -> list[GemmEntry]:
    """Return the products of one shape on all devices as one row, the largest total first."""
    groups: dict[tuple[Any, ...], list[GemmEntry]] = defaultdict(list)
    for row in rows:
        groups[row.operator, row.batch, row.m, row.n, row.k, row.dtype].append(row)
    found = []
    for own in groups.values():
        times = _together(own)
        work = sum(row.tflops * row.total_ms for row in own if row.tflops is not None)
        rate = work / times["total_ms"] if times["total_ms"] else None
        found.append(replace(own[0], rank=None, device=None, **times, tflops=rate))
    return sorted(found, key=lambda row: -row.total_ms)


def _together(rows: Sequence[KernelTotalEntry | GemmEntry]) -> dict[str, Any]:
    """Return count, total, mean and sample standard deviation of several samples as one: the squares about the common
    mean are those about each mean, and those of the means.
    """
    count, total = sum(row.count for row in rows), sum(row.total_ms for row in rows)
    mean = total / count
    squares = sum((row.count - 1) * (row.std_ms or 0.0) ** 2 + row.count * (row.mean_ms - mean) ** 2 for row in rows)
    deviation = (squares / (count - 1)) ** 0.5 if count > 1 else None
    return {"count": count, "total_ms": total, "mean_ms": mean, "std_ms": deviation}


FEWEST: Final = 6
"""Fewest kernels on either side. From 6 on, the range of a sample contains the true median with 95 % confidence (1 -
2^(1-n), the sign test).
"""
_LEVEL: Final = 0.95
_LARGEST_REACH: Final = 300.0
"""Of a logarithm: keeps the upper end finite where a few kernels differ by everything."""
_HALF: Final = 2
"""A kernel is `overlapped` if communication covers at least half of it, `alone` if it covers none, else neither."""


def slowdowns(table: Intervals) -> list[SlowdownEntry]:
    """Return all kernels of class compute, in the order of `largest_first`. `slowdown` is overlapped median / alone
    median - 1; `excess_ms` is what the overlapped kernels together took beyond the median of those alone. `mean_ratio`
    is overlapped mean / alone mean, from `mean_ratio_low` to `mean_ratio_high` (`ratio_of_means`). Where they are None,
    `reason` says why.
    """
    found: list[SlowdownEntry] = []
    for rank, device, rows in places(table):
        here = table.take(rows)
        comm = here.take(here.cls == IntervalClass.COMM)
        found += _of_place(rank, device, here.take(here.cls == IntervalClass.COMPUTE), arrays.merge(comm.spans))
    return sorted(found, key=largest_first)


def largest_first(each: SlowdownEntry) -> tuple[bool, float, str]:
    """Sort key: the largest excess first. Kernels that were faster under communication follow; those that cannot be
    compared come last, by name.
    """
    return each.slowdown is None, -(each.excess_ms or 0.0), each.name


def _of_place(rank: int, device: int, kernels: Intervals, comm: Spans) -> list[SlowdownEntry]:
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
            SlowdownEntry(
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
    """Return overlapped mean / alone mean and its 95 % interval, of at least two lengths above 0 on each side.

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
