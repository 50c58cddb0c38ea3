"""Validates the times and device numbers of a file that may be damaged, so that arithmetic on them is safe.

Must not: judge a duration (zero, negative and absurd ones are counted by `health`, not refused).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from aorta.errors import InputError
from aorta.timeline.arrays import Int64

LATEST_NS: Final = 2**62
"""146 years after the clock's zero. Beyond it, the difference of two instants would not fit into 64 bits."""


def check_instants(place: str, what: str, start_ns: Int64, end_ns: Int64) -> None:
    """Refuse instants that no clock can show.

    Raises:
        InputError: a timestamp is missing (negative) or beyond `LATEST_NS`; names the row.
    """
    for name, column in (("start", start_ns), ("end", end_ns)):
        wrong = np.flatnonzero((column < 0) | (column > LATEST_NS))
        if len(wrong):
            row = int(wrong[0])
            raise InputError(
                f"{place}: {what} {row + 1}: its {name} is {int(column[row])} ns; from 0 to {LATEST_NS} is possible "
                f"({len(wrong)} such row(s)). Is the file damaged?"
            )


def check_devices(place: str, what: str, device: Int64) -> None:
    """Refuse device numbers that do not fit into the interval table.

    Raises:
        InputError: a number is below -1 (unknown) or longer than 31 bits.
    """
    wrong = np.flatnonzero((device < -1) | (device >= 2**31))
    if len(wrong):
        row = int(wrong[0])
        raise InputError(
            f"{place}: {what} {row + 1}: its device is {int(device[row])}; from 0 to 2147483647 is possible"
        )
