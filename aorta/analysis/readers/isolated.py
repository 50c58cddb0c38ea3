"""Steps of the isolated baselines (R10) as columns: as much of them as the two metrics need that rest on them.

Enters: steps of another phase than `train`. Leaves: two arrays, `ISOLATED` and computation in ms. Must not: reach any
column of the training's steps.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Final, get_args

import numpy as np
import numpy.typing as npt

from aorta.analysis.readers.lean import LeanStep
from aorta.telemetry.schema import Phase

PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
ISOLATED: Final = ("phase", "warmup", "wall_ns", "reasons", "coverage")
"""Integers of a step: place in `PHASES`, flag, start to end, and as in `scan.INTEGERS`."""


class IsolatedSteps:
    """Steps in the order of the file, 48 bytes each."""

    def __init__(self) -> None:
        self._integers = array("q")
        self._compute_ms = array("d")

    def __len__(self) -> int:
        return len(self._compute_ms)

    def add(self, line: LeanStep, reason: int, coverage: int) -> None:
        """Take one step in."""
        wall_ns = line.end_mono_ns - line.start_mono_ns
        self._integers.extend((PHASES.index(line.phase), line.warmup, wall_ns, reason, coverage))
        compute_ms = line.overlap.get("compute_ms")
        self._compute_ms.append(float("nan") if compute_ms is None else compute_ms)

    def counts(self) -> dict[str, int]:
        """Phase -> its steps, warm-up included."""
        return {PHASES[code]: count for code, count in Counter(self._integers[:: len(ISOLATED)]).items()}

    def columns(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """A row a name of `ISOLATED` and a column a step; computation in ms, NaN where it is null."""
        table = np.array(self._integers, np.int64).reshape(-1, len(ISOLATED)).T
        return np.ascontiguousarray(table), np.array(self._compute_ms, np.float64)
