"""Converts between the microseconds of a Chrome trace and integer nanoseconds, exactly, by whole columns.

Kineto writes microseconds with three decimals. As float64 a number below 2^43 us is off by less than 2^-11 us, so its
nanosecond is still the nearest integer. For times counted from 1970 float64 loses the fraction of a microsecond
(docs/dev/measuring.md, W14), so their digits are read instead. Must not: round to microseconds, convert through float64
what it cannot represent, or judge a duration (`trace_health` counts those that are zero, negative or absurd).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.timeline.arrays import Int64

LARGEST_NS: Final = 2**62
"""146 years after the clock's zero, which no clock shows. The difference of two later instants would not fit into 64
bits, nor would their sum with a base.
"""
_EXACT_BELOW_US: Final = 2.0**43
_LARGEST_US: Final = LARGEST_NS // 1000
Exact: TypeAlias = (
    Annotated[int, msgspec.Meta(gt=-_LARGEST_US, lt=_LARGEST_US)]
    | Annotated[float, msgspec.Meta(gt=-_EXACT_BELOW_US, lt=_EXACT_BELOW_US)]
    | str
    | None
)
"""The microseconds of which decoding loses no digit; msgspec refuses all others."""
_DECIMALS: Final = 3
_EXACT: Final = msgspec.json.Decoder(list[Exact])
_WHOLE_NS: Final = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(gt=-LARGEST_NS, lt=LARGEST_NS)]])


def of_values(values: Sequence[Any]) -> tuple[Int64, NDArray[np.bool_]]:
    """Convert decoded JSON values (`Exact`) or their texts (`msgspec.Raw`) to nanoseconds. Returned are the times, and
    which values are numbers that a clock can show; the time is 0 where not.
    """
    return of_texts(values) if values and isinstance(values[0], msgspec.Raw) else of_numbers(values)


def of_numbers(values: Sequence[Exact]) -> tuple[Int64, NDArray[np.bool_]]:
    """Convert decoded JSON numbers; returns as `of_values`."""
    kinds = set(map(type, values))
    known = np.ones(len(values), bool)
    if not kinds <= {int, float}:
        known = np.array([isinstance(value, int | float) for value in values], bool)
        values = [value if isinstance(value, int | float) else 0 for value in values]
    if float not in kinds:
        return np.array(values, np.int64) * 1000, known
    numbers = np.array(values, np.float64)
    whole = np.floor(numbers)
    return whole.astype(np.int64) * 1000 + np.rint((numbers - whole) * 1000).astype(np.int64), known


def of_texts(texts: Sequence[bytes | msgspec.Raw]) -> tuple[Int64, NDArray[np.bool_]]:
    """Convert the texts of JSON values; returns as `of_values`."""
    plain = list(map(bytes, texts))
    joined = b"[%b]" % b",".join(plain)
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        return of_numbers(_EXACT.decode(joined))
    if joined.count(b".") == len(plain) and all(text[-4:-3] == b"." for text in plain):
        with suppress(msgspec.DecodeError, UnicodeDecodeError):  # three decimals: without the point these are ns
            return np.array(_WHOLE_NS.decode(joined.replace(b".", b"")), np.int64), np.ones(len(plain), bool)
    each = [value if (value := of_text(text)) is not None and abs(value) < LARGEST_NS else None for text in plain]
    known = np.array([value is not None for value in each], bool)
    return np.array([value or 0 for value in each], np.int64), known


def of_text(text: bytes) -> int | None:
    """Return the nanoseconds of the text of a JSON number, also beyond `LARGEST_NS`; half a nanosecond rounds to even.
    None where it is no number, or has more than 19 digits before the point.
    """
    whole, _, decimals = text.partition(b".")
    if len(whole) < 17 and len(decimals) <= _DECIMALS and decimals.isdigit() == bool(decimals):
        digits = whole[1:] if whole[:1] == b"-" else whole
        if digits.isdigit():
            size = int(digits) * 1000 + int(decimals.ljust(_DECIMALS, b"0"))
            return -size if whole[:1] == b"-" else size
    try:
        exact = Decimal(text.decode())
        if not exact.is_finite() or exact.adjusted() > 18:
            return None
        return int((exact * 1000).to_integral_value())
    except (InvalidOperation, UnicodeDecodeError, ValueError):
        return None


def of_value(text: bytes) -> int:
    """Return the nanoseconds of the text of a `ts` or `dur`, with or without quotes.

    Raises:
        ValueError: it is not a number of microseconds.
    """
    found = of_text(text.strip(b'"'))
    if found is None:
        raise ValueError(f"{text[:40]!r} is not a number of microseconds")
    return found


def as_text(value_ns: int) -> bytes:
    """Return microseconds with three decimals, as Kineto writes them."""
    whole, part = divmod(abs(value_ns), 1000)
    return b"%s%d.%03d" % (b"-" if value_ns < 0 else b"", whole, part)
