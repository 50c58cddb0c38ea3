"""Microseconds as a trace writes them -> integer nanoseconds, exactly.

Kineto writes microseconds with three decimals. As float64 a number below 2^43 us is off by less than 2^-11 us, so its
nanosecond is still the nearest integer; one of 2026 counted from 1970 is not (W14), and there the digits are read.

Enters: numbers as JSON decoded them, or their text. Leaves: int64 nanoseconds. Must not: round to microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Final

import numpy as np

from aorta.analysis.traces.kineto.structs import DigitEvent, Event
from aorta.timeline.arrays import Int64

EXACT_BELOW_US: Final = 2.0**43
LARGEST_NS: Final = 2**62
"""Instants beyond it could overflow when a base is added; no clock shows them."""


def usable(microseconds: object) -> bool:
    """Whether a decoded time is a number that float64 holds to the nanosecond."""
    return isinstance(microseconds, float) and abs(microseconds) < EXACT_BELOW_US


def imprecise(event: Event | DigitEvent) -> bool:
    """Whether float64 lost digits of a time of this event."""
    ts, dur = event.ts, event.dur
    return (isinstance(ts, float) and abs(ts) >= EXACT_BELOW_US) or (isinstance(dur, float) and dur >= EXACT_BELOW_US)


def from_floats(microseconds: Sequence[float]) -> Int64:
    """Nanoseconds of float64 microseconds, each of magnitude below `EXACT_BELOW_US`."""
    values = np.asarray(microseconds, np.float64)
    whole = np.floor(values)
    return whole.astype(np.int64) * 1000 + np.rint((values - whole) * 1000).astype(np.int64)


def from_digits(text: bytes) -> int | None:
    """Nanoseconds of a JSON number, or None where it is none or no clock shows it; half a nanosecond goes to even."""
    whole, _, decimals = text.partition(b".")
    if len(whole) < 17 and len(decimals) <= 3 and decimals.isdigit() == bool(decimals):
        digits = whole[1:] if whole[:1] == b"-" else whole
        if digits.isdigit():
            size = int(digits) * 1000 + int(decimals.ljust(3, b"0"))
            return -size if whole[:1] == b"-" else size
    try:
        exact = Decimal(text.decode())
        if not exact.is_finite() or exact.adjusted() > 18:
            return None
        found = int((exact * 1000).to_integral_value())
    except (InvalidOperation, UnicodeDecodeError, ValueError):
        return None
    return found if abs(found) < LARGEST_NS else None
