"""Metrics of this machine's processor, all cores together, through psutil: for a run without an accelerator.

Power needs privileges on Linux and is not read. Must not start a program.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import psutil

from aorta.records.device_values import Values, ask_all

_log = logging.getLogger(__name__)
_CPUS = Path("/sys/devices/system/cpu")
_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
"""Drivers of processor sensors: Intel, AMD, AMD, Arm."""
MIN_WINDOW_S = 0.1
"""Utilisation over less than ten ticks of the kernel's clock (10 ms) is mostly rounding."""


class Host:
    """The metrics source of every rank of this machine."""

    name = "psutil"
    min_interval_s = 0.1

    def __init__(self, cpus: Path = _CPUS) -> None:
        self._cpus = cpus
        self._before = self._times()
        self._throttled = self._throttle_count()

    def read(self) -> Values:
        """The current values; utilisation and throttling since the previous reading."""
        return ask_all(
            {
                "temp_c": _temperature,
                "sclk_mhz": _clock,
                "util_pct": self._use,
                "mem_used_bytes": _memory,
                "throttle": self._throttle,
            }
        )

    def _use(self) -> float | None:
        at, busy, total = self._times()
        before_at, before_busy, before_total = self._before
        if at - before_at < MIN_WINDOW_S or total <= before_total:
            return None
        self._before = (at, busy, total)
        return 100.0 * (busy - before_busy) / (total - before_total)

    @staticmethod
    def _times() -> tuple[float, float, float]:
        """(monotonic time, processor time in use, total processor time), in seconds."""
        times = psutil.cpu_times()
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)  # already in user, nice
        return time.monotonic(), total - times.idle - getattr(times, "iowait", 0.0), total

    def _throttle(self) -> list[str] | None:
        count, before = self._throttle_count(), self._throttled
        self._throttled = count
        if count is None or before is None:
            return None
        return ["thermal"] if count > before else []

    def _throttle_count(self) -> int | None:
        """How often packages were throttled by temperature; only Intel's driver counts this."""
        counts = []
        for file in self._cpus.glob("cpu[0-9]*/thermal_throttle/package_throttle_count"):
            try:
                counts.append(int(file.read_text()))
            except (OSError, ValueError):
                continue
        return sum(counts) if counts else None

    def settings(self) -> dict[str, Any]:
        """The clock governor's settings."""
        no_turbo = self._setting("intel_pstate/no_turbo")
        try:
            frequency = psutil.cpu_freq()
        except Exception as error:  # noqa: BLE001  psutil's errors vary by call; the other settings are still known; logged
            _log.info("device telemetry: the processor's clock limit is not known: %s: %s", type(error).__name__, error)
            frequency = None
        return {
            "governor": self._setting("cpu0/cpufreq/scaling_governor"),
            "turbo": None if no_turbo is None else no_turbo == "0",
            "sclk_max_mhz": (frequency.max or None) if frequency else None,
        }

    def _setting(self, name: str) -> str | None:
        try:
            return (self._cpus / name).read_text().strip() or None
        except OSError:
            return None

    def raw(self) -> dict[str, Any]:
        """Empty: psutil has no raw output."""
        return {}

    def close(self) -> None:
        """No-op: nothing is held."""


def _temperature() -> float | None:
    """The highest of the processor's sensors."""
    sensors = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
    found = [entry.current for driver in _SENSORS for entry in sensors.get(driver, []) if entry.current]
    return max(found, default=None)


def _clock() -> float | None:
    frequency = psutil.cpu_freq()
    return (float(frequency.current) or None) if frequency else None


def _memory() -> int:
    memory = psutil.virtual_memory()
    return int(memory.total - memory.available)
