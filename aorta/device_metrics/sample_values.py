"""The values that every source gives, in common units, and helpers that parse the sources' notations.

Must not turn a missing value into 0.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

from aorta.errors import DeviceUnreadable

BYTES_PER_MIB = 1 << 20
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
# Bounded, or a long row of digits would be tried from each of them to its end.
_MHZ = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s{0,8}MHz", re.IGNORECASE)
_PCI = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.?([0-7])?", re.IGNORECASE)


@dataclass(frozen=True)
class Values:
    """One reading. None: the source does not provide it. `throttle`: why clocks are reduced now; empty: they are
    not.
    """

    temp_c: float | None = None
    power_w: float | None = None
    sclk_mhz: float | None = None
    mclk_mhz: float | None = None
    util_pct: float | None = None
    mem_used_bytes: int | None = None
    throttle: list[str] | None = None

    @property
    def empty(self) -> bool:
        """Whether no value is known."""
        return all(getattr(self, field.name) is None for field in fields(self))


class SampleSource(Protocol):
    """A source of readings. `min_interval_s`: reading more often costs more than it tells."""

    name: str
    min_interval_s: float

    def read(self) -> Values:
        """The current values.

        Raises:
            DeviceUnreadable: nothing could be read; says why.
        """

    def settings(self) -> dict[str, Any]:
        """The device's settings when the run began: power cap, clock limits and locks; JSON types."""

    def raw(self) -> dict[str, Any]:
        """Fields of the record that hold the raw output of the last reading."""

    def close(self) -> None:
        """Release resources; a reading in progress ends soon. Never raises."""


def number(value: object) -> float | None:
    """A number as tools write it: 87, "87 %", {"value": 87, "unit": "%"}; None for "N/A", lists, NaN, booleans."""
    if isinstance(value, Mapping):
        return number(value.get("value"))
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, str):
        match = _NUMBER.match(value.strip())
        value = match[0] if match else None
    if not isinstance(value, str | int | float):
        return None
    try:
        found = float(value)
    except OverflowError:  # an integer beyond floats
        return None
    return found if math.isfinite(found) else None


def megahertz(value: object) -> float | None:
    """The clock in "(300Mhz)" or "1: (300Mhz)", where the first number may be a level."""
    match = _MHZ.search(value) if isinstance(value, str) else None
    return number(match[1] if match else value)


def whole(value: float | None, factor: float = 1) -> int | None:
    """`value * factor` as an integer."""
    return None if value is None or not math.isfinite(value * factor) else round(value * factor)


def first(*values: float | None) -> float | None:
    """The first value that is not None."""
    return next((value for value in values if value is not None), None)


def pci_key(text: str | None) -> tuple[int, int, int, int] | None:
    """Domain, bus, device and function of a PCI address; NVML writes eight digits of domain, others four, or none."""
    match = _PCI.fullmatch(text.strip()) if text else None
    return None if match is None else (*(int(match[i] or "0", 16) for i in (1, 2, 3)), int(match[4] or 0))  # type: ignore[return-value]


def json_after_words(text: str) -> Any:
    """The JSON document in the output of a tool that may print warnings before it (even "[WARNING] ...").

    Raises:
        DeviceUnreadable: there is none.
    """
    decoder = json.JSONDecoder()
    for match in re.finditer(r"^[ \t]*[\[{]", text, re.MULTILINE):
        try:
            found, _ = decoder.raw_decode(text, match.end() - 1)
        except (ValueError, RecursionError):  # ValueError: not JSON, or a number of more digits than Python takes
            continue
        if isinstance(found, dict) or (isinstance(found, list) and all(isinstance(part, dict) for part in found)):
            return found
    raise DeviceUnreadable(f"no JSON in its output: {text.strip()[:200]!r}")


def ask_all(asked: Mapping[str, Callable[[], Any]]) -> Values:
    """Call one function per field; one that fails gives None. For libraries where not every card has every sensor.

    Raises:
        DeviceUnreadable: all failed, as when the device is lost; includes the first error.
    """
    given: dict[str, Any] = {}
    problems = []
    for name, ask in asked.items():
        try:
            given[name] = ask()
        except Exception as error:  # noqa: BLE001  classes of lazily imported libraries; kept below
            problems.append(f"{name}: {type(error).__name__}: {error}")
    if not given:
        raise DeviceUnreadable(problems[0])
    return Values(**given)


def known(settings: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """The settings, with null for those that cannot be read."""
    found: dict[str, Any] = {}
    for name, ask in settings.items():
        try:
            found[name] = ask()
        except Exception:  # noqa: BLE001  as in `ask_all`; null means not known
            found[name] = None
    return found
