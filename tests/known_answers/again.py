"""A measurement on a machine that others use too: a disturbed one is taken again, a wrong one is wrong each time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

ATTEMPTS = 3
T = TypeVar("T")


def undisturbed(
    paths: pytest.TempPathFactory, name: str, measure: Callable[[Path], T], holds: Callable[[T], None]
) -> T:
    """Measure into a new folder until `holds` raises no `AssertionError`; the last of `ATTEMPTS` is given as it is, and
    the tests that look at it fail.
    """
    for _ in range(ATTEMPTS):
        found = measure(paths.mktemp(name))
        try:
            holds(found)
        except AssertionError:
            continue  # disturbed, or wrong
        break
    return found
