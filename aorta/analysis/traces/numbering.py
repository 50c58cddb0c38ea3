"""Collectives that a source does not number -> numbers by their order, where order identifies them.

Enters: a trace, and for each collective the step and what it is. Leaves: numbers that are equal on all ranks for the
same collective. Must not: number those of a device. Windows are cut where the host marked them and a device runs behind
its host, so that a step may hold other collectives on other ranks, even where their count agrees.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from aorta.analysis.traces.table import Trace
from aorta.timeline.arrays import Int64

MOST_COUNTED: Final = 1 << 20


def order_identifies(trace: Trace) -> bool:
    """Whether steps are marked on the clock and the threads that the collectives ran on: gloo's, on a CPU."""
    return trace.platform == "cpu" and bool(len(trace.windows))


def ordinals(place: Int64, code: Int64) -> Int64:
    """How many of its code (what it is) the place (the step) has, and which of them this is, in one number. Rows are in
    order of time. Ranks that have a different count in a step then match nothing, rather than something else.
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
