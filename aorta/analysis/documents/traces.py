"""What `summary.json` holds of a dataset that was read from traces: costs, slowdowns and kernels.

Must not compute anything.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

KernelClass: TypeAlias = Literal["compute", "comm", "copy", "unknown"]


class KernelTotalEntry(msgspec.Struct):
    """Kernels of one name and class on one device; without rank and device: on all."""

    rank: int | None
    device: int | None
    name: str
    cls: KernelClass
    count: int
    total_ms: float
    mean_ms: float
    std_ms: float | None
    min_ms: float
    max_ms: float
    share: float


class GemmEntry(msgspec.Struct):
    """Matrix products of one shape on one device; without rank and device: on all."""

    rank: int | None
    device: int | None
    operator: str
    batch: int
    m: int
    n: int
    k: int
    dtype: str | None
    count: int
    total_ms: float
    mean_ms: float
    std_ms: float | None
    tflops: float | None


class StreamGapsEntry(msgspec.Struct):
    """The time between the kernels of one stream, and that in its kernels of computation and communication; `reason`:
    why it is not known how much of it waited for the host.
    """

    rank: int | None
    device: int | None
    stream: int
    kernels: int
    busy_ms: float
    compute_ms: float
    comm_ms: float
    gaps: int
    gap_ms: float
    gaps_known: int
    launch_bound: int | None
    launch_bound_ms: float | None
    reason: str | None


class CounterEntry(msgspec.Struct):
    """A hardware counter of kernels of one name; `derived_from` the raw ones, or null where the tool gave it."""

    rank: int | None
    device: int | None
    name: str
    counter: str
    count: int
    mean: float
    min: float
    max: float
    comm_share: float | None
    derived_from: str | None


class SlowdownEntry(msgspec.Struct):
    """Kernels of one name on one device, alone and while communication runs; `reason`: why they are not compared."""

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


class KernelEntries(msgspec.Struct):
    """The kernels of traces; `reasons`: kind of rows -> what traces lack of them."""

    by_name: list[KernelTotalEntry]
    by_shape: list[GemmEntry]
    totals: list[KernelTotalEntry]
    gemms: list[GemmEntry]
    gaps: list[StreamGapsEntry]
    counters: list[CounterEntry]
    reasons: dict[str, list[str]]
    left_out: dict[str, int]


class TraceEntries(msgspec.Struct):
    """What a dataset has that was read from traces."""

    whole: dict[str, Any]
    costs: list[dict[str, Any]]
    slowdowns: list[SlowdownEntry]
    kernels: KernelEntries
