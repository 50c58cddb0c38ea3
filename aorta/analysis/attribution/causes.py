"""The ways of breaking a difference down -> its causes in one list, the one to look at first on top.

Enters: the rows of `breakdown`, and the one that the sentence is about. Leaves: some of these rows. Must not: form a
number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from aorta.analysis.attribution.keys import TRANSFER

SHOWN_CAUSES: Final = 12
LEAST_SHARE: Final = 0.05
_RANKED: Final = ("straggler", "collective", "kind", "block", "place", "balance", "part", "rank")
"""Dimensions of the list; of equal differences the earlier one tells more."""
_NOT_ITS_OWN: Final = 0.5
"""By how much the share of what is no longer hidden may differ from 1: beyond it, time in communication changed too."""


def ranked(
    found: dict[str, list[dict[str, Any]]], late: Sequence[dict[str, Any]], lead: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """The row of the sentence, then rows of all ways of breaking down, the largest difference first: at most
    `SHOWN_CAUSES`, each with at least 5 % of the whole. Ways overlap: rows are views of the same milliseconds, and are
    not to be added across dimensions. Empty where there is nothing to attribute (`lead` None).

    A way with one row says nothing and is left out. Of ranks only those are taken that stand out: beyond one and a half
    times an even part. What is no longer hidden is a cause where time in communication is about as before. Transfer is
    what communication is for: only waiting is a cause of its own.
    """
    if lead is None:
        return []
    rows = [*late]
    for dimension in _RANKED[1:]:
        of_it = [row for row in found[dimension] if "others" not in row]
        count = sum(row.get("others", 1) for row in found[dimension])
        if count > 1 or dimension == "collective":
            rows += [row for row in of_it if _tells(row, count)]
    large = [row for row in rows if row["share"] is not None and abs(row["share"]) >= LEAST_SHARE]
    large.sort(key=lambda row: (-abs(row["difference_ms"]), _RANKED.index(row["dimension"])))
    others = [row for row in large if {**row, "what": ""} != {**lead, "what": ""}]
    return [lead, *others][:SHOWN_CAUSES]


def _tells(row: dict[str, Any], count: int) -> bool:
    """`count`: rows of its dimension, those that are summed up in the last one too."""
    share = row["share"] or 0
    match row["dimension"]:
        case "rank":
            return bool(share > 1.5 / count)
        case "part":
            return bool(row["part"] != TRANSFER)
        case "balance":
            return bool(row["term"] == "hidden" and abs(share - 1) <= _NOT_ITS_OWN)
        case _:
            return True
