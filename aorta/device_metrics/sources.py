"""Sources of device metrics by a library, and which physical device a rank computes on, as these tools name it.

NVML (`pip install nvidia-ml-py`, imported as `pynvml`) was read on an H200, `amdsmi` of the installed ROCm (`pip
install /opt/rocm/share/amd_smi`) on no device. torch counts visible devices, management tools all of them; the PCI
address is the same in both. Units: NVML gives milliwatts, MHz, bytes and whole percents (nvml.h); amdsmi degrees
Celsius, watts, MHz, percent, MiB. Must not run a program.
"""

from __future__ import annotations

import importlib
import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from aorta.distributed.topology import platform_of
from aorta.errors import DeviceUnreadable
from aorta.records.device_values import Values, first, number, whole
from aorta.records.schema import Platform

_VISIBLE: dict[str, tuple[str, ...]] = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    # ROCR_VISIBLE_DEVICES hides devices from HIP, which then counts what is left.
    "rocm": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
}
T = TypeVar("T")
BYTES_PER_MIB = 1 << 20
_PCI = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.?([0-7])?", re.IGNORECASE)


class SampleSource(Protocol):
    """A source of readings. `min_interval_s`: reading more often costs more than it tells."""

    name: str
    min_interval_s: float

    def read(self) -> Values:
        """Return the current values.

        Raises:
            DeviceUnreadable: nothing could be read; says why.
        """

    def settings(self) -> dict[str, Any]:
        """Return the device's settings when the run began: power cap, clock limits and locks; JSON types."""

    def raw(self) -> dict[str, Any]:
        """Return the fields of the record that hold the raw output of the last reading; none by default."""
        return {}

    def close(self) -> None:
        """Release resources; a reading in progress ends soon. Never raises."""


@dataclass(frozen=True)
class DeviceIdentity:
    """One device. `pci` as 0000:83:00.0, `uuid` without prefix, `index` among all devices; None: not known."""

    platform: Platform
    pci: str | None = None
    uuid: str | None = None
    index: int | None = None


def identify(device: torch.device, environment: Mapping[str, str] = os.environ) -> DeviceIdentity:
    """Return the identity of torch's `device`."""
    platform = platform_of(device)
    if platform not in _VISIBLE:
        return DeviceIdentity(platform)
    ordinal = device.index or 0
    properties = torch.get_device_module(device).get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    pci = None
    parts: list[Any] = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    if all(isinstance(part, int) for part in parts):  # older versions of torch give the uuid alone
        pci = "{:04x}:{:02x}:{:02x}.0".format(*parts)
    return DeviceIdentity(platform, pci, str(uuid) if uuid else None, physical_index(platform, ordinal, environment))


def physical_index(platform: Platform, ordinal: int, environment: Mapping[str, str]) -> int | None:
    """Return the index of the `ordinal`-th visible device among all; None where variables do not list it by number."""
    if environment.get("ROCR_VISIBLE_DEVICES") and platform == "rocm":
        return None
    for name in _VISIBLE[platform]:
        if name in environment:
            shown = environment[name].split(",")
            return int(shown[ordinal]) if ordinal < len(shown) and shown[ordinal].strip().isdigit() else None
    return ordinal


def pci_key(text: str | None) -> tuple[int, int, int, int] | None:
    """Parse a PCI address into domain, bus, device and function; the domain has eight digits (NVML), four or none."""
    match = _PCI.fullmatch(text.strip()) if text else None
    return None if match is None else (*(int(match[i] or "0", 16) for i in (1, 2, 3)), int(match[4] or 0))  # type: ignore[return-value]


def match(identity: DeviceIdentity, entries: Sequence[tuple[str | None, T]]) -> T | None:
    """Return the thing whose PCI address is this device's, of (address, thing) in the tool's order; None: ambiguous."""
    wanted = pci_key(identity.pci)
    if wanted is not None:
        keys = [(pci_key(pci), thing) for pci, thing in entries]
        for length in (4, 3):  # partitions of one card differ only in their function, which torch does not report
            same = [thing for key, thing in keys if key is not None and key[:length] == wanted[:length]]
            if len(same) == 1:
                return same[0]
        if any(key is not None for key, _ in keys):
            return None
    if len(entries) == 1:
        return entries[0][1]
    if identity.index is not None and identity.index < len(entries):
        return entries[identity.index][1]
    return None


