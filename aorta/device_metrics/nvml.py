"""NVIDIA devices through NVML (`pip install nvidia-ml-py`, imported as `pynvml`). Calls release the interpreter lock.

Units: NVML gives milliwatts, MHz, bytes and whole percents (nvml.h). Not run on a device here.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any

from aorta.device_metrics.device_identity import DeviceIdentity
from aorta.device_metrics.sample_values import Values, ask_all, known
from aorta.errors import DeviceUnreadable

_REASONS = {
    0x4: "power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "thermal",
    0x40: "thermal",
    0x80: "power_brake",
    0x200: "board_limit",
    0x400: "reliability",
}
"""Bits of nvmlClocksEventReasons (nvml.h) that reduce clocks under load. Excluded: idle (0x1), application clock
settings (0x2) and the display's clock setting (0x100), which are not responses to load.
"""
_MILLI = 1000.0


class Nvml:
    """The metrics source of one rank's device.

    Raises:
        DeviceUnreadable: the package or the driver's library is missing, or the device cannot be identified.
    """

    name = "nvml"
    min_interval_s = 0.0

    def __init__(self, identity: DeviceIdentity) -> None:
        try:
            self._nvml: Any = importlib.import_module("pynvml")
        except ImportError as error:
            raise DeviceUnreadable("nvml: nvidia-ml-py is not installed: pip install nvidia-ml-py") from error
        try:
            self._nvml.nvmlInit()
            try:
                self._device = self._find(identity)
            except BaseException:
                self.close()
                raise
        except self._nvml.NVMLError as error:
            raise DeviceUnreadable(f"nvml: {error}") from error

    def _find(self, identity: DeviceIdentity) -> Any:
        nvml = self._nvml
        if identity.pci is not None:
            return nvml.nvmlDeviceGetHandleByPciBusId(identity.pci)
        if identity.uuid is not None:
            return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{identity.uuid.removeprefix('GPU-')}")
        count = nvml.nvmlDeviceGetCount()
        index = 0 if count == 1 else identity.index
        if index is None or index >= count:
            raise DeviceUnreadable(f"nvml: cannot tell which of {count} devices this rank computes on")
        return nvml.nvmlDeviceGetHandleByIndex(index)

    def read(self) -> Values:
        """The current values; those of a sensor that the card lacks are None."""
        nvml, device = self._nvml, self._device
        return ask_all(
            {
                "temp_c": lambda: float(nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)),
                "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(device) / _MILLI,
                "sclk_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM)),
                "mclk_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_MEM)),
                "util_pct": lambda: float(nvml.nvmlDeviceGetUtilizationRates(device).gpu),
                "mem_used_bytes": lambda: int(nvml.nvmlDeviceGetMemoryInfo(device).used),
                "throttle": self._throttle,
            }
        )

    def _throttle(self) -> list[str]:
        # Renamed in driver 535; older packages have the older name only.
        ask = getattr(self._nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        ask = ask or self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        bits = ask(self._device)
        return sorted({name for bit, name in _REASONS.items() if bits & bit})

    def settings(self) -> dict[str, Any]:
        """Power cap and clock limits. NVML does not report a lock by `nvidia-smi --lock-gpu-clocks`."""
        nvml, device = self._nvml, self._device
        graphics = nvml.NVML_CLOCK_GRAPHICS
        return known(
            {
                "power_cap_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(device) / _MILLI,
                "power_cap_default_w": lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(device) / _MILLI,
                "sclk_max_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(device, nvml.NVML_CLOCK_SM),
                "mclk_max_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(device, nvml.NVML_CLOCK_MEM),
                "sclk_application_mhz": lambda: nvml.nvmlDeviceGetApplicationsClock(device, graphics),
                "sclk_application_default_mhz": lambda: nvml.nvmlDeviceGetDefaultApplicationsClock(device, graphics),
            }
        )

    def raw(self) -> dict[str, Any]:
        """Empty: NVML has no raw output."""
        return {}

    def close(self) -> None:
        """Shut NVML down."""
        with suppress(Exception):
            self._nvml.nvmlShutdown()
