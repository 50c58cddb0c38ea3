"""Finds the steps of a trace from the texts of its ranges (NVTX, ROCTx, `record_function`).

For example, `ProfilerStep#3` is step 3. One family of markers is used per process: of a trace that holds both
`iteration#7` and `ProfilerStep#3`, only one counts. Must not: guess a step from anything but a marker.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import numpy as np

from aorta.analysis.load.interval_table import NO_WINDOWS, NULL, Windows, windows
from aorta.timeline.arrays import Int64

MARKS: Final = ("aorta.step=", "iteration#", "ProfilerStep#")
"""What stands before the number, best first: AORTA's own two carry the global step, the third is `torch.profiler`'s
`step()`.
"""
MARK: Final = re.compile(rf"(?P<kind>{'|'.join(map(re.escape, MARKS))})(?P<step>\d{{1,18}})$")
FAMILIES: Final = (
    *((mark, re.compile(rf"^{re.escape(mark)}(\d{{1,18}})$")) for mark in MARKS),
    ("step", re.compile(r"^(?:train(?:ing)?[ _.]?)?(?:step|iter(?:ation)?)[ _:=#]{1,2}(\d{1,18})$", re.IGNORECASE)),
)
"""Families of step markers; where a trace holds several, the first one here is used."""


def step_numbers(texts: Sequence[str]) -> tuple[Int64, str | None]:
    """Step number of each text (`NULL` where it is no marker of the family used), and that family; None without any."""
    for family, pattern in FAMILIES:
        found = [pattern.match(text) for text in texts]
        if any(found):
            return np.array([int(match[1]) if match else NULL for match in found], dtype=np.int64), family
    return np.full(len(texts), NULL, np.int64), None


def step_windows(texts: Sequence[str], start_ns: Int64, end_ns: Int64, rank: int) -> tuple[Windows, tuple[str, ...]]:
    """Windows of the steps that ranges mark, and notes about them. Ranges of length 0 are no windows (a mark, or a
    range still open when the recording ended). Of several ranges of one step the earliest counts.
    """
    numbers, family = step_numbers(texts)
    used = np.flatnonzero((numbers != NULL) & (end_ns > start_ns))
    if family is None or not len(used):
        return NO_WINDOWS, ("no step markers: one window from the first to the last record",)
    used = used[np.argsort(start_ns[used], kind="stable")]
    first = used[np.unique(numbers[used], return_index=True)[1]]
    repeated = len(used) - len(first)
    notes = (f"{repeated} marker(s) {family}N repeat a step; the first of each is used",) if repeated else ()
    return windows(rank, numbers[first], start_ns[first], end_ns[first]), notes
