"""Rules of single numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def at_least(minimum: int, values: dict[str, Any]) -> Iterator[str]:
    """A message for every value below `minimum`; null is left alone."""
    for key, value in values.items():
        if value is not None and not value >= minimum:
            yield f"{key}={value}: must be at least {minimum}"
