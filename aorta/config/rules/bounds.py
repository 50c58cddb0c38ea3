"""Rules of single numbers.

Must not know any key.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def at_least(minimum: int, values: dict[str, Any]) -> Iterator[str]:
    """A message for every value below `minimum`; None is accepted."""
    for key, value in values.items():
        if value is not None and not value >= minimum:
            yield f"{key}={value}: must be at least {minimum}"
