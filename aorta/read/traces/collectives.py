"""Numbers the collectives of a trace, so that `aorta.read.matching` finds them on other ranks, whatever the source.

A source without sequence numbers has its collectives numbered by their order, where order identifies them. On a device
it identifies nothing: steps are cut where the host marked them and the device runs behind its host, so a step may hold
different collectives on different ranks even if their count agrees.

Must not: match collectives of different ranks by their time (W11).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from aorta.read.frames import NO_TIME, UNNUMBERED, CollectiveName, Collectives, Groups
from aorta.read.traces.interval_table import NULL, IntervalClass, Intervals, Trace, collectives_of
from aorta.timeline.arrays import Int64
from aorta.timeline.classes import KINDS, UNKNOWN_KIND

MOST_COUNTED: Final = 1 << 20
UNKNOWN_GROUP: Final = "unknown"
"""Group name of collectives whose process group the trace does not state."""
END_SOURCE: Final = "trace"
"""Ends of collectives are as the trace has them."""


def ordinals(step: Int64, code: Int64) -> Int64:
    """Return one number from how many collectives of its code its step has, and which of them this one is;
    rows in order of time. Because the count is part of it, ranks that disagree on it match nothing rather than the
    wrong collective.
    """
    groups = Groups(step, code)
    return groups.sizes[groups.of_row] * MOST_COUNTED + groups.position


def collectives_in(trace: Trace, rows: Intervals, steps: Int64 | None, start_ns: Int64) -> Collectives:
    """Return the collectives that start inside a step of one device, by step, then start.

    Args:
        rows: of the device.
        steps: numbers of the steps, ascending; None: the whole trace is one.
        start_ns: of each step.
    """
    table = collectives_of(rows.take(rows.cls == IntervalClass.COMM))
    if steps is not None:
        table = table.take(np.isin(table.step, steps))
    step = np.zeros(len(table), np.int64) if steps is None else np.searchsorted(steps, table.step)
    order = np.lexsort((table.start_ns, step))
    table, step = table.take(order), step[order]
    distinct = Groups(table.kind, table.group, table.bytes, table.dtype)
    names = tuple(
        CollectiveName(
            KINDS[kind] if kind != NULL else UNKNOWN_KIND,
            table.groups[group] if group != NULL else UNKNOWN_GROUP,
            size,
            table.dtypes[dtype] if dtype != NULL else None,
            END_SOURCE,
        )
        for kind, group, size, dtype in zip(
            *(column[distinct.first].tolist() for column in (table.kind, table.group, table.bytes, table.dtype)),
            strict=True,
        )
    )
    numbers = ordinals(step, distinct.of_row)
    # Order identifies where steps are marked on the clock and threads that collectives ran on, as with gloo on a CPU.
    identified = trace.platform == "cpu" and len(trace.windows)
    by_order = numbers if identified else UNNUMBERED - numbers % MOST_COUNTED
    return Collectives(
        step=step,
        name=distinct.of_row,
        seq=np.where(table.seq != NULL, table.seq, by_order),
        issue_ns=np.full(len(table), NO_TIME),  # the trace does not record when it was issued
        start_ns=table.start_ns - start_ns[step],
        end_ns=table.end_ns - start_ns[step],
        names=names,
    )
