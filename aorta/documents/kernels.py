"""What `summary.json` holds of traces of other tools: each trace, and the kernels in all.

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


class StreamGapsEntry(msgspec.Struct):
    """The time between the kernels of one stream, and that in its kernels of computation and communication
    (`exposed_ms`: that no stream's computation hides); `reason`: why it is not known how much waited for the host.
    """

    rank: int | None
    device: int | None
    stream: int
    kernels: int
    busy_ms: float
    compute_ms: float
    comm_ms: float
    exposed_ms: float
    gaps: int
    gap_ms: float
    gaps_known: int
    launch_bound: int | None
    launch_bound_ms: float | None
    host_wait_ms: float | None
    reason: str | None


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
    reason: str | None


class KernelEntries(msgspec.Struct):
    """The kernels of traces; `reasons`: kind of rows -> what traces lack of them."""

    by_name: list[KernelTotalEntry]
    totals: list[KernelTotalEntry]
    gaps: list[StreamGapsEntry]
    reasons: dict[str, list[str]]
    left_out: dict[str, int]


class TraceEntry(msgspec.Struct, kw_only=True):
    """One trace. `devices`: those that its rows are on, unknown ones left out. `counters`: how many rows are odd, and
    how (`aorta.read.traces.health.COUNTERS`).
    """

    path: str
    format: str
    clock: str
    rank: int | None
    world_size: int | None
    host: str | None
    devices: list[int]
    steps: int
    counters: dict[str, int]
    notes: list[str]


class TraceEntries(msgspec.Struct):
    """What a dataset has that was read from traces."""

    whole: dict[str, Any]
    slowdowns: list[SlowdownEntry]
    kernels: KernelEntries
