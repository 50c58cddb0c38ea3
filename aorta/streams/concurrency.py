"""Numbers from the times of kernels: how many ran at once, which pairs of streams never did, where the knee is.

Must not import torch, or know where times come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from aorta.timeline.intervals import Interval, measure, merge

RESOLUTION_NS = 1_000
"""Events tell times to about 0.5 us (CUDA: cudaEventElapsedTime), so two of them differ by up to twice that for
nothing: kernels that share no more than this ran one after the other.
"""


def concurrency(kernels: Sequence[Interval]) -> float:
    """Mean number of kernels at once while any runs: the sum of lengths over the length of the union; 0 for none."""
    union_ns = measure(merge(kernels))
    return sum(end - begin for begin, end in kernels) / union_ns if union_ns else 0.0


def most_at_once(kernels: Iterable[Interval]) -> int:
    """The most kernels that ran at once for longer than the events resolve."""
    edges: list[tuple[int, int]] = []
    for begin, end in kernels:
        edges += [(begin, 1), (max(end - RESOLUTION_NS, begin + 1), -1)]
    running = most = 0
    for _, change in sorted(edges):  # at one moment ends come first
        running += change
        most = max(most, running)
    return most


def ran_together(one: Interval, other: Interval) -> bool:
    """Whether two kernels ran at once for longer than the events resolve."""
    return min(one[1], other[1]) - max(one[0], other[0]) > RESOLUTION_NS


def elapsed_ns(kernels: Sequence[Interval]) -> int:
    """From the first begin to the last end."""
    return max(end for _, end in kernels) - min(begin for begin, _ in kernels)


def knee(gains: Mapping[int, float], tolerance: float) -> int:
    """The smallest number of streams that no larger one beats by more than `tolerance`, a share of its throughput.

    With q queues and equal kernels the gain is q at every multiple of q and lower between (one queue has one stream
    more than the others), so "the first number whose successor is no better" would stop at any dip; and the place of
    the highest gain is decided by noise wherever the curve is flat.

    Args:
        gains: throughput against one stream, by number of streams; at least one.
    """
    ordered = sorted(gains)
    return next(n for n in ordered if all(gains[m] <= gains[n] * (1 + tolerance) for m in ordered if m > n))
