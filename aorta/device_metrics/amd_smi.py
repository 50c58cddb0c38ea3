"""AMD devices through the program `amd-smi metric --json`: two shapes of output, "N/A", warnings before the JSON.

Since ROCm 7 the list of devices is under "gpu_data"; before, it is the whole document. "MB" are MiB there (a card of
192 GiB has 196592). A call uses a core for 0.3 to 1 s. Not run on a device here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aorta.device_metrics.device_identity import DeviceIdentity, match
from aorta.device_metrics.sample_values import BYTES_PER_MIB, Values, first, json_after_words, number, whole
from aorta.device_metrics.smi_programs import Program, checked
from aorta.errors import DeviceUnreadable

_SECTIONS = (
    "--power",
    "--temperature",
    "--clock",
    "--mem-usage",
    "--usage",
    "--throttle",
    "--violation",
    "--perf-level",
)
_VIOLATIONS = {
    "prochot": "prochot",
    "ppt": "power_cap",
    "socket_thermal": "thermal",
    "vr_thermal": "vr_thermal",
    "hbm_thermal": "memory_thermal",
}


class AmdSmiProgram:
    """The metrics source of one rank's device.

    Raises:
        DeviceUnreadable: the program is missing or fails, or the device cannot be identified.
    """

    name = "amd-smi"
    min_interval_s = 1.0

    def __init__(self, identity: DeviceIdentity) -> None:
        self._program = Program("amd-smi")
        words = checked(self._program, "metric", "--help")
        # Guests and older versions lack some sections; unless told which, it prints all of them, slowly.
        self._sections = [section for section in _SECTIONS if section in words]
        if "--throttle" in self._sections and "--violation" in self._sections:
            self._sections.remove("--violation")  # the later name of the same section
        cards = entries(json_after_words(checked(self._program, "list", "--json")))
        found = match(identity, [(str(card.get("bdf")), card.get("gpu")) for card in cards])
        if found is None:
            raise DeviceUnreadable(f"amd-smi: cannot tell which of {len(cards)} devices this rank computes on")
        self._index = str(found)

    def _card(self) -> Mapping[str, Any]:
        words = ("metric", "--gpu", self._index, *self._sections, "--json")
        for card in entries(json_after_words(checked(self._program, *words))):
            if str(card.get("gpu")) == self._index:
                return card
        raise DeviceUnreadable(f"amd-smi: no device {self._index} in its output")

    def read(self) -> Values:
        """The current values."""
        values = normalised(self._card())
        if values.empty:
            raise DeviceUnreadable("amd-smi: every value is N/A")
        return values

    def settings(self) -> dict[str, Any]:
        """Clock limits and locks, and the performance level, as reported by the metrics."""
        card = self._card()
        clock = _section(card, "clock")
        graphics, memory = _section(clock, "gfx_0"), _section(clock, "mem_0")
        locked = graphics.get("clk_locked")
        return {
            "sclk_max_mhz": number(graphics.get("max_clk")) or None,  # 0 MHz is seen for "not known"
            "mclk_max_mhz": number(memory.get("max_clk")) or None,
            "sclk_locked": {"ENABLED": True, "DISABLED": False}.get(
                str(locked), locked if locked in (True, False) else None
            ),
            "performance_level": card.get("perf_level") if card.get("perf_level") != "N/A" else None,
        }

    def raw(self) -> dict[str, Any]:
        """Empty: only rocm-smi's raw output is kept."""
        return {}

    def close(self) -> None:
        """End a call in progress."""
        self._program.abort()


def entries(document: Any) -> list[Mapping[str, Any]]:
    """The devices in either shape of output.

    Raises:
        DeviceUnreadable: it has neither shape.
    """
    found = document.get("gpu_data") if isinstance(document, Mapping) else document
    if not isinstance(found, list):
        raise DeviceUnreadable("amd-smi: neither a list of devices nor one under gpu_data")
    return [card for card in found if isinstance(card, Mapping)]


def normalised(card: Mapping[str, Any]) -> Values:
    """The values of one device of `amd-smi metric --json`."""
    power, temperature, memory = _section(card, "power"), _section(card, "temperature"), _section(card, "mem_usage")
    clocks = _section(card, "clock")
    return Values(
        temp_c=first(number(temperature.get("hotspot")), number(temperature.get("edge"))),
        power_w=first(
            *(number(power.get(name)) for name in ("socket_power", "current_socket_power", "average_socket_power"))
        ),
        sclk_mhz=_mean_clock(clocks, "gfx"),
        mclk_mhz=_mean_clock(clocks, "mem"),
        util_pct=number(_section(card, "usage").get("gfx_activity")),
        mem_used_bytes=whole(number(memory.get("used_vram")), BYTES_PER_MIB),
        throttle=_throttle(_section(card, "throttle"), power.get("throttle_status")),
    )


def _section(of: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of the document; empty where it is missing or "N/A"."""
    part = of.get(name)
    return part if isinstance(part, Mapping) else {}


def _mean_clock(clocks: Mapping[str, Any], kind: str) -> float | None:
    """Mean over the dies of a card (gfx_0 to gfx_7); missing ones are N/A."""
    parts = [value for name, value in clocks.items() if name == kind or name.startswith(f"{kind}_")]
    found = [clock for part in parts if (clock := number(_clock_of(part))) is not None]
    return sum(found) / len(found) if found else None


def _clock_of(part: object) -> object:
    return part.get("clk", part) if isinstance(part, Mapping) else part


def _throttle(section: Mapping[str, Any], status: object) -> list[str] | None:
    """MI300 and later report which limit was hit; earlier cards only that one was."""
    told = {name: str(section.get(f"{key}_violation_status")) for key, name in _VIOLATIONS.items()}
    known = {name: state for name, state in told.items() if state.upper() in ("ACTIVE", "NOT ACTIVE", "TRUE", "FALSE")}
    if known:
        return sorted(name for name, state in known.items() if state.upper() in ("ACTIVE", "TRUE"))
    return {"THROTTLED": ["other"], "UNTHROTTLED": []}.get(str(status))
