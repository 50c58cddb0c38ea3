"""Converts between the microseconds of a Chrome trace and integer nanoseconds, exactly.

Kineto writes microseconds with three decimals. As float64 a number below 2^43 us is off by less than 2^-11 us, so its
nanosecond is still the nearest integer. For times counted from 1970 float64 loses the fraction of a microsecond
(docs/dev/measuring.md, W14), so their digits are read instead. A trace holds many times, so whole columns
are converted.

Must not: round to microseconds, convert through float64 what it cannot represent, or judge a duration (`trace_health`
counts those that are zero, negative or absurd).
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
_NUMBERS: Final = msgspec.json.Decoder(list[Exact])
_LONGEST: Final = 24
_WHOLE_DIGITS, _DECIMALS = 16, 3
"""Most digits of a number that is converted by column. A 19-digit number that does not fit becomes negative."""


def of_values(values: Sequence[Any]) -> tuple[Int64, NDArray[np.bool_]]:
    """Convert decoded JSON values (`Exact`) or their texts (`msgspec.Raw`) to nanoseconds.

    Returns:
        The times, and which values are numbers that a clock can show; the time is 0 where not.
    """
    return of_texts(values) if values and isinstance(values[0], msgspec.Raw) else of_numbers(values)


def of_numbers(values: Sequence[Exact]) -> tuple[Int64, NDArray[np.bool_]]:
    """Convert decoded JSON numbers to nanoseconds.

    Returns:
        The times, 0 where a value is no number, and which values are numbers.
    """
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
    """Convert the texts of JSON values to nanoseconds.

    Returns:
        The times, and which values are numbers that a clock can show; the time is 0 where not.
    """
    if texts and len(bytes(texts[0])) <= _WHOLE_DIGITS:  # longer numbers are counted from 1970
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            return of_numbers(_NUMBERS.decode(b"[%b]" % b",".join(texts)))
    return _of_digits(list(map(bytes, texts)))


def _of_digits(texts: list[bytes]) -> tuple[Int64, NDArray[np.bool_]]:
    found, known = np.zeros(len(texts), np.int64), np.zeros(len(texts), bool)
    # Plain decimals are read by column, all of one shape (length and place of the point) at once.
    cells = np.array(texts, f"S{_LONGEST}")
    length, point = np.char.str_len(cells), np.char.find(cells, b".")
    digits = cells.view(np.uint8).reshape(len(texts), _LONGEST) - np.uint8(ord("0"))
    shapes, shape_of = np.unique(length * _LONGEST + point, return_inverse=True)
    for shape in range(len(shapes)):
        rows = np.flatnonzero(shape_of == shape)
        columns = [at for at in range(length[rows[0]]) if at != point[rows[0]]]
        whole = int(point[rows[0]]) if point[rows[0]] >= 0 else len(columns)
        decimals = len(columns) - whole
        if not 1 <= whole <= _WHOLE_DIGITS or decimals > _DECIMALS or (point[rows[0]] >= 0 and not decimals):
            continue
        chosen = digits[rows][:, columns]
        plain = (chosen <= 9).all(axis=1)
        places = 10 ** np.arange(len(columns) - 1, -1, -1, dtype=np.int64) * 10 ** (_DECIMALS - decimals)
        value = chosen.astype(np.int64) @ places
        plain &= (value >= 0) & (value < LARGEST_NS)
        found[rows[plain]], known[rows[plain]] = value[plain], True
    for row in np.flatnonzero(~known).tolist():
        value = of_text(texts[row])
        if value is not None and abs(value) < LARGEST_NS:
            found[row], known[row] = value, True
    return found, known


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
