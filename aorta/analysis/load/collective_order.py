"""Numbers the collectives of a source that has no sequence numbers by their order, where order identifies them.

The same collective gets the same number on all ranks. On a device order identifies nothing: steps are cut where the
host marked them and the device runs behind its host, so a step may hold different collectives on different ranks even
if their count agrees. Must not: number collectives of a device.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from aorta.analysis.load.interval_table import Trace
from aorta.timeline.arrays import Int64

MOST_COUNTED: Final = 1 << 20


def order_identifies(trace: Trace) -> bool:
    """Whether steps are marked on the clock and threads that the collectives ran on, as with gloo on a CPU."""
    return trace.platform == "cpu" and bool(len(trace.windows))


def ordinals(place: Int64, code: Int64) -> Int64:
    """One number from how many collectives of its code its step has, and which of them this one is.

    Because the count is part of the number, ranks that disagree on it match nothing rather than the wrong collective.

    Args:
        place: the step of each row, rows in order of time.
        code: what each row is.
    """
    if not len(place):
        return np.zeros(0, np.int64)
    _, where = np.unique(place, return_inverse=True)
    group = where * (int(code.max()) + 1) + code
    order = np.argsort(group, kind="stable")
    _, first, counts = np.unique(group[order], return_index=True, return_counts=True)
    numbers = np.empty(len(group), np.int64)
    numbers[order] = np.arange(len(group)) - np.repeat(first, counts) + np.repeat(counts, counts) * MOST_COUNTED
    return numbers