def ask_all(asked: Mapping[str, Callable[[], Any]]) -> Values:
    """Call one function per field; one that fails gives None. For libraries where not every card has every sensor.

    Raises:
        DeviceUnreadable: all failed, as when the device is lost; includes the first error.
    """
    given, problems = _asked(asked)
    if not given:
        raise DeviceUnreadable(problems[0])
    return Values(**given)


def known(settings: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Return the settings, with null for those that cannot be read."""
    return {**dict.fromkeys(settings), **_asked(settings)[0]}


def _asked(functions: Mapping[str, Callable[[], Any]]) -> tuple[dict[str, Any], list[str]]:
    given, problems = {}, []
    for name, ask in functions.items():
        try:
            given[name] = ask()
        except Exception as error:  # noqa: BLE001  classes of lazily imported libraries
            problems.append(f"{name}: {type(error).__name__}: {error}")
    return given, problems


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


class Nvml(SampleSource):
    """One rank's NVIDIA device. Raises DeviceUnreadable without package or driver, or where the device is ambiguous."""

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
        nvml, device = self._nvml, self._device

        def throttle() -> list[str]:
            # Renamed in driver 535; older packages have the older name only.
            ask = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
            bits = (ask or nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(device)
            return sorted({name for bit, name in _REASONS.items() if bits & bit})

        return ask_all(
            {
                "temp_c": lambda: float(nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)),
                "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1e3,
                "sclk_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM)),
                "mclk_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_MEM)),
                "util_pct": lambda: float(nvml.nvmlDeviceGetUtilizationRates(device).gpu),
                "mem_used_bytes": lambda: int(nvml.nvmlDeviceGetMemoryInfo(device).used),
                "throttle": throttle,
            }
        )

    def settings(self) -> dict[str, Any]:
        """Return the power cap and clock limits. NVML does not report a lock by `nvidia-smi --lock-gpu-clocks`."""
        nvml, device = self._nvml, self._device
        graphics = nvml.NVML_CLOCK_GRAPHICS
        return known(
            {
                "power_cap_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(device) / 1e3,
                "power_cap_default_w": lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(device) / 1e3,
                "sclk_max_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(device, nvml.NVML_CLOCK_SM),
                "mclk_max_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(device, nvml.NVML_CLOCK_MEM),
                "sclk_application_mhz": lambda: nvml.nvmlDeviceGetApplicationsClock(device, graphics),
                "sclk_application_default_mhz": lambda: nvml.nvmlDeviceGetDefaultApplicationsClock(device, graphics),
            }
        )

    def close(self) -> None:
        with suppress(Exception):
            self._nvml.nvmlShutdown()


_VIOLATIONS = {
    "active_prochot_thrm": "prochot",
    "active_ppt_pwr": "power_cap",
    "active_socket_thrm": "thermal",
    "active_vr_thrm": "vr_thermal",
    "active_hbm_thrm": "memory_thermal",
}
"""Fields of `amdsmi_get_violation_status`, which cards since MI300 support."""
_THROTTLERS = (
    (range(8), "power_cap"),
    (range(16, 24), "current"),
    (range(32, 48), "thermal"),
    (range(56, 64), "other"),
)
"""Bits of `indep_throttle_status`, which earlier cards support (SMU_THROTTLER_*_BIT, amdgpu_smu.h of Linux)."""
_MICROWATTS_FROM = 10_000
"""A power cap is in watts up to ROCm 6 and in microwatts since; no card takes 10 kW, none is capped at 10 mW."""


class AmdSmi(SampleSource):
    """One rank's AMD device. Raises DeviceUnreadable where the package is missing or does not fit the driver, or the
    device is ambiguous.
    """

    name = "amdsmi"
    min_interval_s = 0.0

    def __init__(self, identity: DeviceIdentity) -> None:
        try:
            # Without a matching library it prints, and fails with whatever its wrapper runs into (KeyError, OSError).
            with redirect_stdout(io.StringIO()):
                self._smi: Any = importlib.import_module("amdsmi")
                self._smi.amdsmi_init()
        except Exception as error:
            raise DeviceUnreadable(
                f"amdsmi: cannot be used ({type(error).__name__}: {error}): pip install /opt/rocm/share/amd_smi"
            ) from error
        try:
            handles = list(self._smi.amdsmi_get_processor_handles())
            own = match(identity, [(str(self._smi.amdsmi_get_gpu_device_bdf(handle)), handle) for handle in handles])
        except Exception as error:
            self.close()
            raise DeviceUnreadable(f"amdsmi: {error}") from error
        if own is None:
            self.close()
            raise DeviceUnreadable(f"amdsmi: cannot tell which of {len(handles)} devices this rank computes on")
        self._device = own

    def read(self) -> Values:
        smi, device = self._smi, self._device
        kinds, current = smi.AmdSmiTemperatureType, smi.AmdSmiTemperatureMetric.CURRENT

        def temperature() -> float | None:
            try:  # the hot spot, as rocm-smi's junction; MI300 has no edge sensor
                return number(smi.amdsmi_get_temp_metric(device, kinds.HOTSPOT, current))
            except smi.AmdSmiException:
                return number(smi.amdsmi_get_temp_metric(device, kinds.EDGE, current))

        def power() -> float | None:
            info = smi.amdsmi_get_power_info(device)
            names = ("current_socket_power", "socket_power", "average_socket_power")
            return first(*(number(info.get(name)) or None for name in names))  # 0 may mean that it does not apply

        def clock(kind: str) -> float | None:
            info = smi.amdsmi_get_clock_info(device, getattr(smi.AmdSmiClkType, kind))
            return first(number(info.get("clk")), number(info.get("cur_clk")))  # renamed in ROCm 6.2

        def used_bytes() -> int | None:
            return whole(number(smi.amdsmi_get_gpu_vram_usage(device)["vram_used"]), BYTES_PER_MIB)

        def throttle() -> list[str] | None:
            reasons = None
            if hasattr(smi, "amdsmi_get_violation_status"):
                with suppress(smi.AmdSmiException):
                    reasons = violations(smi.amdsmi_get_violation_status(device))
            return throttlers(smi.amdsmi_get_gpu_metrics_info(device)) if reasons is None else reasons

        return ask_all(
            {
                "temp_c": temperature,
                "power_w": power,
                "sclk_mhz": lambda: clock("GFX"),
                "mclk_mhz": lambda: clock("MEM"),
                "util_pct": lambda: number(smi.amdsmi_get_gpu_activity(device)["gfx_activity"]),
                "mem_used_bytes": used_bytes,
                "throttle": throttle,
            }
        )

    def settings(self) -> dict[str, Any]:
        """Return the power cap, clock limits and locks, performance level."""
        smi, device = self._smi, self._device

        def cap(name: str) -> float | None:
            value = number(smi.amdsmi_get_power_cap_info(device).get(name))
            return value / 1e6 if value is not None and value >= _MICROWATTS_FROM else value

        def clock(kind: str, name: str) -> Any:
            value = smi.amdsmi_get_clock_info(device, getattr(smi.AmdSmiClkType, kind)).get(name)
            return None if value == "N/A" else value

        return known(
            {
                "power_cap_w": lambda: cap("power_cap"),
                "power_cap_default_w": lambda: cap("default_power_cap"),
                "sclk_max_mhz": lambda: clock("GFX", "max_clk"),
                "mclk_max_mhz": lambda: clock("MEM", "max_clk"),
                "sclk_locked": lambda: clock("GFX", "clk_locked"),
                "performance_level": lambda: str(smi.amdsmi_get_gpu_perf_level(device)),
            }
        )

    def close(self) -> None:
        with suppress(Exception):
            self._smi.amdsmi_shut_down()


def violations(status: Mapping[str, Any]) -> list[str] | None:
    """Return the throttle reasons in a violation status; None where the card reports none of the fields."""
    active = {name: status[key] for key, name in _VIOLATIONS.items() if isinstance(status.get(key), bool | int)}
    return sorted(name for name, on in active.items() if on) if active else None


def throttlers(metrics: Mapping[str, Any]) -> list[str] | None:
    """Return the throttle reasons in the metrics of an earlier card; None where it does not report them."""
    bits = metrics.get("indep_throttle_status")
    if isinstance(bits, int) and not isinstance(bits, bool) and bits != 0xFFFF_FFFF_FFFF_FFFF:
        return sorted({name for bits_of_name, name in _THROTTLERS if any(bits >> bit & 1 for bit in bits_of_name)})
    on = metrics.get("throttle_status")
    return None if not isinstance(on, bool | int) else ["other"] if on else []
