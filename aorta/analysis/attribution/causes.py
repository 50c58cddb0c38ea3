"""Ranks the causes of a difference in one list, the one to look at first on top.

Selects among the rows of `breakdown`; the row that the sentence is about comes first. Must not: compute a number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from aorta.analysis.attribution.keys import TRANSFER

SHOWN_CAUSES: Final = 12
LEAST_SHARE: Final = 0.05
_RANKED: Final = ("straggler", "collective", "kind", "block", "place", "balance", "part", "rank")
"""Dimensions of the list; among equal differences the earlier dimension is more informative."""
_NOT_ITS_OWN: Final = 0.5
"""How far the share of communication that is no longer hidden may differ from 1; beyond it, time in communication
changed too.
"""


def ranked(
    found: dict[str, list[dict[str, Any]]], late: Sequence[dict[str, Any]], lead: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """The row of the sentence, then rows of all breakdowns by size of their difference: at most `SHOWN_CAUSES`, each
    with at least 5 % of the whole. Empty where there is nothing to attribute (`lead` None).

    Breakdowns overlap: their rows are views of the same milliseconds and must not be added across dimensions. A
    breakdown with a single row says nothing and is left out. Of the ranks only outliers are kept, with more than one
    and a half times an even share. Communication that is no longer hidden counts as a cause only where time in
    communication is about as before. Transfer is what communication is for, so only waiting is a cause of its own.
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
    """Whether a row is worth listing. `count`: rows of its dimension, including those summed up in the last one."""
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


_TOTALS: Final = {
    "exposed_comm_ms": "exposed communication",
    "comm_ms": "time in communication",
    "compute_comm_ms": "communication that is hidden",
    "compute_ms": "computation",
}


def told_rows(attribution: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows that hold every number of the sentence: the means of both sides, a straggler that it names, the
    breakdown of its cause, and transfer against waiting. Empty where there is nothing to attribute.
    """
    if not attribution.get("causes"):
        return []
    sides = attribution["reference"], attribution["candidate"]
    totals = [
        {
            "what": what,
            "reference_ms": sides[0][name],
            "candidate_ms": sides[1][name],
            "difference_ms": sides[1][name] - sides[0][name],
            "share": 1.0 if name == "exposed_comm_ms" else None,
        }
        for name, what in _TOTALS.items()
    ]
    lead, parts = attribution["causes"][0], attribution["dimensions"].get("part", [])
    shown = of_one_dimension(attribution)
    return [
        *totals,
        *([lead] if lead.get("dimension") == "straggler" else []),
        *shown,
        *([] if shown is parts else parts),
    ]


def of_one_dimension(attribution: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All rows of the breakdown that the first cause belongs to, so that their shares add up to 100 %.

    A straggler is in no breakdown: then it is waiting against transfer. Empty where there is nothing to attribute.
    """
    causes: Sequence[dict[str, Any]] = attribution.get("causes") or ()
    breakdowns: Mapping[str, list[dict[str, Any]]] = attribution.get("dimensions") or {}
    return breakdowns.get(causes[0].get("dimension", ""), breakdowns.get("part", [])) if causes else []
