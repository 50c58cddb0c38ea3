"""Parses a selection of ranks: `all`, `"0, 2, 4"`, a list, or one number -> a set.

Must not know how many ranks there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def selected_ranks(asked: Any) -> frozenset[int] | None:
    """The selected global ranks; None = every rank, an empty set = none.

    Raises:
        ValueError: names the part that is not a rank.
    """
    if isinstance(asked, str):
        text = asked.strip().lower()
        if text == "all":
            return None
        return frozenset(_rank(part) for part in text.split(",") if part.strip())
    if isinstance(asked, Iterable):
        return frozenset(_rank(part) for part in asked)
    return frozenset({_rank(asked)})


def _rank(part: Any) -> int:
    text = str(part).strip()
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{part!r} is not a rank: give all, a list such as [0,2], or a string such as '0, 2'")
    return int(text)
