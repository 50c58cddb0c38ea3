"""The tables at the end of a profiled run: which operators took the time, and the memory.

Enters: torch's averages of the last window. Leaves: text. Must not: be computed inside the loop: it takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def tables(averages: Any, rows: int, *, memory: bool, device: bool) -> Iterator[str]:
    """One table an ordering, each with a heading.

    Args:
        averages: `key_averages()` of a profile. rows: of each table.
        memory: allocations were recorded. device: an accelerator was recorded.
    """
    orders = ["cpu_time_total"]
    if memory:
        orders.append("self_cpu_memory_usage")
    if device:
        orders += ["device_time_total", "self_device_memory_usage"] if memory else ["device_time_total"]
    for order in orders:
        yield f"profiling: operators of the last window by {order}\n{averages.table(sort_by=order, row_limit=rows)}"
