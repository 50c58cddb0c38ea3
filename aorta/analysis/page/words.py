"""Numbers and names -> words for people: the formats of every cell, card and sentence of the page.

Enters: plain JSON values. Leaves: text, never markup. Must not: round a null to 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from aorta.analysis.amounts import DIGITS

NONE: Final = "\u2013"
_SPACE: Final = "\u00a0"
"""Between a number and its unit, which stay on one line."""


def number(value: float | None, unit: str) -> str:
    """A value of a metric: ms and GB/s with three decimals, ratios with four."""
    return NONE if value is None else _minus(f"{value:,.{DIGITS.get(unit, 3)}f}")


def signed(value: float | None, unit: str) -> str:
    """A difference, with its sign."""
    return NONE if value is None else _minus(f"{value:+,.{DIGITS.get(unit, 3)}f}")


def percent(value: float | None, digits: int = 1) -> str:
    """A share: 0.123 is 12.3 %."""
    return NONE if value is None else _minus(f"{100 * value:,.{digits}f}{_SPACE}%")


def effect(value: float | None, kind: str) -> str:
    """An effect with its sign and unit: a difference of ratios in percentage points, a quotient - 1 in per cent."""
    if value is None:
        return NONE
    return _minus(f"{100 * value:+,.2f}{_SPACE}{_unit(kind)}")


def interval(found: Mapping[str, Any]) -> str:
    """From low to high, in the unit of `effect`."""
    low, high, kind = found.get("low"), found.get("high"), found["kind"]
    if low is None or high is None:
        return NONE
    return _minus(f"{100 * low:+,.2f} to {100 * high:+,.2f}{_SPACE}{_unit(kind)}")


def size(count: float | None) -> str:
    """Bytes, in units of 1000."""
    if count is None:
        return "size unknown"
    for unit, least in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= least:
            return f"{count / least:.3g}{_SPACE}{unit}"
    return f"{count:.0f}{_SPACE}B"


def count(value: int, what: str) -> str:
    """`1 launch`, `4 launches`."""
    plural = what + ("es" if what.endswith(("s", "ch")) else "s")
    return f"{value:,} {what if value == 1 else plural}"


def plain(text: str) -> str:
    """Text for a canvas: what stands between delimiters of TeX would be typeset, so they are taken apart."""
    for mark in ("$$", "\\[", "\\(", "\\]", "\\)"):
        text = text.replace(mark, mark[0] + "\u200b" + mark[1])
    return text


def shown(value: object) -> str:
    """Any JSON value as one line; strings as they are."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ", ".join(map(shown, value)) or "(none)"
    if isinstance(value, dict):
        return ", ".join(f"{key}={shown(each)}" for key, each in value.items()) or "(none)"
    return str(value)


def _unit(kind: str) -> str:
    return "points" if kind == "difference" else "%"


def _minus(text: str) -> str:
    return text.replace("-", "\u2212")
