"""What a report shows of the kernels of traces: totals, slowdowns, matrix products, gaps and counters.

`kernel_facts(trace)` gives one trace's, small enough to be sent between processes; `as_json` joins those of all. Must
not: leave a row out without saying how many.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from aorta.analysis.load.interval_table import Trace
from aorta.analysis.load.kernel_totals import (
    CounterMean,
    GemmRate,
    KernelTotal,
    StreamGaps,
    counter_means,
    gemm_rates,
    kernel_totals,
    stream_gaps,
)

SHOWN_ROWS: Final = 500
"""Rows of a kind that are kept of one trace."""
AORTA_2025: Final = "aorta-2025"
NO_KERNELS: Final = "records of AORTA 2025 name ranges, no kernels"


@dataclass(frozen=True)
class KernelFacts:
    """Of one trace. `reasons`: kind of rows -> what the trace lacks of them. `left_out`: kind -> rows beyond
    `SHOWN_ROWS`.
    """

    totals: tuple[KernelTotal, ...]
    gemms: tuple[GemmRate, ...]
    gaps: tuple[StreamGaps, ...]
    counters: tuple[CounterMean, ...]
    reasons: dict[str, str]
    left_out: dict[str, int]


KINDS: Final = ("totals", "gemms", "gaps", "counters")


def kernel_facts(trace: Trace) -> KernelFacts:
    """Sum up the kernels of a trace.

    Args:
        trace: of `trace_health.usable`.
    """
    if trace.format == AORTA_2025:
        return KernelFacts((), (), (), (), dict.fromkeys(KINDS, NO_KERNELS), {})
    found: dict[str, tuple[Sequence[Any], str | None]] = {
        "totals": (kernel_totals(trace.intervals), None),
        "gemms": gemm_rates(trace),
        "gaps": stream_gaps(trace),
        "counters": counter_means(trace),
    }
    return KernelFacts(
        **{kind: _longest(rows) for kind, (rows, _) in found.items()},
        reasons={kind: reason for kind, (_, reason) in found.items() if reason is not None},
        left_out={kind: len(rows) - SHOWN_ROWS for kind, (rows, _) in found.items() if len(rows) > SHOWN_ROWS},
    )


def _longest(rows: Sequence[Any]) -> tuple[Any, ...]:
    """The rows that are kept, in their order: of all devices those of most time; of rows without a time the first."""
    if len(rows) <= SHOWN_ROWS or not hasattr(rows[0], "total_ms"):
        return tuple(rows[:SHOWN_ROWS])
    least = sorted((row.total_ms for row in rows), reverse=True)[SHOWN_ROWS - 1]
    return tuple(row for row in rows if row.total_ms >= least)[:SHOWN_ROWS]


def as_json(facts: Iterable[KernelFacts]) -> dict[str, Any]:
    """The kernels of all traces, in the form of `summary.json`. `by_name` and `by_shape` are `totals` and `gemms` of
    all devices together, without rank and device. `reasons`: kind of rows -> what traces lack of them.
    """
    facts = list(facts)
    totals, gemms = [row for each in facts for row in each.totals], [row for each in facts for row in each.gemms]
    return {
        "by_name": [msgspec.to_builtins(row) for row in by_name(totals)],
        "by_shape": [msgspec.to_builtins(row) for row in by_shape(gemms)],
        **{kind: [msgspec.to_builtins(row) for each in facts for row in getattr(each, kind)] for kind in KINDS},
        "reasons": {
            kind: reasons
            for kind in KINDS
            if (reasons := list(dict.fromkeys(each.reasons[kind] for each in facts if kind in each.reasons)))
        },
        "left_out": {kind: count for kind in KINDS if (count := sum(each.left_out.get(kind, 0) for each in facts))},
    }


def by_name(rows: Iterable[KernelTotal]) -> list[KernelTotal]:
    """Kernels of one name and class on all devices as one row, the largest total first."""
    whole: dict[tuple[int | None, int | None], float] = {}
    groups: dict[tuple[str, str], list[KernelTotal]] = defaultdict(list)
    for row in rows:
        groups[row.name, row.cls].append(row)
        if row.share:
            whole.setdefault((row.rank, row.device), row.total_ms / row.share)
    total = sum(whole.values())
    found = [
        KernelTotal(
            rank=None,
            device=None,
            name=name,
            cls=cls,
            **_together(own),
            min_ms=min(row.min_ms for row in own),
            max_ms=max(row.max_ms for row in own),
            share=sum(row.total_ms for row in own) / total if total else 0.0,
        )
        for (name, cls), own in groups.items()
    ]
    return sorted(found, key=lambda row: (-row.total_ms, row.name))


def by_shape(rows: Iterable[GemmRate]) -> list[GemmRate]:
    """Products of one shape on all devices as one row, the largest total first."""
    groups: dict[tuple[Any, ...], list[GemmRate]] = defaultdict(list)
    for row in rows:
        groups[row.operator, row.batch, row.m, row.n, row.k, row.dtype].append(row)
    found = []
    for own in groups.values():
        times = _together(own)
        work = sum(row.tflops * row.total_ms for row in own if row.tflops is not None)
        rate = work / times["total_ms"] if times["total_ms"] else None
        found.append(replace(own[0], rank=None, device=None, **times, tflops=rate))
    return sorted(found, key=lambda row: -row.total_ms)


def _together(rows: Sequence[KernelTotal | GemmRate]) -> dict[str, Any]:
    """Count, total, mean and sample standard deviation of several samples as one: the squares about the common mean are
    those about each mean, and those of the means.
    """
    count, total = sum(row.count for row in rows), sum(row.total_ms for row in rows)
    mean = total / count
    squares = sum((row.count - 1) * (row.std_ms or 0.0) ** 2 + row.count * (row.mean_ms - mean) ** 2 for row in rows)
    deviation = (squares / (count - 1)) ** 0.5 if count > 1 else None
    return {"count": count, "total_ms": total, "mean_ms": mean, "std_ms": deviation}
