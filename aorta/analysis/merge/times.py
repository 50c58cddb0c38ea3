"""Microseconds as a trace writes them <-> integer nanoseconds, exactly.

Enters: the text of a `ts` or `dur`. Leaves: integers and their text. Must not: put an absolute time through a float
(W14).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path

import msgspec

from aorta.errors import InputError

_FIXED = re.compile(rb"(-?)(\d+)(?:\.(\d{1,3}))?")


def microseconds_to_ns(raw: bytes) -> int:
    """Nanoseconds of a `ts` or `dur`, exact to its last digit.

    Raises:
        ValueError: it is no number.
    """
    if (match := _FIXED.fullmatch(raw)) is not None:
        sign, whole, part = match.groups()
        value = int(whole) * 1000 + (int(part.ljust(3, b"0")) if part else 0)
        return -value if sign else value
    try:
        return round(Decimal(raw.strip(b'"').decode()) * 1000)
    except (InvalidOperation, UnicodeDecodeError, OverflowError) as error:
        raise ValueError(f"{raw[:40]!r} is not a number of microseconds") from error


def ns_to_microseconds(value: int) -> bytes:
    """Kineto's form: microseconds with three decimals."""
    whole, part = divmod(abs(value), 1000)
    return b"%s%d.%03d" % (b"-" if value < 0 else b"", whole, part)


def time_ns(event: Mapping[str, msgspec.Raw], key: str, path: Path) -> int:
    """`event[key]` in nanoseconds.

    Raises:
        InputError: it is no number; names the file.
    """
    try:
        return microseconds_to_ns(bytes(event[key]))
    except ValueError as error:
        raise InputError(f"{path}: not a trace event: its {key}: {error}") from error
