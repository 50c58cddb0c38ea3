"""Host clocks: read together, and converted from monotonic time to the wall clock (docs/dev/measuring.md, R7).

    anchor = read_clocks()
    to_realtime_ns(time.perf_counter_ns(), anchor)                           # with one reading, while a run lasts
    WallTime([header.clock, footer.clock]).realtime_ns(step.start_mono_ns)   # with all readings, afterwards

`time.perf_counter_ns` is CLOCK_MONOTONIC on Linux; every `_mono_ns` in the record is on that clock. Must not know about
devices (their events are placed on this clock by `aorta.instrument`), or compare hosts (`clock_offsets` does).
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

from aorta.records.schema import ClockReading

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TRIES = 5
# CLOCK_BOOTTIME exists on Linux only; elsewhere MONOTONIC is the nearest thing, and the boot id stays empty.
_BOOTTIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def read_clocks() -> ClockReading:
    """REALTIME, BOOTTIME and MONOTONIC of one instant: the tightest of a few tries.

    MONOTONIC is read before and after the others; half that bracket is the stated uncertainty.
    """
    readings = []
    for _ in range(_TRIES):
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        realtime = time.clock_gettime_ns(time.CLOCK_REALTIME)
        boottime = time.clock_gettime_ns(_BOOTTIME)
        after = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        readings.append(ClockReading(realtime, boottime, (before + after) // 2, (after - before + 1) // 2))
    return min(readings, key=lambda reading: reading.uncertainty_ns)


def to_realtime_ns(monotonic_ns: int, anchor: ClockReading) -> int:
    """Wall-clock nanoseconds (Unix epoch) of a CLOCK_MONOTONIC instant, as of `anchor`."""
    return monotonic_ns - anchor.monotonic_ns + anchor.realtime_ns


def boot_id() -> str:
    """Identity of this boot: BOOTTIME and MONOTONIC of two processes compare only when it is equal. "" if unknown."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


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
