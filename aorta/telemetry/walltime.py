"""Monotonic times of a record -> Unix time, through the clock readings between which they lie (R7).

Enters: the readings of a header, its anchors and a footer. Leaves: CLOCK_REALTIME nanoseconds. Must not: compare
hosts (that is `aorta.telemetry.clock_sync`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from fractions import Fraction

from aorta.telemetry.schema import ClockReading


class WallTime:
    """CLOCK_REALTIME along CLOCK_MONOTONIC. Between two readings it is interpolated, outside the nearest one holds."""

    def __init__(self, readings: Iterable[ClockReading]) -> None:
        self._readings = sorted(readings, key=lambda reading: reading.monotonic_ns)
        self._at = [reading.monotonic_ns for reading in self._readings]
        self.uncertainty_ns = max(reading.uncertainty_ns for reading in self._readings)

    def realtime_ns(self, monotonic_ns: int) -> int:
        """Unix nanoseconds of a CLOCK_MONOTONIC instant of this process."""
        after = bisect_right(self._at, monotonic_ns)
        before = self._readings[max(after - 1, 0)]
        ahead = before.realtime_ns - before.monotonic_ns
        if 0 < after < len(self._readings):
            later = self._readings[after]
            gained = later.realtime_ns - later.monotonic_ns - ahead
            ahead += round(
                Fraction(gained * (monotonic_ns - before.monotonic_ns), later.monotonic_ns - before.monotonic_ns)
            )
        return monotonic_ns + ahead
