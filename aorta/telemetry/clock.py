"""Host clocks, read together, and the conversion between them (docs/measuring.md, R7).

`time.perf_counter_ns` is CLOCK_MONOTONIC on Linux; every `_mono_ns` in the record is on that clock. Must not: know
about devices (their events are placed on this clock by `aorta.instrument`).
"""

from __future__ import annotations

import time
from pathlib import Path

from aorta.telemetry.schema import ClockReading

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
