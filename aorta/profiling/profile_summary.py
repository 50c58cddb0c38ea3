"""Formats the tables at the end of a profiled run: which operators used the time, and the memory.

Must not be called inside the loop: it takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def tables(averages: Any, rows: int, *, memory: bool, device: bool) -> Iterator[str]:
    """One table per sort order, each with a heading.

    Args:
        averages: `key_averages()` of the last profile.
        rows: number of rows of each table.
        memory: whether allocations were recorded.
        device: whether an accelerator was recorded.
    """
    orders = ["cpu_time_total"]
    if memory:
        orders.append("self_cpu_memory_usage")
    if device:
        orders += ["device_time_total", "self_device_memory_usage"] if memory else ["device_time_total"]
    for order in orders:
        yield f"profiling: operators of the last window by {order}\n{averages.table(sort_by=order, row_limit=rows)}"
