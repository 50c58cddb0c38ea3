"""Numbers as text for people: the one place that says with how many digits.

Enters: a value and its unit. Leaves: text. Must not: choose words, or compute a number.
"""

from __future__ import annotations

from typing import Final

DIGITS: Final = {"ms": 3, "ratio": 4, "GB/s": 3}
"""Digits behind the point, by unit of a metric."""


def number(value: float | None, unit: str, *, fewer: int = 0) -> str:
    """A value without its unit; unknown is `null`. `fewer` digits are for a place with little room."""
    return "null" if value is None else f"{value:.{DIGITS[unit] - fewer}f}"


def size_name(count: int | None) -> str:
    """Bytes with three digits, no zeros at the end behind the point; 1 MB = 1e6. None and -1 are not told."""
    if count is None or count < 0:
        return "unknown size"
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            digits = 2 if count < 10 * size else 1 if count < 100 * size else 0
            text = f"{count / size:.{digits}f}"
            return f"{text.rstrip('0').rstrip('.') if digits else text} {unit}"
    return f"{count} B"
