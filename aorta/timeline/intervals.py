"""Union of few half-open intervals `[start_ns, end_ns)` in integer nanoseconds, as pairs: `merge([(5, 9), (0, 5)])` is
`[(0, 9)]`. The whole algebra is on columns (`arrays`).

Must not know what an interval stands for, or touch floating point (docs/dev/measuring.md, W14).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from aorta.errors import IntervalError

Interval: TypeAlias = tuple[int, int]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge any intervals: sorted, disjoint, abutting ones joined, empty ones dropped.

    Raises:
        IntervalError: an interval ends before it starts.
    """
    merged: list[Interval] = []
    last_start, last_end = 0, None
    for start, end in sorted(intervals):
        if end < start:
            raise inverted(start, end)
        if end == start:
            continue
        if last_end is not None and start <= last_end:
            if end > last_end:
                last_end = end
                merged[-1] = (last_start, last_end)
        else:
            last_start, last_end = start, end
            merged.append((start, end))
    return merged


def measure(merged: Iterable[Interval]) -> int:
    """Return the length of a merged list in ns. Summing intervals that may overlap is wrong (W10): merge first."""
    return sum(end - start for start, end in merged)


def inverted(start: int, end: int) -> IntervalError:
    """Return the error of every implementation of this algebra for an interval that ends before it starts."""
    return IntervalError(f"interval [{start}, {end}) ends before it starts; an end must be >= its start")
