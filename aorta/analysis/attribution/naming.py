"""Names of collectives, places and parts as a sentence uses them.

Enters: parts of cells. Leaves: words. Must not: hold a number of a run.
"""

from __future__ import annotations

from typing import Final

from aorta.analysis.amounts import size_name
from aorta.analysis.attribution.cells import TRANSFER, UNKNOWN_PART, UNTOLD, WAIT, Cell, Place

PARTS: Final = {
    WAIT: "waiting for peers",
    TRANSFER: "transfer",
    UNKNOWN_PART: "waiting or transfer, which cannot be told apart",
}
UNTOLD_WHAT: Final = "communication that no row of the record covers"
_NO_PLACE: Final = "a place that the record does not tell"


def group_name(group: str, size: int | None) -> str:
    """As the record calls it, and its size."""
    return f"group {group!r} ({'size unknown' if size is None else f'{size} ranks'})"


def collective_name(cell: Cell) -> str:
    """Kind, size and group."""
    if cell.kind == UNTOLD:
        return UNTOLD_WHAT
    return f"{cell.kind} of {size_name(cell.bytes)} on {group_name(cell.group, cell.size)}"


def order_name(cell: Cell, parallel: str) -> str:
    """Which of the step: the bucket, where DDP issues one all-reduce a bucket."""
    if cell.kind == UNTOLD:
        return UNTOLD_WHAT
    if parallel == "ddp" and cell.kind == "allreduce":
        return f"bucket {cell.order} ({collective_name(cell)})"
    return f"{collective_name(cell)}, number {cell.order} of its kind in the step"


def place_name(place: Place) -> str:
    """A pass of a block, or work beside it."""
    if place.phase is None:
        return _NO_PLACE
    return place.phase if place.block is None else f"{place.phase} of {place.block}"


def amount(value_ms: float) -> str:
    """Milliseconds for a sentence, three digits or so, no sign."""
    value = abs(value_ms)
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 1 else f"{value:.3f} ms"


def percent(share: float) -> str:
    """A share in whole per cent; none is called 0 or 100 that is not."""
    if 0 < share < 0.005:
        return "less than 1 %"
    if 0.995 <= share < 0.9995:
        return "over 99 %"
    return f"{share:.0%}".replace("%", " %")
